"""The GPUs of this machine, counted without asking torch or the driver, and how workers share them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from tandem.cluster.config import ClusterConfig
from tandem.workers.types import Role

DEVICES = Path("/dev")
"""A container may have nvidia3 and no other: numbers are the machine's."""
RAY_PRECISION = 10_000
"""Ray counts resources in such parts."""


def count_gpus(environment: Mapping[str, str] | None = None) -> int:
    """That a process of ours can use: those of the machine, or of them those that CUDA_VISIBLE_DEVICES names."""
    found = len(list(DEVICES.glob("nvidia[0-9]*"))) or int((DEVICES / "dxg").exists())
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if found == 0 or visible is None:
        return found
    names = [name.strip() for name in visible.split(",")]  # parts of GPUs have names, too: there may be more than found
    # CUDA ignores what follows a name that is none
    return next((place for place, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))


def gpus_per_worker(config: ClusterConfig) -> float:
    """What a worker takes unless its role's resources say otherwise: one, or, where this machine has fewer GPUs than
    there may be workers, a part of one, as large for each."""
    num_workers, num_gpus = sum(config.most_workers), count_gpus()
    if config.address is not None or num_gpus == 0:
        return 1.0
    workers_per_gpu = math.ceil(num_workers / num_gpus)
    return math.floor(RAY_PRECISION / workers_per_gpu) / RAY_PRECISION


def gpu_share(config: ClusterConfig, role: Role) -> float:
    """Of one GPU: what a worker of this role has of it."""
    resources: dict[str, float] = getattr(config, f"{role}_resources")
    return min(1.0, resources.get("GPU", gpus_per_worker(config)))
