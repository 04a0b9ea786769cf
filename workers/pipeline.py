"""Steps on their way through the runner, at most two: while the first is computed, the second waits behind it.

    turn(step 1) ─> launched                 nothing to collect yet: decide the next one meanwhile
    turn(step 2) ─> launched, step 1 collected         its results are applied while step 2 is computed
    turn(step 3) ─> launched, step 2 collected
    turn(None)   ─> step 3 collected

A step that cannot be followed is launched and collected in one turn: then everything happens one after the other.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

from tandem.workers.batch import StepResult
from tandem.workers.errors import DeviceLost
from tandem.workers.steps import Collect, Runner, Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Executed:
    """A step that is over. `results` are None when the runner raised: the batch fails, the worker goes on."""

    step: Step
    results: SequenceOf[StepResult] | None
    execute_s: float


@dataclass(frozen=True, slots=True)
class _Flight:
    step: Step
    collect: Collect | None
    """None: it could not be launched."""
    launched_at: float


class Pipeline:
    """Of one engine. `turn` runs in the runner's thread, never twice at once; the rest is asked in between. A step that
    fails is logged and takes only its own along, unless it raises `DeviceLost`."""

    def __init__(self) -> None:
        self._flights: deque[_Flight] = deque()
        self._collected_at = 0.0

    @property
    def is_empty(self) -> bool:
        return not self._flights

    @property
    def has_failed(self) -> bool:
        """Whether the last step could not be launched: its tokens do not exist, so nothing may follow them."""
        return bool(self._flights) and self._flights[-1].collect is None

    def turn(self, runner: Runner, step: Step | None) -> Executed | None:
        """Launch `step`, then wait for the oldest. None: there is only `step`, and it may be followed first."""
        is_alone = not self._flights
        if step is not None:
            self._flights.append(self._launch(runner, step))
            if is_alone and step.can_be_followed and not self.has_failed:
                return None
        return self._collect(self._flights.popleft()) if self._flights else None

    def _launch(self, runner: Runner, step: Step) -> _Flight:
        started = time.monotonic()
        if not step.overlaps:
            return _Flight(step, partial(runner.execute, step.batch), started)
        try:
            return _Flight(step, runner.launch(step.batch), started)
        except DeviceLost:
            raise
        except Exception:
            logger.exception("a step of %d sequences could not be launched", len(step.chunks))
            return _Flight(step, None, started)

    def _collect(self, flight: _Flight) -> Executed:
        results: SequenceOf[StepResult] | None = None
        if flight.collect is not None:
            try:
                results = _checked(flight.step, flight.collect())
            except DeviceLost:
                raise
            except Exception:
                logger.exception("a step of %d sequences failed", len(flight.step.chunks))
        started, self._collected_at = max(flight.launched_at, self._collected_at), time.monotonic()
        return Executed(flight.step, results, self._collected_at - started)


def _checked(step: Step, results: SequenceOf[StepResult]) -> SequenceOf[StepResult]:
    if len(results) != len(step.chunks):
        raise ValueError(f"{len(results)} results for {len(step.chunks)} items")
    return results
