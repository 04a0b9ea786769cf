"""The native ops at every instruction set that this machine runs."""

from __future__ import annotations

from functools import cache

import pytest

from tandem.kernels.cpu.backend import CpuOps
from tandem.kernels.cpu.build import LEVELS, levels

runnable_levels = cache(levels)


@pytest.fixture(scope="module", params=list(LEVELS))
def level_ops(request: pytest.FixtureRequest) -> CpuOps:
    if request.param not in runnable_levels():
        pytest.skip(f"this machine lacks {request.param}")
    return CpuOps(request.param)
