"""What a worker does before it serves, phase by phase: load, tune or read what was tuned, record steps.

warm_up = WarmUp(on_progress)
with warm_up.phase("recording steps"):
    warm_up.advance(done, total)           now and then
report = warm_up.tune(ops, workload, cache_path, deadline_s=60)
logger.info("warm-up: %s", warm_up.summary())
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tandem.kernels.autotune import WAITING, TunableOps, TuningReport, TuningWorkload, tune
from tandem.kernels.ops import Ops, PackedLinear
from tandem.workers.models.config import ModelConfig

logger = logging.getLogger(__name__)

PERCENT_STEP = 10
"""Progress inside a phase is told in these steps: where each change is a line, a phase stays a handful of them."""


def tuning_workload(
    config: ModelConfig,
    linears: tuple[PackedLinear, ...],
    *,
    dtype: str,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
) -> TuningWorkload:
    """What a worker with these limits will ask of its backend. `linears` are the `Decoder`'s."""
    return TuningWorkload(
        linears=linears,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        windows=frozenset(config.sliding_window or (None,)),
        dtype=dtype,
        max_rows=max_num_batched_tokens,
        max_seqs=max_num_seqs,
        max_context=max_model_len,
    )


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase that is over."""

    name: str
    seconds: float


class WarmUp:
    """Tells `on_progress` what is being done, logs how long each phase took, and remembers it."""

    def __init__(self, on_progress: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_progress = on_progress
        self._clock = clock
        self._current = ""
        self._told = ""
        self.phases: list[Phase] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase. Phases follow each other; one that fails is remembered, too."""
        began = self._clock()
        self._current = name
        self.tell(name)
        try:
            yield
        finally:
            self.phases.append(Phase(name, self._clock() - began))
            logger.info("%s took %.1f s", name, self.phases[-1].seconds)

    def advance(self, done: int, total: int) -> None:
        """How much of the current phase is done."""
        percent = 100 * done // max(total, 1) // PERCENT_STEP * PERCENT_STEP
        self.tell(f"{self._current}: {percent} %" if percent else self._current)

    def tune(
        self, ops: Ops, workload: TuningWorkload, cache_path: Path | None, *, deadline_s: float
    ) -> TuningReport | None:
        """The phase of the autotuner: `ops` then uses what was chosen. None: this backend has nothing to tune."""
        if not isinstance(ops, TunableOps):
            return None
        with self.phase("tuning kernels"):
            report = tune(
                ops.tunables(workload),
                ops.device_key(),
                cache_path,
                deadline_s=deadline_s,
                progress=self._tell_tuning,
            )
        ops.use_choices(report.choices)
        left = report.count("default")
        if left and deadline_s > 0:  # without a deadline nobody wanted to measure
            logger.warning("no time to tune %d kernels of %d: they keep their defaults", left, len(report.results))
        return report

    def _tell_tuning(self, message: str, done: int, total: int) -> None:
        if message == WAITING:
            self.tell(message)
        else:
            self.advance(done, total)

    def summary(self) -> str:
        """All phases with their seconds, in one line."""
        return ", ".join(f"{phase.name} {phase.seconds:.1f} s" for phase in self.phases)

    def tell(self, message: str) -> None:
        """Pass a message of the current phase on, unless it is the last one again."""
        if message != self._told:
            self._told = message
            self._on_progress(message)
