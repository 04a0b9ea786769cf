"""The autotuner: times the candidates of each tunable op on this machine, and remembers the winners.

    report = tune(ops.tunables(workload), ops.device_key(), cache_path, deadline_s=60, progress=show)
    ops.use_choices(report.choices)

`tuning.py` holds the words, `tuning_rounds.py` the comparison of candidates, `tuning_cache.py` the file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal

from tandem.kernels.tuning import (
    Candidate,
    CandidateUnavailable,
    Choices,
    DeviceKey,
    Tunable,
    TunableOps,
    TuningKey,
    TuningWorkload,
    bucket_of,
    buckets_up_to,
)
from tandem.kernels.tuning_cache import Remembered, TuningLock, merge_results, read_results
from tandem.kernels.tuning_rounds import Clock, Measurement, NotMeasured, measure

__all__ = [
    "WAITING",
    "Candidate",
    "CandidateUnavailable",
    "Choices",
    "DeviceKey",
    "Progress",
    "Tunable",
    "TunableOps",
    "TuningKey",
    "TuningReport",
    "TuningResult",
    "TuningWorkload",
    "bucket_of",
    "buckets_up_to",
    "tune",
]

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many tunables of how many are done."""

WAITING = "waiting for another process that tunes"
SAVE_INTERVAL_S = 5.0
"""What a kill can cost."""


@dataclass(frozen=True, slots=True)
class TuningResult:
    """One tunable's outcome."""

    key: TuningKey
    choice: Candidate
    source: Literal["measured", "cache", "only", "default"]
    """"only": there is nothing to choose from. "default": there was no time to measure, or no candidate that runs."""
    seconds: dict[str, float]
    """Of one run, by candidate; a candidate's that was hopeless from few runs. Empty if nothing was measured."""
    unavailable: tuple[str, ...] = ()
    """Candidates that this device cannot run."""
    noise: float = 0.0
    """The relative difference that one candidate showed against itself."""
    num_rounds: int = 0


@dataclass(frozen=True, slots=True)
class TuningReport:
    """All outcomes, in the order of the tunables."""

    results: tuple[TuningResult, ...]
    elapsed_s: float

    @property
    def choices(self) -> Choices:
        return Choices({result.key: result.choice for result in self.results})

    def count(self, source: str) -> int:
        """How many results are of one source."""
        return sum(result.source == source for result in self.results)


def tune(
    tunables: Sequence[Tunable],
    device: DeviceKey,
    cache_path: Path | None,
    *,
    deadline_s: float,
    progress: Progress,
    force: bool = False,
    max_noise: float = inf,
    clock: Clock = time.perf_counter,
) -> TuningReport:
    """Choose a candidate for each tunable: from the cache file where it knows, else by measuring.

    `deadline_s` bounds it all, waiting for another process that tunes included; one call of an op may overrun it. What
    could not be measured by then keeps its default. `force` measures everything anew. What the file knows from a busier
    moment than `max_noise` is measured again, and the less noisy result stays. Results are written to `cache_path`
    (None: nowhere) as they come; a file that cannot be read or written costs a warning, nothing else.
    """
    return _Tuning(tunables, device, cache_path, deadline_s, progress, max_noise, clock).run(force=force)


