"""What /metrics shows, and that it adds up."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tandem.router.hot_metrics import HotCounter, HotHistogram
from tandem.router.metrics import RouterMetrics, parse_series
from tandem.workers.types import BlockCounts, WorkerSnapshot

MESSAGES = [{"role": "user", "content": "Tell me of everything that a fox may do to a dog. " * 6}]


def snapshot(epoch: int = 0, **fields: Any) -> WorkerSnapshot:
    blocks = BlockCounts(total=10, free=4, cached=3, used=2, incoming=1, quarantined=0)
    return WorkerSnapshot(
        worker_id="d0", epoch=epoch, role="decode", pid=1, blocks=blocks, num_running=2, num_waiting=1,
        num_waiting_tokens=0, max_model_len=10, **fields,
    )  # fmt: skip


async def test_names_and_conservation(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes, indeed."))
    house.workers["decode-0"].counters = {
        'kv_transfer_failures_total{reason="digest"}': 2.0,
        "kv_transfer_bytes_total": 5,
    }
    house.workers["decode-0"].histograms = {"step_seconds": (0.1, 0.2), "handover_seconds": (0.3,)}
    for _ in range(3):
        await house.client.chat.completions.create(model="tiny", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError):
        await house.client.chat.completions.create(model="tiny", messages=MESSAGES, n=0)
    assert await house.outcomes() == {"ok": 3, "rejected": 1}
    await house.until(lambda: not house.workers["decode-0"].histograms)
    text = (await house.admin.get("/metrics")).text
    assert ":" not in re.sub(r'"[^"]*"|#.*', "", text)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    names = {sample.name for family in families.values() for sample in family.samples}
    for name in (
        "requests_total", "requests_started_total", "time_to_first_token_seconds_bucket", "kv_blocks",
        "inter_token_latency_seconds_bucket", "request_duration_seconds_bucket", "queue_seconds_bucket",
        "handover_seconds_bucket", "kv_transfer_seconds_bucket", "kv_transfer_bytes_total",
        "router_decision_seconds_sum",
        "kv_transfer_failures_total", "requests_running", "requests_waiting", "prompt_tokens_total",
        "generation_tokens_total", "prefills_total", "step_seconds_bucket",
    ):  # fmt: skip
        assert f"tandem_{name}" in names or name == "queue_seconds_bucket", name
    values = {(s.name, *sorted(s.labels.items())): s.value for family in families.values() for s in family.samples}
    assert values["tandem_kv_transfer_failures_total", ("reason", "digest")] == 2
    assert values["tandem_step_seconds_count", ("role", "decode")] == 2
    assert values["tandem_handover_seconds_count",] == 1
    assert values["tandem_kv_blocks", ("role", "decode"), ("state", "free"), ("worker", "decode-0")] == 90
    assert values["tandem_time_to_first_token_seconds_count",] == 3
    assert values["tandem_prefills_total", ("path", "remote")] == 3
    assert "tandem_prefix_index_up" not in names, "there is none here: nobody must be told that it is down"


def test_counters_survive_a_restart() -> None:
    metrics = RouterMetrics(list)
    for epoch, value in ((0, 5.0), (0, 8.0), (1, 2.0), (1, 2.0), (1, 3.0), (2, 50.0)):
        metrics.observe_snapshot(snapshot(epoch, counters={"kv_transfer_bytes_total": value}))
    assert metrics.registry.get_sample_value("tandem_kv_transfer_bytes_total") == 8 + 3 + 50


def test_what_workers_may_not_say() -> None:
    metrics = RouterMetrics(list)
    strange = {"requests_total": 5.0, "bad name": 1.0, "": 1.0, 'fine_total{a="b",c="d\\"e"}': 1.0}
    metrics.observe_snapshot(snapshot(counters=strange, histograms={"unknown_seconds": (1.0,), "{": (1.0,)}))
    assert b"bad name" not in metrics.render()
    assert b"tandem_requests_total 5" not in metrics.render()
    assert metrics.registry.get_sample_value("tandem_requests_total", {"outcome": "ok"}) == 0


@pytest.mark.parametrize(
    ("series", "parsed"),
    [
        ("a_total", ("a_total", ())),
        ('a{b="c"}', ("a", (("b", "c"),))),
        ('a{b="c",d="e"}', ("a", (("b", "c"), ("d", "e")))),
        ("a:b", None),
        ("A", None),
    ],
)
def test_series(series: str, parsed: Any) -> None:
    assert parse_series(series) == parsed


def test_hot_metrics_show_what_the_usual_ones_do() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    given: dict[str, Any] = {"namespace": "tandem", "buckets": (0.1, 0.25, 1.0)}
    hot = HotHistogram("x_seconds", "X.", registry=ours, **given)
    usual = Histogram("x_seconds", "X.", registry=theirs, **given)
    for value in (0.05, 0.1, 0.2, 0.25, 0.3, 1.0, 7.0):
        hot.observe(value)
        usual.observe(value)
    HotCounter("y", "Y.", namespace="tandem", registry=ours).value += 2
    Counter("tandem_y", "Y.", registry=theirs).inc(2)

    def shown(registry: CollectorRegistry) -> list[str]:
        return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]

    assert shown(ours) == shown(theirs)
