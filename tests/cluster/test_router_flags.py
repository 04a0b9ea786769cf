"""The router's flags, from the command line to the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from tandem.cluster import cli_serve
from tandem.cluster.bench import router_cli
from tandem.cluster.config import ClusterConfig
from tandem.cluster.resolve import ResolvedConfig, gateway_config
from tandem.router.config import GatewayConfig
from tandem.router.policy import POLICIES, PolicyName
from tandem.workers.errors import UserError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slo_ttft": 0.0}, "--slo-ttft must be a positive number of seconds, but is 0.0"),
        ({"slo_itl": float("inf")}, "--slo-itl must be a positive number of seconds"),
        ({"slo_itl": float("nan")}, "--slo-itl must be a positive number of seconds"),
        ({"max_queue": -1}, "--max-queue must not be negative"),
        ({"max_in_flight": 0}, "--max-in-flight must be at least 1"),
        ({"slow_reader_timeout": 0.0}, "--slow-reader-timeout must be a positive number of seconds"),
    ],
)
def test_a_mistake_is_named_by_its_flag(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        ClusterConfig(model="small", **fields)
    assert str(raised.value).startswith(message)


def test_out_of_the_box_nothing_is_refused() -> None:
    config = ClusterConfig(model="small")
    assert (config.router_policy, config.slo_ttft, config.slo_itl) == ("cost", None, None)


def test_every_policy_has_a_name_on_the_command_line() -> None:
    assert set(get_args(cli_serve.PolicyChoice)) == set(get_args(router_cli.PolicyChoice)) == set(get_args(PolicyName))
    assert set(POLICIES) == set(get_args(PolicyName))


@pytest.mark.parametrize(("field", "value"), [("router_policy", "random"), ("slo_ttft_s", 0.0), ("max_queue", -1)])
def test_gateway_checks_them_too(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=field):
        GatewayConfig(**{"model_name": "m", "tokenizer_folder": tmp_path, "max_model_len": 9, field: value})


def test_the_gateway_is_told(tmp_path: Path) -> None:
    asked = ClusterConfig(model="small", router_policy="prefix", slo_ttft=1.5, slo_itl=0.05, max_queue=7)
    asked = msgspec.structs.replace(asked, max_in_flight=5000, slow_reader_timeout=3.0, seed=0)
    resolved = ResolvedConfig(
        cluster=asked,
        model_path=tmp_path,
        model_name="small",
        device="cpu",
        dtype="float32",
        max_model_len=512,
        kv_cache_memory_bytes=1 << 20,
        num_threads=1,
    )
    told = gateway_config(resolved, b"key", redis_url=None, namespace="n")
    assert (told.router_policy, told.slo_ttft_s, told.slo_itl_s, told.max_queue) == ("prefix", 1.5, 0.05, 7)
    assert (told.max_in_flight, told.slow_reader_timeout_s, told.seed) == (5000, 3.0, 0)
