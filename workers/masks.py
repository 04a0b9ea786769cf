"""The masks of one step, computed in threads of their own while the model's part of the step runs.

    begin(specs) ──> rows with a grammar ──queue──> threads     llguidance needs no GIL
                       the step's logits are there ─> wait()    at most PATIENCE_S for a row, then it has to wait

A row whose mask takes long (some patterns take 0.3 s for one) is left out of this step, and of the next ones until its
mask is there; it computes its last token again and gets the same next one. Nobody else waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from weakref import WeakKeyDictionary

from tandem.workers.batch import LATER, Later, Refusal, SampleSpec
from tandem.workers.constraint import Constraint, NothingAllowed
from tandem.workers.grammar import Words

PATIENCE_S = 0.02
"""What a step waits for a row behind its logits, once: a row that was late is never waited for again while others go
on. Usual masks take 0.05 to 7 ms, beside the model's part of the step."""
NUM_THREADS = 4
"""One is enough until a row holds it up. With so many such rows at once others with a grammar wait, the rest do not."""

Mask = Words | Refusal | Later | None
"""Which tokens a row may choose; that it can choose none; that it is not known yet; or that it may choose any."""


class MaskMaker:
    """Of one runner, whose thread calls it. Rows without a grammar take microseconds and are done when needed."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="masks")
        self._late: WeakKeyDictionary[Constraint, Future[Mask]] = WeakKeyDictionary()
        """What is still computed, or was not fetched yet, of rows that were late."""

    def begin(self, specs: SequenceOf[SampleSpec], num_others: int = 0) -> Callable[[], list[Mask]] | None:
        """Call the result for one mask per spec, when the logits are there. None: nobody needs one.

        `num_others`: sequences that get on in this step and sample nothing.
        """
        constraints = [spec.constraint for spec in specs if spec.constraint is not None]
        if not constraints:
            return None
        if all(constraint.grammar is None for constraint in constraints):
            return lambda: [_mask(spec) for spec in specs]
        step = _Step(specs, self._late)
        if step.queue:
            self._executor.submit(step.drain)
        return lambda: self._wait(step, num_others)

    def _wait(self, step: _Step, num_others: int) -> list[Mask]:
        futures = [future for future in step.futures if future is not None]
        pending = wait(step.fresh, PATIENCE_S).not_done
        for _ in range(NUM_THREADS - 1):
            if not step.queue:
                break
            self._executor.submit(step.drain)  # the thread before is held up by one row: the others need not be
            pending = wait(pending, PATIENCE_S).not_done
        if len(futures) == len(step.specs) and not num_others and not any(future.done() for future in futures):
            wait(futures, PATIENCE_S, FIRST_COMPLETED)  # else steps would be computed for nobody
        return [self._take(spec, future) for spec, future in zip(step.specs, step.futures, strict=True)]

    def _take(self, spec: SampleSpec, future: Future[Mask] | None) -> Mask:
        if spec.constraint is None or future is None:
            return _mask(spec)
        if future.done():
            return future.result()
        self._late[spec.constraint] = future
        return LATER


class _Step:
    """What one step is to know. `futures` are aligned with `specs`, None for rows without a grammar."""

    def __init__(self, specs: SequenceOf[SampleSpec], late: WeakKeyDictionary[Constraint, Future[Mask]]) -> None:
        self.specs = specs
        self.fresh: list[Future[Mask]] = []
        self.queue: deque[tuple[SampleSpec, Future[Mask]]] = deque()
        self.futures = [self._future(spec, late) for spec in specs]

    def _future(self, spec: SampleSpec, late: WeakKeyDictionary[Constraint, Future[Mask]]) -> Future[Mask] | None:
        if spec.constraint is None or spec.constraint.grammar is None:
            return None
        future = late.pop(spec.constraint, None)
        if future is None:
            future = Future()
            self.fresh.append(future)
            self.queue.append((spec, future))
        return future

    def drain(self) -> None:
        """Compute what nobody has begun yet. Several threads may do this."""
        while self.queue:
            try:
                spec, future = self.queue.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                future.set_result(_mask(spec))
            except BaseException as error:  # noqa: BLE001  raised where the result is asked for
                future.set_exception(error)


def _mask(spec: SampleSpec) -> Mask:
    if spec.constraint is None:
        return None
    try:
        return spec.constraint.mask(spec.token_ids, spec.num_prompt_tokens)
    except NothingAllowed as error:
        return Refusal(str(error))
