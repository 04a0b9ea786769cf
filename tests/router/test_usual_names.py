"""Existing boards find what they ask for, with our values, and ours stay as they were."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tandem.router.metrics import RouterMetrics
from tandem.workers.types import BlockCounts, Role, WorkerSnapshot


def snapshot(worker_id: str, role: Role, *, used: int) -> WorkerSnapshot:
    blocks = BlockCounts(total=100, free=90 - used, cached=0, used=used, incoming=10, quarantined=0)
    return WorkerSnapshot(
        worker_id=worker_id, epoch=0, role=role, pid=1, blocks=blocks, num_running=2, num_waiting=1,
        num_waiting_tokens=0, max_model_len=10,
    )  # fmt: skip


def shown(metrics: RouterMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (each.name, tuple(sorted(each.labels.items()))): each.value for family in families for each in family.samples
    }


def test_the_usual_names_show_our_values() -> None:
    metrics = RouterMetrics(lambda: [snapshot("p", "prefill", used=10), snapshot("d", "decode", used=70)])
    before = set(shown(metrics))
    metrics.add_usual_names("m")
    metrics.prompt_tokens.inc(7)
    metrics.cached_tokens.labels("decode").inc(3)
    metrics.cached_tokens.labels("peer").inc(1)
    metrics.time_to_first_token.observe(0.3)
    metrics.started.inc(5)
    metrics.requests.labels("ok").inc(2)
    metrics.requests.labels("failed").inc()
    after = shown(metrics)
    model = (("model_name", "m"),)
    assert before <= set(after)
    assert after["vllm:prompt_tokens_total", model] == after["vllm:prefix_cache_queries_total", model] == 7
    assert after["vllm:prefix_cache_hits_total", model] == 4
    assert after["vllm:num_requests_running", model] == 4
    assert after["vllm:num_requests_waiting", model] == 2
    assert after["vllm:kv_cache_usage_perc", model] == (10 + 70 + 20) / 200
    assert after["vllm:request_success_total", model] == 2
    assert after["vllm:time_to_first_token_seconds_count", model] == 1
    assert after["vllm:time_to_first_token_seconds_bucket", (("le", "0.5"), *model)] == 1
    assert after["tandem_requests_in_flight", ()] == 2


def test_without_being_asked_no_name_but_ours() -> None:
    assert all(name.startswith("tandem_") for name, _ in shown(RouterMetrics(list)))