class _Tuning:
    """One call of `tune`."""

    def __init__(
        self,
        tunables: Sequence[Tunable],
        device: DeviceKey,
        cache_path: Path | None,
        deadline_s: float,
        progress: Progress,
        max_noise: float,
        clock: Clock,
    ) -> None:
        self._tunables = tunables
        self._device = device
        self._cache_path = cache_path
        self._progress = progress
        self._max_noise = max_noise
        self._clock = clock
        self._began = clock()
        self._deadline = self._began + deadline_s
        self._results: dict[TuningKey, TuningResult] = {}
        self._noisy: dict[TuningKey, TuningResult] = {}
        self._unsaved: dict[TuningKey, Remembered] = {}
        self._saved_at = self._began

    def run(self, *, force: bool) -> TuningReport:
        for tunable in self._tunables:
            if len(tunable.candidates) == 1:
                self._results[tunable.key] = _unmeasured(tunable, "only")
        if not force:
            self._recall()
        if self._missing():
            with ExitStack() as stack:
                if self._try_be_alone(stack):
                    if not force:
                        self._recall()  # whoever tuned before us may have written it
                    self._measure_missing()
        known = self._noisy | self._results
        results = [known.get(one.key) or _unmeasured(one, "default") for one in self._tunables]
        return TuningReport(tuple(results), self._clock() - self._began)

    def _missing(self) -> list[Tunable]:
        return [tunable for tunable in self._tunables if tunable.key not in self._results]

    def _recall(self) -> None:
        """Take from the file what still holds: the choice is on offer, and nothing is that was not measured."""
        if self._cache_path is None:
            return
        remembered = read_results(self._cache_path, self._device)
        for tunable in self._missing():
            old = remembered.get(tunable.key)
            offered = {candidate.name: candidate for candidate in tunable.candidates}
            if old and old.choice in offered and offered.keys() <= {*old.seconds, *old.unavailable}:
                where = self._results if old.noise <= self._max_noise else self._noisy
                where[tunable.key] = TuningResult(
                    key=tunable.key,
                    choice=offered[old.choice],
                    source="cache",
                    seconds={name: old.seconds[name] for name in offered if name in old.seconds},
                    unavailable=tuple(name for name in offered if name in old.unavailable),
                    noise=old.noise,
                    num_rounds=old.num_rounds,
                )

    def _try_be_alone(self, stack: ExitStack) -> bool:
        """See to it that nobody else who uses this cache file measures until the stack ends; False: it is too late."""
        if self._cache_path is None:
            return True
        num_missing = len(self._missing())
        try:
            lock = stack.enter_context(TuningLock(self._cache_path))
            return lock.try_acquire(
                is_too_late=lambda: self._clock() >= self._deadline,
                on_wait=lambda: self._progress(WAITING, 0, num_missing),
            )
        except OSError as error:
            self._keep_nothing(error)
            return True

    def _keep_nothing(self, error: OSError) -> None:
        logger.warning("tuning results cannot be kept: %s: %s", self._cache_path, error.strerror)
        self._cache_path = None

    def _measure_missing(self) -> None:
        missing = self._missing()
        try:
            for done, tunable in enumerate(missing):
                now = self._clock()
                if now >= self._deadline:
                    break
                key = tunable.key
                self._progress(f"tuning {key.op} {key.shape} at {key.bucket}", done, len(missing))
                share_s = (self._deadline - now) / (len(missing) - done)
                self._measure(tunable, enough_at=now + share_s)
            else:
                self._progress("tuned", len(missing), len(missing))
        finally:  # interrupted or not: what was measured is kept
            self._save()

    def _measure(self, tunable: Tunable, enough_at: float) -> None:
        try:
            seen = measure(tunable, enough_at=enough_at, deadline=self._deadline, clock=self._clock)
        except NotMeasured:
            return
        finally:
            tunable.release()
        if tunable.key in self._noisy and self._noisy[tunable.key].noise <= seen.noise:
            return
        self._results[tunable.key] = _measured(tunable, seen)
        self._unsaved[tunable.key] = Remembered(
            choice=seen.winner.name,
            seconds=seen.seconds,
            unavailable=seen.unavailable,
            noise=seen.noise,
            num_rounds=seen.num_rounds,
        )
        if self._clock() >= self._saved_at + SAVE_INTERVAL_S:
            self._save()

    def _save(self) -> None:
        if self._cache_path is None or not self._unsaved:
            return
        try:
            merge_results(self._cache_path, self._device, self._unsaved)
        except OSError as error:
            self._keep_nothing(error)
        self._unsaved.clear()
        self._saved_at = self._clock()


def _unmeasured(tunable: Tunable, source: Literal["only", "default"]) -> TuningResult:
    return TuningResult(tunable.key, tunable.candidates[0], source, {})


def _measured(tunable: Tunable, seen: Measurement) -> TuningResult:
    return TuningResult(
        key=tunable.key,
        choice=seen.winner,
        source="measured",
        seconds=seen.seconds,
        unavailable=seen.unavailable,
        noise=seen.noise,
        num_rounds=seen.num_rounds,
    )
