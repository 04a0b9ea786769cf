"""Which backend computes: the best that this device and machine can run."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tandem.kernels.compiler import BuildError
from tandem.kernels.cpu.backend import CpuOps
from tandem.kernels.cpu.build import level_of_this_machine
from tandem.kernels.ops import Ops, load_ops
from tandem.workers.config import CpuLevel
from tandem.workers.device import check_cuda
from tandem.workers.errors import UserError

logger = logging.getLogger(__name__)


def create_ops(device: str, on_progress: Callable[[str], None] | None = None, cpu_level: CpuLevel | None = None) -> Ops:
    """The ops of "cpu" or "cuda". A CPU without a compiler gets the reference, and whoever runs it one warning; where a
    level is asked for, nothing else will do (`UserError`).

    `on_progress` is told when something has to be compiled.
    """
    if device == "cuda":
        check_cuda()
        return load_ops("triton")
    try:
        return CpuOps(level_of_this_machine(on_progress, cpu_level))
    except BuildError as error:
        if cpu_level is not None:
            raise UserError(f"--cpu-level {cpu_level}: {error}") from error
        logger.warning("plain torch computes, several times slower than the native ops: %s", error)
        return load_ops("reference")
