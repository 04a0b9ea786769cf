"""The autotuner: times the candidates of each tunable op on this machine, and remembers the winners.

report = tune(ops.tunables(workload), ops.device_key(), cache_path, deadline_s=60, progress=show)
ops.use_choices(report.choices)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

__all__ = [
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

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many tunables of how many are done."""


@dataclass(frozen=True, slots=True)
class TuningResult:
    """One tunable's outcome."""

    key: TuningKey
    choice: Candidate
    source: Literal["measured", "cache", "default"]
    """"default": there was nothing to choose from, or no time left to measure."""
    seconds: dict[str, float]
    """Median seconds of one run by candidate name; empty without measurement."""
    noise: float
    """The relative difference that one candidate showed against itself."""
    num_rounds: int


@dataclass(frozen=True, slots=True)
class TuningReport:
    """All outcomes, in the order of the tunables."""

    results: tuple[TuningResult, ...]
    elapsed_s: float

    @property
    def choices(self) -> Choices:
        return Choices({result.key: result.choice for result in self.results})


def tune(
    tunables: Sequence[Tunable],
    device: DeviceKey,
    cache_path: Path | None,
    *,
    deadline_s: float,
    progress: Progress,
    force: bool = False,
) -> TuningReport:
    """Choose a candidate for each tunable: from the cache file where it knows, else by measuring."""
    raise NotImplementedError
