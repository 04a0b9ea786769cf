"""Our metrics under the names that the field's boards and autoscalers know (`vllm:*`). Added, never instead.

Both pools are one server there: counts are summed over workers, KV use is that of all pools together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

Families = dict[str, Metric]

HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "tandem_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "tandem_inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds": "tandem_inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds": "tandem_request_duration_seconds",
}
COUNTERS = {
    "vllm:prompt_tokens": "tandem_prompt_tokens",
    "vllm:generation_tokens": "tandem_generation_tokens",
    "vllm:prefix_cache_queries": "tandem_prompt_tokens",
    "vllm:prefix_cache_hits": "tandem_cached_tokens",
}
GAUGES = {
    "vllm:num_requests_running": "tandem_requests_running",
    "vllm:num_requests_waiting": "tandem_requests_waiting",
}
KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""From 0 to 1, in spite of their name."""


class UsualNames(Collector):
    """Asks `collect` for our families at each scrape, and shows them again with the label model_name."""

    def __init__(self, collect: Callable[[], Iterable[Metric]], model_name: str) -> None:
        self._collect = collect
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        ours: Families = {metric.name: metric for metric in self._collect()}
        for name, source in HISTOGRAMS.items():
            yield self._histogram(name, ours[source])
        for name, source in COUNTERS.items():
            counter = CounterMetricFamily(name, ours[source].documentation, labels=["model_name"])
            counter.add_metric([self._model_name], total(ours, source, f"{source}_total"))
            yield counter
        succeeded = CounterMetricFamily("vllm:request_success", "Requests that ended well.", labels=["model_name"])
        succeeded.add_metric([self._model_name], total(ours, "tandem_requests", "tandem_requests_total", outcome="ok"))
        yield succeeded
        for name, source in GAUGES.items():
            yield self._gauge(name, ours[source].documentation, total(ours, source, source))
        for name in KV_USE:
            yield self._gauge(name, "Share of KV blocks in use.", kv_use(ours))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([self._model_name], value)
        return gauge

    def _histogram(self, name: str, ours: Metric) -> Metric:
        samples = ours.samples
        buckets = [(sample.labels["le"], sample.value) for sample in samples if sample.name.endswith("_bucket")]
        sums = sum(sample.value for sample in samples if sample.name.endswith("_sum"))
        histogram = HistogramMetricFamily(name, ours.documentation, labels=["model_name"])
        histogram.add_metric([self._model_name], buckets, sums)
        return histogram


def total(families: Families, family: str, sample_name: str, **labels: str) -> float:
    """Sum over a family's samples of this name that have these labels; 0 where nobody has counted yet."""
    found = families.get(family)
    return sum(
        sample.value
        for sample in (found.samples if found is not None else ())
        if sample.name == sample_name and labels.items() <= sample.labels.items()
    )


def kv_use(families: Families) -> float:
    """From 0 to 1, of all workers together."""
    blocks = "tandem_kv_blocks"
    num_total = total(families, blocks, blocks)
    num_taken = total(families, blocks, blocks, state="used") + total(families, blocks, blocks, state="incoming")
    return num_taken / num_total if num_total else 0.0
