"""Everything that /metrics shows: the gateway's own measurements, and those that workers send with their snapshots.

A registry of its own, so that several gateways can live in one process. Worker counters are merged by difference: a
restarted worker counts from 0 again, and the sums here must never fall.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.router.hot_metrics import HotCounter, HotHistogram
from tandem.router.usual_names import UsualNames
from tandem.workers.types import WorkerSnapshot

logger = logging.getLogger(__name__)

Outcome = Literal["ok", "failed", "cancelled", "rejected"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "failed", "cancelled", "rejected")

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_RATIOS = (0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 3.0, 5.0, 10.0, 30.0)

WORKER_HISTOGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "queue_seconds": ("Time from a worker's admission of a request to its first computation.", ("role",)),
    "handover_seconds": ("From the end of prefill to the sequence joining the decode batch.", ()),
    "kv_transfer_seconds": ("One pull of KV blocks.", ()),
    "step_seconds": ("One forward pass.", ("role",)),
}
_SERIES = re.compile(r"([a-z_][a-z0-9_]*)(?:\{(.*)\})?")
_LABEL = re.compile(r'([a-z_][a-z0-9_]*)="((?:[^"\\]|\\.)*)"')


def parse_series(series: str) -> tuple[str, tuple[tuple[str, str], ...]] | None:
    """`name{label="value"}` as (name, labels); None if it is not of that form."""
    match = _SERIES.fullmatch(series)
    if match is None:
        return None
    return match[1], tuple((label, value) for label, value in _LABEL.findall(match[2] or ""))


class RouterMetrics:
    """The instruments, by attribute. Names as in the design; label values are few and fixed."""

    def __init__(self, snapshots: Callable[[], Sequence[WorkerSnapshot]]) -> None:
        self.registry = CollectorRegistry()
        self._more: list[CollectorRegistry] = []
        self.started = self._counter("requests_started", "Generation requests that arrived.")
        self.requests = self._counter("requests", "Generation requests that ended.", "outcome")
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token_latency = HotHistogram(
            "inter_token_latency_seconds",
            "Between tokens of one choice.",
            namespace="tandem",
            registry=self.registry,
            buckets=_SHORT_SECONDS,
        )
        self.request_duration = self._histogram("request_duration_seconds", "From arrival to the last byte.")
        self.router_decision = self._histogram(
            "router_decision_seconds", "Hashing, index look-up and policy.", buckets=_SHORT_SECONDS
        )
        self.predicted_ttft = self._histogram(
            "predicted_time_to_first_token_seconds", "From the router's decision to the first token, as it predicts."
        )
        self.ttft_over_predicted = self._histogram(
            "time_to_first_token_over_predicted", "What it took, as a multiple of the prediction.", buckets=_RATIOS
        )
        self.held_back = self._gauge("requests_held_back", "Requests that wait at the door.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that started.")
        self.generation_tokens = HotCounter(
            "generation_tokens", "Tokens of answers.", namespace="tandem", registry=self.registry
        )
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens whose KV was reused.", "source")
        self.embeddings = self._counter("embeddings", "Texts whose embedding was computed.")
        self.prefills = self._counter("prefills", "Prompts by where they were read.", "path")
        self.migrations = self._counter("migrations", "Requests moved off a worker.", "reason")
        self.pauses = self._counter("slow_reader_pauses", "Generations stopped until a client has read what it got.")
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self._in_flight = self._gauge("requests_in_flight", "Requests that arrived and have not ended.")
        self._in_flight.set_function(self._num_in_flight)
        self._worker_histograms = {
            name: self._histogram(name, text, labels=labels) for name, (text, labels) in WORKER_HISTOGRAMS.items()
        }
        self.workers = WorkerCollector(snapshots, owned=self._own_names())
        self.registry.register(self.workers)

    def observe_snapshot(self, snapshot: WorkerSnapshot) -> None:
        """Merge what a worker measured since its last snapshot."""
        self.workers.merge(snapshot)
        for series, values in snapshot.histograms.items():
            parsed = parse_series(series)
            histogram = None if parsed is None else self._worker_histograms.get(parsed[0].removeprefix("tandem_"))
            if parsed is None or histogram is None:
                logger.debug("worker %s sends an unknown histogram %s", snapshot.worker_id, series)
                continue
            _, label_names = WORKER_HISTOGRAMS[parsed[0].removeprefix("tandem_")]
            child = histogram.labels(snapshot.role) if label_names else histogram
            for value in values:
                child.observe(value)

    def render(self) -> bytes:
        return b"".join(generate_latest(registry) for registry in (self.registry, *self._more))

    def add_usual_names(self, model_name: str) -> None:
        """Show what the field's boards ask for, too."""
        registry = CollectorRegistry()
        registry.register(UsualNames(self.registry.collect, model_name))
        self._more.append(registry)

    def add_control_plane(self, is_up: Callable[[], float]) -> None:
        """Shown by the launcher, and by gateways that follow one."""
        self._gauge("control_plane_up", "1 while lost workers can be replaced.").set_function(is_up)

    def add_prefix_index(self, is_up: Callable[[], float]) -> None:
        """Shown where there is an index: where there is none, nothing is down. `is_up` is asked at each scrape: a value
        that is set while another metric is collected is shown one scrape late."""
        self._gauge("prefix_index_up", "1 while the prefix index answers.").set_function(is_up)

    def _num_in_flight(self) -> float:
        counted = {
            (sample.name, sample.labels.get("outcome")): sample.value
            for counter in (self.started, self.requests)
            for metric in counter.collect()
            for sample in metric.samples
        }
        ended = sum(counted["tandem_requests_total", outcome] for outcome in OUTCOMES)
        return counted["tandem_requests_started_total", None] - ended

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace="tandem", registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, namespace="tandem", registry=self.registry)

    def _histogram(
        self, name: str, text: str, *, labels: Sequence[str] = (), buckets: Sequence[float] = _SECONDS
    ) -> Histogram:
        return Histogram(name, text, labels, namespace="tandem", registry=self.registry, buckets=buckets)

    def _own_names(self) -> frozenset[str]:
        return frozenset(metric.name for metric in self.registry.collect())


