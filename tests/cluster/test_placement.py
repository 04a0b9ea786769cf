"""What a worker takes of a machine, in Ray's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.cluster.config import ClusterConfig
from tandem.cluster.placement import JOINED_TIMEOUT_S, Placement, actor_options, placement_of
from tandem.workers.config import WorkerConfig
from tandem.workers.types import Role


def worker(role: Role = "prefill", **fields: Any) -> WorkerConfig:
    return WorkerConfig(model_path=Path("/m"), model_name="m", role=role, worker_id=f"{role}-0", **fields)


def test_a_worker_takes_its_threads_and_a_gpu() -> None:
    assert Placement().bundle_of(worker(num_threads=2)) == {"CPU": 2}
    assert Placement().bundle_of(worker(device="cuda")) == {"CPU": 1, "GPU": 1}


def test_each_role_takes_what_was_asked_for_it() -> None:
    config = ClusterConfig(
        model="m", address="auto", placement="strict-spread", transfer_ports="7500-7599", worker_host="10.0.0.0/8",
        prefill_resources={"prefill": 1, "CPU": 4}, decode_resources={"GPU": 2, "accelerator_type:H100": 0.001},
    )  # fmt: skip
    placement = placement_of(config)
    assert placement.strategy == "STRICT_SPREAD"
    assert placement.bundle_of(worker("prefill")) == {"CPU": 4, "prefill": 1}
    decode = placement.bundle_of(worker("decode", device="cuda"))
    assert decode == {"CPU": 1, "GPU": 2, "accelerator_type:H100": 0.001}
    assert actor_options(decode) == {"num_cpus": 1, "num_gpus": 2, "resources": {"accelerator_type:H100": 0.001}}
    assert placement.environment == {"UCX_TCP_PORT_RANGE": "7500-7599"}
    assert placement.node is not None
    assert (placement.node.model, placement.node.network) == ("m", "10.0.0.0/8")
    assert placement.timeout_s == JOINED_TIMEOUT_S


def test_a_cluster_of_our_own_is_as_before() -> None:
    placement = placement_of(ClusterConfig(model="m"))
    assert (placement.node, placement.environment, placement.strategy) == (None, {}, "PACK")
    assert actor_options(placement.bundle_of(worker())) == {"num_cpus": 1, "num_gpus": 0, "resources": {}}
