"""A Ray that is late is given a second chance, and then one line says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cluster import ray_runtime
from tandem.cluster.ray_runtime import RayNotStarted, start_ray


@pytest.mark.parametrize("num_failures", [0, 1, 2])
def test_a_second_chance(num_failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[Path] = []

    def start_node(folder: Path, **_: int) -> None:
        attempts.append(folder)
        if len(attempts) <= num_failures:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray_runtime, "_start_node", start_node)
    monkeypatch.setattr(ray_runtime, "stop_ray", lambda: None)
    if num_failures == 2:
        with pytest.raises(RayNotStarted, match=r"twice.*timed out"):
            start_ray(tmp_path, num_cpus=1, num_gpus=0)
    else:
        start_ray(tmp_path, num_cpus=1, num_gpus=0)
    assert len(attempts) == min(2, num_failures + 1)
