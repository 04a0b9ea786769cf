"""A Ray of our own, which may be late, and one that runs already, which may be absent: one line says so."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tandem.cluster import ray_runtime
from tandem.cluster.ray_runtime import RayNotStarted, start_ray
from tandem.workers.errors import UserError


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


def test_a_head_that_is_not_there_is_said_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_runtime, "CURRENT_CLUSTER", tmp_path / "absent")
    for address, message in (
        ("auto", "there is no Ray on this machine"),
        ("127.0.0.1:1", "no head of a Ray cluster listens there"),
        ("127.0.0.1:99999999", "no head of a Ray cluster listens there"),
        ("head", "is not of the form HOST:PORT"),
    ):
        with pytest.raises(UserError, match=message):
            ray_runtime.join_ray(address)


def test_auto_is_the_cluster_that_was_joined_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "ray_current_cluster"
    monkeypatch.setattr(ray_runtime, "CURRENT_CLUSTER", file)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        file.write_text(address + "\n")
        assert ray_runtime.find_head("auto") == address
        assert ray_runtime.find_head(address) == address
