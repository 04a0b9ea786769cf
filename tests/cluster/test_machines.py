"""Workers on other machines: where they are put, what they announce, and what processes of one cluster share."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.cluster import ray_runtime
from tandem.cluster.config import ClusterConfig
from tandem.cluster.keys import ClusterKey
from tandem.cluster.logs import JsonFormatter
from tandem.cluster.network import check_worker_host, local_address, port_range
from tandem.cluster.placement import JOINED_TIMEOUT_S, Placement, actor_options, placement_of
from tandem.workers.config import WorkerConfig
from tandem.workers.errors import UserError
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


def test_a_worker_announces_the_address_of_its_own_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ray

    from tandem.cluster.actors import _at_home
    from tandem.cluster.placement import NodeSettings

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.1.2.3")
    here = worker(host="127.0.0.1")
    here = msgspec.structs.replace(here, model_path=tmp_path)
    assert _at_home(here, NodeSettings(model="m"), lambda phase: None).host == "10.1.2.3"
    assert _at_home(here, NodeSettings(model="m", network="127.0.0.0/8"), lambda phase: None).host == "127.0.0.1"


def test_a_machine_without_the_model_looks_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tandem.cluster import model_source
    from tandem.cluster.actors import _at_home
    from tandem.cluster.placement import NodeSettings

    class Found:
        folder = tmp_path

    monkeypatch.setattr(model_source, "resolve_model", lambda model, **_: Found if model == "hub/name" else None)
    phases: list[str] = []
    absent = msgspec.structs.replace(worker(), model_path=tmp_path / "only-on-the-launcher")
    found = _at_home(absent, NodeSettings(model="hub/name", network="127.0.0.0/8"), phases.append)
    assert found.model_path == tmp_path
    assert phases == ["looking for the model"]


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


@pytest.mark.parametrize(
    ("text", "ports"), [("7400-7402", [7400, 7401, 7402]), ("7400", [7400]), (None, [0]), (" 1-2 ", [1, 2])]
)
def test_port_ranges(text: str | None, ports: list[int]) -> None:
    assert list(port_range(text, "--ports")) == ports


@pytest.mark.parametrize("text", ["", "0", "5-4", "1-65536", "a-b", "1-2-3"])
def test_what_is_no_port_range(text: str) -> None:
    with pytest.raises(UserError, match="--ports must be a port or a range"):
        port_range(text, "--ports")


def test_addresses_of_this_machine() -> None:
    assert local_address("127.0.0.0/8") == "127.0.0.1"
    assert local_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UserError, match=r"--worker-host 203.0.113.0/24: .* has no address there"):
        local_address("203.0.113.0/24")
    for wrong in ("0.0.0.0", "::", "eth0", "10.0.0.0/99"):
        with pytest.raises(UserError):
            check_worker_host(wrong)


def test_processes_with_the_same_words_share_a_key_and_a_namespace() -> None:
    first, second, other = (ClusterKey.of(text * 4) for text in ("words", "words", "other"))
    assert (first.secret, first.namespace) == (second.secret, second.namespace)
    assert first.secret != other.secret
    assert first.namespace != other.namespace
    assert first.namespace not in first.secret.hex(), "the namespace can be read in Redis"
    assert first.first_epoch > 1_700_000_000, "after all epochs of an earlier launcher"


def test_without_words_nobody_shares_anything() -> None:
    first, second = ClusterKey.of(None), ClusterKey.of(None)
    assert first.secret != second.secret
    assert first.namespace != second.namespace
    assert first.first_epoch == 0


def test_a_json_log_names_request_and_worker() -> None:
    record = logging.LogRecord(
        "tandem.x", logging.INFO, "f", 1, "request %s leaves worker %s", ("r-1", "decode-0"), None
    )
    entry = json.loads(JsonFormatter().format(record))
    assert entry["request_id"] == "r-1"
    assert entry["worker"] == "decode-0"
    assert (entry["level"], entry["logger"]) == ("info", "tandem.x")
    plain = json.loads(JsonFormatter().format(logging.LogRecord("x", logging.ERROR, "f", 1, "two\nlines", (), None)))
    assert plain["message"] == "two\nlines"
    assert "request_id" not in plain
