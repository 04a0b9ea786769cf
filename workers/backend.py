"""Which backend computes: the best that this device and machine can run."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tandem.kernels.compiler import BuildError
from tandem.kernels.cpu.build import level_of_this_machine
from tandem.kernels.ops import Ops, load_ops

logger = logging.getLogger(__name__)


def create_ops(device: str, on_progress: Callable[[str], None] | None = None) -> Ops:
    """The ops of "cpu" or "cuda". A CPU without a compiler gets the reference, and whoever runs it one warning.

    `on_progress` is told when something has to be compiled.
    """
    if device == "cuda":
        return load_ops("triton")
    try:
        level_of_this_machine(on_progress)
        return load_ops("cpu")
    except BuildError as error:
        logger.warning("plain torch computes, several times slower than the native ops: %s", error)
        return load_ops("reference")
