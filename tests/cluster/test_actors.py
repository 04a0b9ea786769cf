"""What a worker finds out in its own process, on its own machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from tandem.cluster import model_source
from tandem.cluster.actors import _at_home
from tandem.cluster.placement import NodeSettings
from tandem.workers.config import WorkerConfig


def worker(model_path: Path) -> WorkerConfig:
    return WorkerConfig(model_path=model_path, model_name="m", role="prefill", worker_id="prefill-0")


def test_a_worker_announces_the_address_of_its_own_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.1.2.3")
    here = worker(tmp_path)
    assert _at_home(here, NodeSettings(model="m"), lambda phase: None).host == "10.1.2.3"
    assert _at_home(here, NodeSettings(model="m", network="127.0.0.0/8"), lambda phase: None).host == "127.0.0.1"


def test_a_machine_without_the_model_looks_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Found:
        folder = tmp_path

    monkeypatch.setattr(model_source, "resolve_model", lambda model, **_: Found if model == "hub/name" else None)
    phases: list[str] = []
    absent = worker(tmp_path / "only-on-the-launcher")
    found = _at_home(absent, NodeSettings(model="hub/name", network="127.0.0.0/8"), phases.append)
    assert found.model_path == tmp_path
    assert phases == ["looking for the model"]
