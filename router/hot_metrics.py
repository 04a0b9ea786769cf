"""Metrics that are touched for every token: plain numbers, made into families when somebody asks.

prometheus_client's own take a lock for each touch and walk through their buckets; here everything happens on one event
loop, the scrape included.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class HotCounter(Collector):
    """A counter without labels."""

    def __init__(self, name: str, documentation: str, *, namespace: str, registry: CollectorRegistry) -> None:
        self._name = f"{namespace}_{name}"
        self._documentation = documentation
        self.value = 0.0
        """To be added to."""
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._documentation, value=self.value)


class HotHistogram(Collector):
    """A histogram without labels. `buckets`: upper bounds, ascending, without the infinite one."""

    def __init__(
        self, name: str, documentation: str, *, namespace: str, registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        self._name = f"{namespace}_{name}"
        self._documentation = documentation
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        """Of each bucket alone."""
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        names = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)
