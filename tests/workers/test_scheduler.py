"""Who is computed next, who is admitted, who is preempted: on the scheduler's own terms, no runner."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tandem.workers.block_pool import BlockPool
from tandem.workers.config import WorkerConfig
from tandem.workers.prefix_cache import PrefixCache
from tandem.workers.scheduler import Chunk, Scheduler
from tandem.workers.sequence import Sequence, Status
from tandem.workers.types import SamplingParams

PARAMS = SamplingParams(max_tokens=100, seed=0)


class Bench:
    """A scheduler, sequences with prompts that have nothing in common, and steps that always succeed."""

    def __init__(self, config: WorkerConfig, num_blocks: int) -> None:
        self.cache = PrefixCache(config.block_size)
        self.pool = BlockPool(num_blocks, self.cache)
        self.scheduler = Scheduler(config, self.pool, self.cache)
        self.incoming: list[Sequence] = []
        self._count = itertools.count()

    def add(
        self, prompt: int | list[int], *, wants_remote: bool = False, hold: bool = False, **fields: Any
    ) -> Sequence:
        order = next(self._count)
        tokens = [1000 * (order + 1) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        sequence = Sequence(
            str(order), 0, tokens, len(tokens), PARAMS, b"root", order, wants_remote=wants_remote, hold=hold, **fields
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[int, int]]:
        """One step in which everything sampled is token 7. Returns (order, number of tokens) of its chunks."""
        chunks: list[Chunk] = self.scheduler.schedule(self.incoming.append)
        for chunk in chunks:
            self.scheduler.settle(chunk)
            self.scheduler.advance(chunk.sequence, chunk.num_tokens)
            if chunk.sequence.num_uncomputed == 0:
                chunk.sequence.token_ids.append(7)
        self.pool.check()
        return [(chunk.sequence.order, chunk.num_tokens) for chunk in chunks]


@pytest.fixture
def make_bench(make_config: Callable[..., WorkerConfig]) -> Callable[..., Bench]:
    return lambda num_blocks, **changes: Bench(make_config(**changes), num_blocks)


MakeBench = Callable[..., Bench]


def test_prompt_is_cut_at_block_borders(make_bench: MakeBench) -> None:
    bench = make_bench(100, max_num_batched_tokens=16)
    bench.add(35)
    bench.add(3)
    assert bench.step() == [(0, 16)]
    assert bench.step() == [(0, 16)]
    assert bench.step() == [(0, 3), (1, 3)], "the last chunk is the rest, and leaves room for the next"


def test_decodes_come_first_and_prompts_get_what_is_left(make_bench: MakeBench) -> None:
    bench = make_bench(100, max_num_batched_tokens=16)
    bench.add(2)
    bench.step()
    bench.add(40)
    assert bench.step() == [(0, 1), (1, 12)], "15 are left, of which whole blocks make 12"
    assert bench.step() == [(0, 1), (1, 12)]


def test_newcomers_are_admitted_in_order_of_arrival(make_bench: MakeBench) -> None:
    bench = make_bench(10, max_num_batched_tokens=64)
    bench.add(12)
    bench.add(36)  # does not fit beside the first
    bench.add(4)  # would, but must not overtake
    assert bench.step() == [(0, 12)]
    assert [sequence.order for sequence in bench.scheduler.waiting] == [1, 2]


def test_who_has_a_priority_lets_others_pass_for_a_while(make_bench: MakeBench) -> None:
    bench = make_bench(100, max_num_seqs=1, max_num_batched_tokens=64)
    for queued_at, priority in ((0.0, 2), (0.0, 1), (0.0, 0), (9.0, 0), (9.0, 1), (11.0, 0), (21.0, 0)):
        bench.add(4, queued_at=queued_at, priority=priority)
    began = []
    while bench.scheduler.waiting:
        ((order, _),) = bench.step()
        began.append(order)
        bench.scheduler.remove(bench.scheduler.running.oldest, Status.FINISHED)
    assert began == [2, 3, 1, 5, 4, 0, 6]


def test_who_began_is_not_interrupted_by_who_comes_before_him(make_bench: MakeBench) -> None:
    bench = make_bench(100, max_num_batched_tokens=16)
    bench.add(40, priority=1)
    assert bench.step() == [(0, 16)]
    bench.add(8)
    assert bench.step() == [(0, 16)]
    assert bench.step() == [(0, 8), (1, 8)]


def test_number_of_running_sequences_is_bounded(make_bench: MakeBench) -> None:
    bench = make_bench(100, max_num_seqs=3, max_num_batched_tokens=64)
    for _ in range(5):
        bench.add(4)
    assert len(bench.step()) == 3
    assert len(bench.scheduler.running) == 3


def test_a_prompt_always_gets_on_beside_decodes(make_bench: MakeBench) -> None:
    """With 8 decodes from elsewhere and a budget of 8, a sequence that reads its prompt would starve."""
    bench = make_bench(100, max_num_batched_tokens=8, local_prefill_tokens=8)
    for _ in range(4):
        bench.add(12, wants_remote=True)
    reads = bench.add(20)
    for _ in range(4):
        bench.add(12, wants_remote=True)
    assert bench.step() == [(reads.order, 8)]
    assert len(bench.incoming) == 4, "four of eight: one place is taken, a block of budget is kept free"
    for sequence in bench.incoming:
        bench.scheduler.fill_ended(sequence, 12)
        sequence.token_ids.append(7)
    for _ in range(3):
        assert bench.step()[-1] == (reads.order, 4)


def test_cached_prefix_is_not_computed_again(make_bench: MakeBench) -> None:
    bench = make_bench(100, max_num_batched_tokens=64)
    first = bench.add(list(range(21)))
    bench.step()
    second = bench.add([*range(21), 99])
    third = bench.add(list(range(20)))
    assert bench.step() == [(0, 1), (1, 2), (2, 1)], "20 tokens are 5 cached blocks, but one token must be computed"
    assert second.block_ids[:5] == first.block_ids[:5]
    assert third.block_ids[:4] == first.block_ids[:4]
    assert third.block_ids[4] == first.block_ids[4], "the block that it copied and completed is owned once"


def test_same_prompt_twice_in_one_step_ends_in_one_copy(make_bench: MakeBench) -> None:
    bench = make_bench(7, max_num_batched_tokens=64)
    one, two = bench.add(list(range(12))), bench.add(list(range(12)))
    assert bench.step() == [(0, 12), (1, 12)]
    assert one.block_ids == two.block_ids
    assert bench.pool.counts().free == 4


def test_newcomers_leave_room_for_the_running_to_grow(make_bench: MakeBench) -> None:
    bench = make_bench(7, max_num_batched_tokens=64)
    bench.add(12)
    newcomer = bench.add(13)
    assert bench.step() == [(0, 12)], "4 of the 4 free blocks would leave none for the first"
    bench.scheduler.remove(bench.scheduler.running.oldest, Status.FINISHED)
    assert bench.step() == [(newcomer.order, 13)], "nobody runs: nothing need be left"


def test_youngest_is_preempted_and_keeps_its_blocks_cached(make_bench: MakeBench) -> None:
    bench = make_bench(7, max_num_batched_tokens=64)
    old, young = bench.add(12), bench.add(12)
    assert bench.step() == [(0, 12), (1, 12)]  # both need a fourth block now, and one is free
    assert bench.step() == [(0, 1)]
    assert young.status is Status.WAITING
    assert young.block_ids == []
    assert bench.pool.counts().cached == 3
    assert bench.scheduler.num_preemptions == 1
    for _ in range(4):
        assert bench.step() == [(0, 1)]
    assert bench.pool.counts().cached == 2, "the old one took a fifth"
    bench.scheduler.remove(old, Status.FINISHED)
    assert bench.step() == [(1, 5)], "eight of its thirteen tokens were still cached"
    assert bench.step() == [(1, 1)]


def test_preempted_goes_before_those_that_came_later(make_bench: MakeBench) -> None:
    bench = make_bench(7, max_num_batched_tokens=64)
    old, young = bench.add(12), bench.add(12)
    bench.step()
    late = bench.add(4)
    bench.step()
    assert list(bench.scheduler.waiting) == [young, late]
    bench.scheduler.remove(old, Status.FINISHED)
    assert bench.step() == [(young.order, 1), (late.order, 4)]


def test_sequences_that_hold_published_blocks_are_not_preempted(make_bench: MakeBench) -> None:
    bench = make_bench(8, max_num_batched_tokens=8)
    grows = bench.add(8)
    bench.step()
    holds = bench.add(20, hold=True)
    for _ in range(4):
        assert bench.step() == [(grows.order, 1), (holds.order, 4)]
    assert bench.step() == [(holds.order, 4)], "no block is free: the older one makes way for the published blocks"
    assert grows.status is Status.WAITING


def test_remote_sequence_waits_with_incoming_blocks(make_bench: MakeBench) -> None:
    bench = make_bench(100, max_num_batched_tokens=64, local_prefill_tokens=8)
    cached = bench.add(list(range(12)))
    bench.step()
    remote = bench.add([*range(12), *range(100, 110)], wants_remote=True)
    short = bench.add(8, wants_remote=True)
    assert bench.step() == [(cached.order, 1), (short.order, 8)], "a short one is read here"
    assert bench.incoming == [remote]
    assert remote.status is Status.INCOMING
    assert bench.pool.counts().incoming == 3
    assert remote.num_computed == 12


def test_remote_sequence_needs_no_budget(make_bench: MakeBench) -> None:
    bench = make_bench(100, max_num_batched_tokens=16, local_prefill_tokens=8)
    bench.add(64)
    remote = bench.add(64, wants_remote=True)
    local = bench.add(4)
    assert bench.step() == [(0, 16)]
    assert remote.status is Status.INCOMING
    assert local.status is Status.WAITING


def test_arrived_tokens_are_not_computed(make_bench: MakeBench) -> None:
    bench = make_bench(100, max_num_batched_tokens=64, local_prefill_tokens=8)
    remote = bench.add(22, wants_remote=True)
    assert bench.step() == []
    bench.scheduler.fill_ended(remote, 12)
    assert bench.pool.counts().incoming == 0
    assert bench.step() == [(0, 10)]
    assert len(bench.cache) == 5


def test_quarantine_replaces_blocks_or_sends_back(make_bench: MakeBench) -> None:
    bench = make_bench(8, local_prefill_tokens=8)
    remote = bench.add(24, wants_remote=True)
    bench.step()
    before = list(remote.block_ids)
    assert bench.scheduler.quarantine(remote, before[1:3])
    assert remote.block_ids[0] == before[0]
    assert remote.block_ids[3:] == before[3:]
    assert not set(remote.block_ids) & set(before[1:3])
    assert bench.pool.counts().quarantined == 2
    assert not bench.scheduler.quarantine(remote, remote.block_ids[:1]), "no block is left"
    assert remote.status is Status.WAITING
    assert bench.pool.counts().free == 5
    bench.pool.end_quarantine(before[1:3])
    assert bench.step() == [(0, 16)], "and it is not sent away again"
