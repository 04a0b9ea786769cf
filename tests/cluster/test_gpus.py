"""GPUs are counted as processes of ours see them, and workers that outnumber them share them fairly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.cluster import gpus, resolve
from tandem.cluster.config import ClusterConfig
from tandem.cluster.model_source import ResolvedModel
from tandem.cluster.placement import placement_of
from tandem.cluster.resolve import worker_configs
from tandem.workers.models.config import ModelConfig, RopeConfig

MODEL = ModelConfig("llama", 99, 64, 96, 2, 6, 2, 16, 1e-5, 131_072, True, RopeConfig(10000.0))


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ([], 0),
        (["nvidiactl", "nvidia-uvm", "nvidia-caps"], 0),
        (["nvidia3"], 1),  # what a container with the fourth GPU of its machine has
        (["nvidia0", "nvidia1", "nvidiactl"], 2),
        (["dxg"], 1),
    ],
)
def test_device_files_are_counted_whatever_their_numbers(devices: Path, files: list[str], count: int) -> None:
    for name in files:
        (devices / name).touch()
    assert gpus.count_gpus() == count


@pytest.mark.parametrize(
    ("visible", "count"),
    [("", 0), ("-1", 0), ("NoDevFiles", 0), ("2", 1), ("2,5", 2), ("0,-1,1", 1), ("MIG-a,MIG-b", 2)],
)
def test_what_is_hidden_does_not_count(devices: Path, visible: str, count: int) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus.count_gpus(environment) == 0, "some machines without a GPU set it, too"
    (devices / "nvidia0").touch()
    assert gpus.count_gpus(environment) == count


@pytest.mark.parametrize(
    ("num_gpus", "asked", "amount"),
    [
        (1, {}, 0.5),  # a prefill and a decode worker on one GPU: two whole ones would leave the second without any
        (2, {}, 1.0),
        (8, {}, 1.0),
        (1, {"decode": 2}, 0.3333),
        (2, {"decode": 2}, 0.5),
        (1, {"prefill_max": 2, "decode_max": 2}, 0.25),  # those that may come need their parts, too
        (1, {"aggregated": 1}, 1.0),
        (1, {"address": "auto"}, 1.0),  # of other machines nothing is known here
    ],
)
def test_workers_that_outnumber_gpus_share_them(
    devices: Path, num_gpus: int, asked: dict[str, Any], amount: float
) -> None:
    for number in range(num_gpus):
        (devices / f"nvidia{number}").touch()
    config = ClusterConfig(model="m", device="cuda", gpu_memory_utilization=0.8, **asked)
    workers = worker_configs(resolve.resolve(config, model()), b"key")
    assert {worker.gpu_share for worker in workers} == {amount}
    assert {worker.gpu_memory_utilization for worker in workers} == {0.8}
    assert {placement_of(config).bundle_of(worker)["GPU"] for worker in workers} == {amount}
    assert "address" in asked or amount * -(-len(workers) // num_gpus) <= 1


def test_a_role_may_have_more_of_a_gpu(devices: Path) -> None:
    (devices / "nvidia0").touch()
    config = ClusterConfig(model="m", prefill_resources={"GPU": 0.25}, decode_resources={"GPU": 0.75})
    shares = [worker.gpu_share for worker in worker_configs(resolve.resolve(config, model()), b"key")]
    assert shares == [0.25, 0.75]
    several = ClusterConfig(model="m", address="auto", device="cuda", prefill_resources={"GPU": 2})
    assert worker_configs(resolve.resolve(several, model()), b"key")[0].gpu_share == 1.0


def test_on_a_gpu_the_worker_finds_out_how_much_kv_there_is(devices: Path) -> None:
    (devices / "nvidia0").touch()
    found = resolve.resolve(ClusterConfig(model="m"), model())
    assert (found.device, found.kv_cache_memory_bytes, found.max_model_len) == ("cuda", None, 131_072)
    given = resolve.resolve(ClusterConfig(model="m", kv_cache_memory_bytes=1 << 20), model())
    assert given.kv_cache_memory_bytes == 1 << 20
    assert given.max_model_len < 131_072


def model() -> ResolvedModel:
    return ResolvedModel(folder=Path("/m"), name="m", dtype="bfloat16", config=MODEL, revision="r")
