"""Several processes' metrics as one page: sums, gauges, and those that are gone."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tandem.cluster.merged_metrics import Families, MergedMetrics, families_of
from tandem.router.metrics import RouterMetrics
from tandem.workers.types import BlockCounts, WorkerSnapshot


def snapshot(**fields: Any) -> WorkerSnapshot:
    blocks = BlockCounts(total=10, free=4, cached=3, used=2, incoming=1, quarantined=0)
    return WorkerSnapshot(
        worker_id="d0", epoch=0, role="decode", pid=1, blocks=blocks, num_running=2, num_waiting=1,
        num_waiting_tokens=0, max_model_len=10, **fields,
    )  # fmt: skip


class Process:
    """One gateway process: it hears the same worker as all others, and counts its own requests."""

    def __init__(self, *, index_up: float = 1.0) -> None:
        heard: list[WorkerSnapshot] = []
        self.metrics = RouterMetrics(lambda: heard[-1:])
        self.metrics.add_prefix_index(lambda: index_up)
        self._heard = heard

    def hear(self, told: WorkerSnapshot) -> None:
        self._heard.append(told)
        self.metrics.observe_snapshot(told)

    def serve(self, outcome: Any, num_started: int = 1) -> None:
        self.metrics.started.inc(num_started)
        self.metrics.requests.labels(outcome).inc()
        self.metrics.request_duration.observe(0.2)

    def say(self) -> Families:
        return families_of(self.metrics)


def values(merged: MergedMetrics) -> dict[Any, float]:
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(merged.render().decode())
        for sample in family.samples
    }


def test_counts_are_summed_and_workers_told_once() -> None:
    parent, first, second = Process(), Process(), Process(index_up=0.0)
    for process in (parent, first, second):
        process.hear(snapshot(counters={"kv_transfer_bytes_total": 500.0}))
    first.hear(snapshot(counters={"kv_transfer_bytes_total": 500.0}, histograms={"handover_seconds": (0.1, 0.2)}))
    second.hear(snapshot(counters={"kv_transfer_bytes_total": 500.0}, histograms={"handover_seconds": (0.3,)}))
    first.serve("ok")
    first.serve("rejected")
    second.serve("ok", num_started=2)
    page = values(MergedMetrics(parent.metrics, lambda: [first.say(), second.say()]))
    assert page["tandem_requests_total", "ok"] == 2
    assert page["tandem_requests_total", "rejected"] == 1
    assert page["tandem_requests_started_total",] == 4
    assert page["tandem_requests_in_flight",] == 1
    assert page["tandem_request_duration_seconds_count",] == 3
    assert page["tandem_request_duration_seconds_bucket", "0.25"] == 3
    assert page["tandem_handover_seconds_count",] == 3, "a worker's measurement is told to one gateway"
    assert page["tandem_kv_transfer_bytes_total",] == 500, "a worker's counter is told to all"
    assert page["tandem_requests_running", "d0", "decode"] == 2
    assert page["tandem_kv_blocks", "cached", "d0", "decode"] == 3
    assert page["tandem_prefix_index_up",] == 0, "the lowest counts"


def test_what_a_process_counted_stays_when_it_is_gone() -> None:
    parent, first, second = Process(), Process(), Process()
    alive = [first, second]
    merged = MergedMetrics(parent.metrics, lambda: [process.say() for process in alive])
    first.serve("ok", num_started=4)  # three run
    second.serve("ok")
    before = values(merged)
    merged.bury(first.say())
    alive.remove(first)
    after = values(merged)
    assert after["tandem_requests_total", "ok"] == before["tandem_requests_total", "ok"] == 2
    assert after["tandem_requests_total", "failed"] == 3
    assert after["tandem_requests_started_total",] == before["tandem_requests_started_total",] == 5
    assert after["tandem_requests_in_flight",] == 0
    assert after["tandem_request_duration_seconds_count",] == 2
    merged.bury(second.say())
    alive.clear()
    assert values(merged)["tandem_requests_total", "ok"] == 2
    merged.bury([])  # one that never said anything


def test_the_field_s_names_show_the_sums() -> None:
    parent, first = Process(), Process()
    first.metrics.generation_tokens.value += 7
    first.serve("ok")
    page = values(MergedMetrics(parent.metrics, lambda: [first.say()], usual_names="m"))
    assert page["vllm:generation_tokens_total", "m"] == 7
    assert page["vllm:request_success_total", "m"] == 1
    assert page["vllm:e2e_request_latency_seconds_count", "m"] == 1
