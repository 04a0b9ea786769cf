"""One worker's engine: requests in, step outputs out. Accounting runs on one thread; only the runner runs elsewhere.

    step:  schedule() ─> Step ─> Pipeline: the runner computes it ─> results ─> apply() ─> [StepOutput, ...]

`step()` does it in place (offline use, tests); `run()` drives it for a server: between `schedule` and `apply` the event
loop is free, and every public method may be called: blocks of steps in flight stay where they are until `apply`. If it
`overlaps`, the next step is scheduled and launched before the one in flight is applied, where that can be.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from tandem.workers.batch import Batch, SampledToken, StepResult
from tandem.workers.block_key import root_key
from tandem.workers.block_pool import BlockPool
from tandem.workers.books import check_owners
from tandem.workers.config import WorkerConfig
from tandem.workers.constraint import validate_constraints
from tandem.workers.errors import RequestError
from tandem.workers.grammar import GrammarCache
from tandem.workers.new_sequences import constrain, sequences_of
from tandem.workers.outcomes import Outcomes
from tandem.workers.pipeline import Pipeline
from tandem.workers.pooling import PoolingMode
from tandem.workers.prefix_cache import CacheEvent, PrefixCache
from tandem.workers.scheduler import Chunk, Scheduler
from tandem.workers.sequence import Sequence, Status
from tandem.workers.step_items import build_batch, host_need, num_attended, sampled_rows
from tandem.workers.steps import STEP_FAILED, Runner, Step, StepOutput, StepTimes
from tandem.workers.types import (
    BlockCounts,
    FillSource,
    ModelIdentity,
    Request,
    Retention,
    SamplingParams,
    TokenLogprobs,
)
from tandem.workers.validation import validate_input, validate_request

__all__ = ["STEP_FAILED", "Engine", "Runner", "Step", "StepOutput", "StepTimes"]


class Engine:
    """See the module. Callbacks are optional attributes, called on the accounting thread, and must not raise:

    `on_outputs(list)`   every `StepOutput` of a step of `run()`, at once
    `on_incoming(seq)`   a sequence became INCOMING: restore its `num_tier_blocks`, fetch what a peer holds beyond them
                         (`num_source_blocks`), and tell of both with `blocks_arrived`; if it `wants_remote`, hand it
                         over. End with exactly one of `handover_finished`, `handover_abandoned`, or, once cancelled,
                         `release_incoming`
    `before_step(batch)` a step is about to overwrite blocks
    `on_step(times)`     after each step
    """

    def __init__(
        self,
        runner: Runner,
        config: WorkerConfig,
        num_blocks: int,
        identity: ModelIdentity,
        on_cache_event: CacheEvent | None = None,
        *,
        vocab_size: int = 1 << 32,
        overlaps: bool = False,
    ) -> None:
        self.runner = runner
        self.config = config
        self.identity = identity
        self.vocab_size = vocab_size
        self.cache = PrefixCache(config.block_size, on_cache_event, clock=time.monotonic)
        self.pool = BlockPool(num_blocks, self.cache)
        self.scheduler = Scheduler(config, self.pool, self.cache)
        self.on_outputs: Callable[[list[StepOutput]], None] | None = None
        self.on_incoming: Callable[[Sequence], None] | None = None
        self.before_step: Callable[[Batch], None] | None = None
        self.on_step: Callable[[StepTimes], None] | None = None
        self.grammars: GrammarCache | None = None
        """Compiles what requests ask for; prepare a grammar in it before `add`, which otherwise waits for it."""
        self._requests: dict[str, dict[int, Sequence]] = {}
        """Unfinished (HELD included) sequences by request id and choice."""
        self.can_generate = True
        """False: the model has no head, and gives embeddings alone."""
        self._arrivals = itertools.count()
        self._wake = asyncio.Event()
        self._is_closed = False
        self.overlaps = overlaps
        """Whether steps may overlap. Can be changed at any time; pays where the runner's `launch` does not compute."""
        self.step_orders: Counter[str] = Counter()
        """Steps that were decided while another one was in flight ("ahead"), and why the others were not."""
        self._order = "first"
        self._in_flight: deque[Step] = deque()
        self._pipeline = Pipeline()
        self._outcomes = Outcomes(self.scheduler, config.max_model_len, self._finish)

    # Requests

    def validate(self, request: Request, *, hold: bool = False) -> None:
        """Raises `RequestError` for a request that this worker could never finish."""
        self._check_is_new(request.request_id)
        if not self.can_generate:
            raise RequestError("this model gives embeddings alone", param="model", code="unsupported_model")
        validate_request(
            request,
            max_model_len=self.config.max_model_len,
            num_blocks=self.pool.num_blocks,
            block_size=self.config.block_size,
            max_running=self.scheduler.max_running,
            vocab_size=self.vocab_size,
            hold=hold,
        )
        validate_constraints(request.sampling, self.vocab_size)
        if request.sampling.grammar is not None and self.grammars is None:
            raise RequestError("this worker follows no grammars", param="grammar")

    def add(
        self, request: Request, *, wants_remote: bool = False, hold: bool = False, num_source_blocks: int = 0
    ) -> list[Sequence]:
        """Queue all choices of a request and return their sequences, lowest choice first. Validates.

        The lowest choice is the leader; its siblings follow when the prompt is in the cache. `wants_remote`: somebody
        else may compute the KV (decode worker). `hold`: compute the prompt and one token, then keep the blocks until
        `release` (prefill worker). `num_source_blocks`: so many first blocks of the prompt a peer is said to hold.
        """
        self.validate(request, hold=hold)
        sequences = sequences_of(
            *(request, self._root(request.salt), self._arrivals),
            wants_remote=wants_remote,
            hold=hold,
            num_source_blocks=num_source_blocks,
        )
        constrain(sequences, self.vocab_size, self.grammars)
        self._requests[request.request_id] = {sequence.choice: sequence for sequence in sequences}
        self.scheduler.add(sequences[0])
        self.wake()
        return sequences

    def hold_cached(
        self,
        request_id: str,
        token_ids: SequenceOf[int],
        salt: str,
        max_blocks: int,
        num_restorable: Callable[[SequenceOf[bytes]], int] = lambda keys: 0,
    ) -> Sequence | None:
        """Own the first blocks of a prompt, as far as they are cached here and at most `max_blocks`, for somebody who
        fetches them: a HELD sequence until `release` or `cancel`. None: not one is cached. Raises `RequestError`.

        `num_restorable(keys)`: how many of the blocks behind these the caller will bring from lower tiers. Then the
        sequence is INCOMING until `hold_arrived`, or, once cancelled, `release_incoming`."""
        self._check_is_new(request_id)
        sequence = self._unanswered(request_id, token_ids, salt, hold=True, status=Status.HELD)
        num_cached = self.scheduler.hold_cached(sequence, max_blocks)
        self.scheduler.expect_held(sequence, num_restorable(sequence.block_keys[num_cached:]))
        if not sequence.block_ids:
            return None
        self._requests[request_id] = {0: sequence}
        return sequence

    def add_embedding(
        self,
        request_id: str,
        token_ids: SequenceOf[int],
        pooling: PoolingMode,
        *,
        salt: str = "",
        retention: Retention | None = None,
        num_source_blocks: int = 0,
    ) -> Sequence:
        """Queue tokens whose embedding is wanted: a prompt that is read, by chunks like any other, and not continued.
        Raises `RequestError`."""
        self._check_is_new(request_id)
        capacity = self.pool.num_blocks * self.config.block_size
        validate_input(token_ids, max_tokens=min(self.config.max_model_len, capacity), vocab_size=self.vocab_size)
        sequence = self._unanswered(
            *(request_id, token_ids, salt),
            retention=retention or Retention(),
            pooling=pooling,
            num_source_blocks=num_source_blocks,
            queued_at=time.monotonic(),
        )
        self._requests[request_id] = {0: sequence}
        self.scheduler.add(sequence)
        self.wake()
        return sequence

    def _check_is_new(self, request_id: str) -> None:
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")

    def _unanswered(self, request_id: str, token_ids: SequenceOf[int], salt: str, **fields: Any) -> Sequence:
        """Tokens that are read, and not continued."""
        return Sequence(
            request_id=request_id,
            choice=0,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            params=SamplingParams(max_tokens=1, seed=0),
            root=self._root(salt),
            order=next(self._arrivals),
            **fields,
        )

    def cancel(self, request_id: str, choice: int | None = None) -> list[Sequence]:
        """Forget one choice of a request, or all of it, in whatever state; unknown ones are fine. No output follows. Of
        a beam search, only all of it: before its end no choice is anybody's.

        Blocks go back at once, except those of the step in flight (at its end) and those of INCOMING sequences. These
        sequences are returned: a pull may still write into them, so the caller must call `release_incoming` for each.
        """
        choices = self._requests.get(request_id, {})
        chosen = [
            sequence
            for index, sequence in choices.items()
            if choice is None or (index == choice and sequence.beams is None)
        ]
        incoming = [sequence for sequence in chosen if sequence.status is Status.INCOMING]
        for sequence in chosen:
            self._finish(sequence)
        self.wake()
        return incoming

    def release(self, sequence: Sequence) -> None:
        """A HELD sequence was handed over, or its lease has ended: its blocks become cached. Otherwise no effect."""
        if sequence.status is Status.HELD:
            self._finish(sequence)
            self.wake()

    # Fills, of which a handover is one. The ends of one also take a cancelled sequence, whose blocks they then free.

    def blocks_arrived(self, sequence: Sequence, num_tokens: int, source: FillSource) -> None:
        """The first `num_tokens` (whole blocks) of an INCOMING sequence have checked KV, the latest of it from
        `source`. Others may share these blocks at once, and nobody may write into them any more: the rest of a fill
        writes from `sequence.num_computed` on. No effect once it is cancelled."""
        if not sequence.is_finished:
            assert sequence.status is Status.INCOMING, sequence.status
            self.scheduler.blocks_arrived(sequence, num_tokens, source)
            self.wake()

    def hold_arrived(self, sequence: Sequence) -> bool:
        """No more blocks will be restored for an INCOMING sequence of `hold_cached`: it is HELD with those that it has.
        False: it was cancelled meanwhile."""
        if self.release_incoming(sequence):
            return False
        assert sequence.status is Status.INCOMING, sequence.status
        self.scheduler.hold_arrived(sequence)
        self.wake()
        return True

    def handover_finished(
        self, sequence: Sequence, first_token: SampledToken, prompt_logprobs: SequenceOf[TokenLogprobs] = ()
    ) -> StepOutput | None:
        """All tokens of an INCOMING sequence have KV, and this is the token that follows. It counts as sampled here
        (stop checks, output); the sequence joins the next step. `prompt_logprobs`: complete, if it `scores_prompt`.
        None: it was cancelled meanwhile."""
        if self.release_incoming(sequence):
            return None
        assert sequence.status is Status.INCOMING, sequence.status
        sequence.joined_at = time.monotonic()
        sequence.prompt_logprobs[:] = prompt_logprobs
        self.scheduler.arrived(sequence, len(sequence.token_ids))
        self.wake()
        return self._outcomes.take_token(sequence, first_token)

    def handover_abandoned(self, sequence: Sequence, num_valid_tokens: int) -> None:
        """No more KV will come, and nobody writes into its blocks any more. The first `num_valid_tokens` have checked
        KV; the full blocks of these are kept, the rest is computed here."""
        if self.release_incoming(sequence):
            return
        assert sequence.status is Status.INCOMING, sequence.status
        num_valid_tokens = min(num_valid_tokens, len(sequence.token_ids) - 1)
        sequence.joined_at = time.monotonic()
        self.scheduler.arrived(sequence, num_valid_tokens - num_valid_tokens % self.config.block_size)
        self.wake()

    def quarantine(self, sequence: Sequence, block_ids: list[int]) -> bool:
        """Somebody may still write into these blocks of an INCOMING sequence: set them aside until `end_quarantine`.

        `block_ids` must be all its blocks that may still be written (settle other pulls first): the rest may be freed.
        True: fresh blocks took their places in `sequence.block_ids`, and the handover goes on (try again, or abandon).
        False: there were none; the sequence went back to the queue, computes everything here, and this handover is
        over. A cancelled sequence just loses the blocks (True); it still needs `release_incoming`.
        """
        is_handover_alive = self.scheduler.quarantine(sequence, block_ids)
        self.wake()
        return is_handover_alive

    def end_quarantine(self, block_ids: list[int]) -> None:
        """Nobody writes into these quarantined blocks any more."""
        self.pool.end_quarantine(block_ids)
        self.wake()

    def release_incoming(self, sequence: Sequence) -> bool:
        """Free the blocks of a sequence that was INCOMING when it was cancelled. No pull may write into them any more.

        False: nothing to do (it is not cancelled, or this was done before).
        """
        if not sequence.is_finished or sequence.order not in self.scheduler.incoming:
            return False
        self.scheduler.end_incoming(sequence)
        self.wake()
        return True

    # The step

    def step(self) -> list[StepOutput]:
        """One whole step in this thread: what the oldest in flight did. An empty list: nothing could be computed, or
        nothing came of it."""
        while True:
            step = self._next_step()
            done = self._pipeline.turn(self.runner, step)
            if done is not None:
                return self.apply(done.step, done.results, done.execute_s)
            if step is None:
                return []

    def schedule(self) -> Step | None:
        """Decide the next step. None: nothing to compute now, or not before the step in flight is applied. One may be
        in flight if it `can_be_followed`."""
        started = time.monotonic()
        previous = self._in_flight[-1] if self._in_flight else None
        if previous is not None:
            assert len(self._in_flight) == 1, "two steps are in flight"
            if not previous.can_be_followed:
                return None
            if not self.scheduler.can_run_ahead():
                self._order = "blocks"
                return None
        incoming: list[Sequence] = []
        chunks = self.scheduler.schedule(incoming.append, is_ahead=previous is not None)
        for sequence in itertools.chain(incoming, (chunk.sequence for chunk in chunks)):
            if sequence.admitted_at is None:
                sequence.admitted_at = started
        step = self._make_step(chunks, previous, started) if chunks else None
        if step is not None or previous is None:
            self._order = "first"
        if self.on_incoming is not None:  # last: from here on it may call back, even at once
            for sequence in incoming:
                self.on_incoming(sequence)
        return step

    def apply(self, step: Step, results: SequenceOf[StepResult] | None, execute_s: float = 0.0) -> list[StepOutput]:
        """Account for an executed step, the oldest; `results` None: it failed. Sequences that were cancelled meanwhile,
        or had ended before this step when it was decided, yield no output."""
        started = time.monotonic()
        outputs: list[StepOutput] = []
        applied = self._in_flight.popleft()
        assert applied is step, "an older step is in flight"
        self._order = step.host_need or self._order
        for index, chunk in enumerate(step.chunks):
            sequence = chunk.sequence
            self.scheduler.settle(chunk)
            if sequence.is_finished:
                continue
            if results is None:
                outputs.append(self._outcomes.fail(sequence))
            else:
                outputs.append(self._outcomes.take(chunk, results[index]))
        if self.on_step is not None:
            apply_s = time.monotonic() - started
            num_tokens = sum(chunk.num_tokens for chunk in step.chunks)
            reads = [item for item in step.batch.items if len(item.token_ids) > 1]
            self.on_step(
                StepTimes(
                    len(step.chunks),
                    num_tokens,
                    step.schedule_s,
                    execute_s,
                    apply_s,
                    num_decodes=len(step.chunks) - len(reads),
                    num_attended=sum(map(num_attended, reads)),
                )
            )
        return outputs

    async def run(self) -> None:
        """Step until `close()`; sleep while there is nothing to compute. An error here is a bug of the accounting."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="runner") as executor:
            while not self._is_closed or not self._pipeline.is_empty:
                self._wake.clear()
                step = None if self._is_closed else self._next_step()
                if step is None and self._pipeline.is_empty:
                    await self._wake.wait()
                    continue
                done = await loop.run_in_executor(executor, self._pipeline.turn, self.runner, step)
                if done is None:
                    continue
                outputs = self.apply(done.step, done.results, done.execute_s)
                if outputs and self.on_outputs is not None:
                    self.on_outputs(outputs)

    def close(self) -> None:
        """Make `run()` return after the steps in flight. Sequences stay as they are."""
        self._is_closed = True
        self.wake()

    def wake(self) -> None:
        """Something changed that may let a sleeping `run()` go on. The engine's own methods do this themselves."""
        self._wake.set()

    # What a worker says of itself

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running) + len(self.scheduler.incoming)

    @property
    def num_waiting(self) -> int:
        """Queued sequences, siblings that wait for their leader included."""
        sequences = (s for choices in self._requests.values() for s in choices.values())
        return sum(s.status in (Status.WAITING, Status.BLOCKED) for s in sequences)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that this worker has still to compute before the sequences it knows can decode."""
        queued = sum(sequence.num_uncomputed for sequence in self.scheduler.waiting)
        return queued + sum(s.num_uncomputed for s in self.scheduler.running if s.num_uncomputed > 1)

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def counts(self) -> BlockCounts:
        return self.pool.counts()

    def check(self) -> None:
        """Raises AssertionError unless pool, cache and sequences agree on every block. For tests, and when idle."""
        self.pool.check()
        live = {id(s): s for choices in self._requests.values() for s in choices.values()}
        live.update({id(s): s for s in self.scheduler.incoming.values()})
        live.update({id(chunk.sequence): chunk.sequence for step in self._in_flight for chunk in step.chunks})
        check_owners(self.pool, live.values())

    # Inside

    def _root(self, salt: str) -> bytes:
        return root_key(self.config.cluster_key, self.identity, salt)

    def _next_step(self) -> Step | None:
        return None if self._pipeline.has_failed else self.schedule()

    def _make_step(self, chunks: list[Chunk], previous: Step | None, started: float) -> Step:
        rows = {} if previous is None else sampled_rows(previous.chunks)
        overlaps = self.overlaps or previous is not None
        step = Step(
            build_batch(chunks, self.config.block_size, rows),
            tuple(chunks),
            overlaps=overlaps,
            host_need=host_need(chunks) if overlaps else None,
        )
        if self.before_step is not None:
            self.before_step(step.batch)
        if overlaps:
            self.step_orders["ahead" if previous is not None else self._order] += 1
        step = replace(step, schedule_s=time.monotonic() - started)
        self._in_flight.append(step)
        return step

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence, Status.FINISHED)
        sequence.finished_at = time.monotonic()
        choices = self._requests[sequence.request_id]
        del choices[sequence.choice]
        if not choices:
            del self._requests[sequence.request_id]
