"""The engine with everything at once, at random: clients, prefill workers, late writers, failing steps."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import msgspec
import pytest
from engine_play import MakeEngine, MakeRequest, fill, next_token, runner_of

from tandem.workers.batch import LATER
from tandem.workers.fake_runner import LaggingRunner, expected_tokens
from tandem.workers.sequence import Sequence
from tandem.workers.steps import Step, StepOutput
from tandem.workers.types import Retention


class World:
    """An engine of all roles at once, its clients, its prefill workers, and late writers. `check` after every act."""

    def __init__(self, rng: random.Random, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        self.rng = rng
        self.make_request = make_request
        self.published: set[bytes] = set()
        self.engine = make_engine(
            rng.choice([11, 14, 20, 40]),
            lambda kind, key: self.published.symmetric_difference_update({key}),
            max_num_batched_tokens=rng.choice([4, 8, 16, 64]),
            max_num_seqs=rng.choice([1, 3, 8]),
            local_prefill_tokens=rng.choice([0, 8]),
        )
        self.engine.on_incoming = self.handovers_append
        self.engine.cache.on_evict = self.on_evict
        self.engine.cache._clock = lambda: self.now
        self.engine.scheduler.admission.tiers = self
        self.engine.scheduler.admission.is_fill_faster = lambda sequence: rng.random() < 0.8
        self.now = 0.0
        self.stored: dict[bytes, Any] = {}
        """KV of evicted blocks, by key."""
        self.computed: dict[int, set[int]] = {}
        """Positions computed for a sequence, by its order."""
        self.handovers: list[Sequence] = []
        self.late_writes: list[list[int]] = []
        self.held: list[Sequence] = []
        self.lent: list[Sequence] = []
        """Held for a peer that fetches them, and being restored from the tier."""
        self.num_lent = 0
        self.flights: deque[tuple[Step, Callable[[], Any] | None]] = deque()
        """Steps in flight, oldest first; None: it could not be launched."""
        self.got: dict[tuple[str, int], list[int]] = {}
        self.num_finished = 0
        self.num_exact = 0
        self.num_filled = 0
        self.count = 0
        self.is_closing = False

    # A lower tier that forgets now and then

    def num_held(self, keys: SequenceOf[bytes]) -> int:
        return sum(1 for _ in itertools.takewhile(self.stored.__contains__, keys))

    def on_evict(self, key: bytes, parent_key: bytes | None, tokens: object, block_id: int, priority: int) -> None:
        self.stored[key] = runner_of(self.engine).kv[block_id].copy()
        while len(self.stored) > 20:
            del self.stored[self.rng.choice(list(self.stored))]

    def restore(self, sequence: Sequence) -> None:
        """What the tier still has of what it said it had, and then something from a peer."""
        first = sequence.num_computed // 4
        keys = sequence.block_keys[first : first + sequence.num_tier_blocks]
        num_held = self.num_held(keys)
        for index, key in enumerate(keys[:num_held], first):
            runner_of(self.engine).kv[sequence.block_ids[index]] = self.stored[key]
        self.engine.blocks_arrived(sequence, 4 * (first + num_held), "host")
        if sequence.num_source_blocks > first + num_held and not sequence.is_finished:
            end = 4 * self.rng.randrange(first + num_held, sequence.num_source_blocks + 1)
            fill(self.engine, sequence, sequence.num_computed, end)
            self.engine.blocks_arrived(sequence, end, "peer")
        self.check()

    # Everybody

    def handovers_append(self, sequence: Sequence) -> None:
        self.handovers.append(sequence)

    def act(self) -> None:
        self.now += self.rng.random()
        acts = [self.arrive] * 3 + [self.step] * 8 + [self.cancel, self.hand_over, self.hand_over, self.release]
        acts += [self.end_quarantine, self.lend, self.go_on_lending, self.go_on_lending, self.release]
        self.rng.choice(acts)()
        self.check()

    def check(self) -> None:
        self.engine.check()
        assert self.published == set(self.engine.cache.keys())
        for blocks in self.late_writes:
            runner_of(self.engine).kv[blocks] = self.rng.randrange(1 << 60)

    def arrive(self) -> None:
        if self.is_closing or len(self.engine._requests) > 12:
            return
        rng, self.count = self.rng, self.count + 1
        prompt = [*range(rng.randrange(3), rng.randrange(4, 25)), *rng.choices(range(3), k=rng.randrange(4))]
        max_tokens, seed = rng.randrange(1, 16), rng.randrange(2)
        emitted: dict[int, list[int]] = {}
        for choice in rng.sample(range(4), rng.choice([1, 1, 1, 3])):
            known = rng.randrange(max_tokens)
            emitted[choice] = expected_tokens(prompt, known, seed=seed, choice=choice)
        stop = tuple(range(100)) if rng.random() < 0.3 else ()
        bad = ((998, 999),) if rng.random() < 0.1 else ()  # never comes up, but nothing is decided ahead of it
        request = self.make_request(
            str(self.count),
            prompt,
            max_tokens=max_tokens,
            seed=seed,
            emitted=emitted,
            stop_token_ids=stop,
            bad_token_ids=bad,
            retention=Retention(priority=rng.choice([0, 35, 80]), duration_s=rng.choice([None, 5.0])),
            salt=rng.choice(["red", "red", "blue"]),
        )
        request = msgspec.structs.replace(request, priority=rng.choice([0, 0, 3]))
        kind = rng.choice([{}, {"wants_remote": True}, {"hold": True}])
        self.engine.add(request, **kind, num_source_blocks=rng.choice([0, 0, 3, 9]))

    def step(self) -> None:
        """Launch a step if one can be, now and then another one behind it; then the oldest ends."""
        while self.can_launch() and self.try_launch():
            self.meddle()
            if self.rng.random() < 0.3:
                return
        if not self.flights:
            return
        step, collect = self.flights.popleft()
        results = None if collect is None else self.some_later(step, collect())
        if self.rng.random() < 0.01:
            results = None
        self.meddle()
        for output in self.engine.apply(step, results):
            self.receive(output)

    def some_later(self, step: Step, results: list[Any]) -> list[Any]:
        """Now and then it is not known yet what may follow. Nothing was decided then."""
        if step.can_be_followed:
            return results
        return [LATER if result is not None and self.rng.random() < 0.05 else result for result in results]

    def can_launch(self) -> bool:
        """Nothing follows a step that could not be launched."""
        if not self.flights or len(self.flights) > 1:
            return not self.flights
        return self.engine.overlaps and self.flights[0][1] is not None

    def try_launch(self) -> bool:
        step = self.engine.schedule()
        if step is None:
            return False
        self.check()
        for chunk in step.chunks:
            positions = range(chunk.start, chunk.start + chunk.num_tokens)
            self.computed.setdefault(chunk.sequence.order, set()).update(positions)
        runner, collect = runner_of(self.engine), None
        if self.rng.random() >= 0.01:
            collect = runner.launch(step.batch)
        if isinstance(runner, LaggingRunner) and self.rng.random() < 0.3:
            runner.catch_up()
        self.flights.append((step, collect))
        return True

    def meddle(self) -> None:
        """The loop is free while a step is in flight: anything but another step may happen."""
        for _ in range(self.rng.randrange(3)):
            acts = [self.arrive, self.cancel, self.hand_over, self.release, self.end_quarantine]
            self.rng.choice([*acts, self.lend, self.go_on_lending])()
            self.check()

    def receive(self, output: StepOutput) -> None:
        sequence = output.sequence
        if output.token is None:
            return
        known = sequence.token_ids[sequence.num_prompt_tokens :]
        if (sequence.request_id, sequence.choice) not in self.got:
            self.check_cached(sequence)
        tokens = self.got.setdefault((sequence.request_id, sequence.choice), known[:-1])
        tokens.append(output.token.token_id)
        assert tokens == known
        if output.finish_reason is None and not sequence.hold:
            return
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert tokens == expected_tokens(prompt, len(tokens), seed=sequence.params.seed, choice=sequence.choice)
        assert sequence.hold or len(tokens) == sequence.params.max_tokens or output.finish_reason == "stop"
        self.num_finished += 1
        if sequence.hold:
            self.held.append(sequence)

    def check_cached(self, sequence: Sequence) -> None:
        """At its first token: what counts as cached was not computed for it, and all that was not counts."""
        prompt = range(sequence.num_prompt_tokens)
        num_found = len(set(prompt) - self.computed.get(sequence.order, set()))
        assert sequence.cached.total <= num_found
        if sequence.joined_at is None and sequence.num_admissions == 1:
            assert sequence.cached.total == num_found
            self.num_exact += 1

    def cancel(self) -> None:
        if self.engine._requests and self.rng.random() < 0.3:
            request_id = self.rng.choice(list(self.engine._requests))
            self.engine.cancel(request_id, self.rng.choice([None, None, 0, 1]))

    def release(self) -> None:
        if self.held:
            self.engine.release(self.held.pop(self.rng.randrange(len(self.held))))

    def hand_over(self) -> None:
        if not self.handovers:
            return
        sequence = self.handovers.pop(self.rng.randrange(len(self.handovers)))
        self.restore(sequence)
        fate = self.rng.random()
        if fate < 0.2 and not self.quarantine(sequence):
            return
        num_valid = self.rng.randrange(sequence.num_computed, len(sequence.token_ids) + 1)
        if sequence.is_finished:
            assert self.engine.release_incoming(sequence)
        elif not sequence.wants_remote and fate < 0.8:
            self.engine.fill_ended(sequence, sequence.num_computed)
            self.num_filled += sequence.cached.total > sequence.cached.pool
        elif fate < 0.5 or not sequence.wants_remote:
            fill(self.engine, sequence, sequence.num_computed, num_valid)
            self.engine.fill_ended(sequence, num_valid)
        else:
            fill(self.engine, sequence, sequence.num_computed, len(sequence.token_ids))
            output = self.engine.handover_finished(sequence, next_token(self.engine, sequence))
            assert output is not None
            self.receive(output)

    def lend(self) -> None:
        """A peer asks for the beginning of a prompt."""
        if self.is_closing or self.lent or self.rng.random() < 0.5:
            return
        self.count += 1
        tokens = [*range(self.rng.randrange(3), self.rng.randrange(16, 25))]
        sequence = self.engine.hold_cached(
            str(self.count), tokens, self.rng.choice(["red", "blue"]), self.rng.randrange(1, 7), self.num_held
        )
        if sequence is not None:
            (self.lent if sequence.num_tier_blocks else self.held).append(sequence)

    def go_on_lending(self) -> None:
        """The tier has brought some of it, or all that it still has; or the peer has left meanwhile."""
        if not self.lent:
            return
        sequence = self.rng.choice(self.lent)
        first, end = sequence.num_computed // 4, len(sequence.block_ids)
        has_more = self.rng.random() < 0.5
        num_arrived = self.rng.randrange(first, end + 1)
        for index in range(first, num_arrived):
            if not sequence.is_finished:
                fill(self.engine, sequence, 4 * index, 4 * index + 4)
        self.engine.blocks_arrived(sequence, 4 * num_arrived, "host")
        if has_more:
            return
        self.lent.remove(sequence)
        if self.engine.hold_arrived(sequence):
            assert len(sequence.block_ids) == num_arrived
            assert all(key in self.published for key in sequence.block_keys[:num_arrived])
            self.held.append(sequence)
            self.num_lent += num_arrived > first

    def quarantine(self, sequence: Sequence) -> bool:
        incoming = sequence.block_ids[sequence.num_computed // 4 :]
        late = [block for block in incoming if self.rng.random() < 0.5]
        self.late_writes.append(late)
        return self.engine.quarantine(sequence, late)

    def end_quarantine(self) -> None:
        if self.late_writes:
            self.engine.end_quarantine(self.late_writes.pop(0))

    def finish(self) -> None:
        """Nobody comes any more: everything must end, and every block come back."""
        self.is_closing = True
        for _ in range(2000):
            if self.engine.is_idle and not (self.handovers or self.late_writes or self.flights or self.lent):
                break
            self.step()
            self.hand_over()
            self.go_on_lending()
            self.release()
            self.end_quarantine()
            self.check()
        counts = self.engine.counts()
        assert self.engine.is_idle
        assert counts.free + counts.cached == counts.total


@pytest.mark.parametrize("seed", range(12))
def test_random_lives(make_engine: MakeEngine, make_request: MakeRequest, seed: int, overlaps: bool) -> None:
    world = World(random.Random(seed), make_engine, make_request)
    for _ in range(2000):
        world.act()
    world.finish()
    assert world.num_exact > 30
    assert world.num_filled > 5
    assert world.num_lent > 0
    assert world.num_finished > 70, "too few requests lived to their end for this to show anything"
    assert (world.engine.step_orders["ahead"] > 100) == overlaps
