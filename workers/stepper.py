"""The steps of one engine: decided, computed by the runner, accounted for.

    schedule() ─> Step ─> Pipeline: the runner computes it ─> results ─> apply() ─> [StepOutput, ...]

`step()` does it in place (offline use, tests); `run()` drives it for a server: between `schedule` and `apply` the event
loop is free, and blocks of steps in flight stay where they are until `apply`. If it `overlaps`, the next step is
scheduled and launched before the one in flight is applied, where that can be.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tandem.workers.batch import Batch, StepResult
from tandem.workers.outcomes import Outcomes
from tandem.workers.pipeline import Pipeline
from tandem.workers.scheduler import Chunk, Scheduler
from tandem.workers.sequence import Sequence
from tandem.workers.step_items import build_batch, host_need, sampled_rows
from tandem.workers.steps import Runner, Step, StepOutput, StepTimes


class Stepper(ABC):
    """What turns the scheduler's decisions into outputs. Callbacks are optional attributes, called on the accounting
    thread, and must not raise:

    `on_outputs(list)`   every `StepOutput` of a step of `run()`, at once
    `on_incoming(seq)`   a sequence became INCOMING: restore its `num_tier_blocks`, fetch what a peer holds beyond them
                         (`num_source_blocks`), and tell of both with `blocks_arrived`; if it `wants_remote`, hand it
                         over. End with exactly one of `handover_finished`, `fill_ended`, or, once cancelled,
                         `release_incoming`
    `before_step(batch)` a step is about to overwrite blocks
    `on_step(times)`     after each step
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, *, overlaps: bool) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.overlaps = overlaps
        """Whether steps may overlap. Can be changed at any time; pays where the runner's `launch` does not compute."""
        self.on_outputs: Callable[[list[StepOutput]], None] | None = None
        self.on_incoming: Callable[[Sequence], None] | None = None
        self.before_step: Callable[[Batch], None] | None = None
        self.on_step: Callable[[StepTimes], None] | None = None
        self.step_orders: Counter[str] = Counter()
        """Steps that were decided while another one was in flight ("ahead"), and why the others were not."""
        self._order = "first"
        self._in_flight: deque[Step] = deque()
        self._pipeline = Pipeline()
        self._outcomes = Outcomes(scheduler, scheduler.config.max_model_len, self._finish)
        self._wake = asyncio.Event()
        self._is_closed = False

    @abstractmethod
    def _finish(self, sequence: Sequence) -> None:
        """End a sequence, in whatever state it is, and forget it."""

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

    async def run(self) -> None:
        """Step until `close()`; sleep while there is nothing to compute. An error here is a bug of the accounting, or a
        device that is lost."""
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

    def schedule(self) -> Step | None:
        """Decide the next step. None: nothing to compute now, or not before the step in flight is applied. One may be
        in flight if it `can_be_followed`."""
        started = time.monotonic()
        previous = self._in_flight[-1] if self._in_flight else None
        if previous is not None and not self._can_follow(previous):
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
            self.on_step(StepTimes.of(step, execute_s, apply_s=time.monotonic() - started))
        return outputs

    # Inside

    def _next_step(self) -> Step | None:
        return None if self._pipeline.has_failed else self.schedule()

    def _can_follow(self, previous: Step) -> bool:
        assert len(self._in_flight) == 1, "two steps are in flight"
        if not previous.can_be_followed:
            return False
        can_run_ahead = self.scheduler.can_run_ahead()
        if not can_run_ahead:
            self._order = "blocks"
        return can_run_ahead

    def _make_step(self, chunks: list[Chunk], previous: Step | None, started: float) -> Step:
        rows = {} if previous is None else sampled_rows(previous.chunks)
        overlaps = self.overlaps or previous is not None
        step = Step(
            build_batch(chunks, self.scheduler.block_size, rows),
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