class WorkerCollector(Collector):
    """Workers' counters, summed over their incarnations, and gauges of those alive now."""

    def __init__(self, snapshots: Callable[[], Sequence[WorkerSnapshot]], owned: frozenset[str]) -> None:
        self._snapshots = snapshots
        self._owned = owned
        self._latest: dict[tuple[str, str], tuple[int, float]] = {}
        """(worker, series) -> (epoch, value) of its last snapshot."""
        self._totals: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}

    def merge(self, snapshot: WorkerSnapshot) -> None:
        for series, value in snapshot.counters.items():
            parsed = parse_series(series)
            if parsed is None:
                logger.debug("worker %s sends a malformed counter %r", snapshot.worker_id, series)
                continue
            name = "tandem_" + parsed[0].removeprefix("tandem_").removesuffix("_total")
            if name in self._owned:
                continue  # the gateway counts this itself
            epoch, before = self._latest.get((snapshot.worker_id, series), (snapshot.epoch, 0.0))
            if epoch != snapshot.epoch or value < before:
                before = 0.0
            self._latest[snapshot.worker_id, series] = (snapshot.epoch, value)
            totals = self._totals.setdefault(name, {})
            totals[parsed[1]] = totals.get(parsed[1], 0.0) + value - before

    def collect(self) -> Iterable[Metric]:
        for name, totals in self._totals.items():
            label_names = sorted({label for labels in totals for label, _ in labels})
            family = CounterMetricFamily(name, "Counted by workers.", labels=label_names)
            for labels, value in totals.items():
                given = dict(labels)
                family.add_metric([given.get(label, "") for label in label_names], value)
            yield family
        yield from self._gauges()

    def _gauges(self) -> Iterable[Metric]:
        blocks = GaugeMetricFamily("tandem_kv_blocks", "KV blocks by state.", labels=["role", "worker", "state"])
        tiers = GaugeMetricFamily(
            "tandem_kv_tier_blocks", "KV blocks below the pool.", labels=["role", "worker", "tier"]
        )
        running = GaugeMetricFamily("tandem_requests_running", "Sequences in the batch.", labels=["role", "worker"])
        waiting = GaugeMetricFamily("tandem_requests_waiting", "Sequences in the queue.", labels=["role", "worker"])
        for snapshot in self._snapshots():
            of = [snapshot.role, snapshot.worker_id]
            for state in ("free", "cached", "used", "incoming", "quarantined"):
                blocks.add_metric([*of, state], getattr(snapshot.blocks, state))
            for tier, num_blocks in snapshot.kv_tier_blocks.items():
                tiers.add_metric([*of, tier], num_blocks)
            running.add_metric(of, snapshot.num_running)
            waiting.add_metric(of, snapshot.num_waiting)
        yield from (blocks, tiers, running, waiting)
