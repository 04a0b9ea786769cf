"""The metrics of several gateway processes as those of one.

    each process: RouterMetrics -> families_of -> one message, about every second -> MergedMetrics -> /metrics

Counters and histograms are summed, and what a process had counted stays counted when it is gone. Gauges of requests are
summed over those that live; the index is up when it is for all. What workers count themselves every gateway hears in
full, so one account of it is enough: the parent's own. What workers measured (their histograms) is told to one gateway
only, whichever asks first, and is summed like the rest.

A process that is killed cannot say how its last requests ended. They ended with it: `failed`. So on the merged page,
too, started = ok + failed + cancelled + rejected once nothing is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tandem.router.metrics import RouterMetrics
from tandem.router.usual_names import UsualNames

SampleKey = tuple[str, tuple[tuple[str, str], ...]]
"""(name of the sample, its labels)"""
Values = dict[SampleKey, float]

LOWEST = frozenset({"tandem_prefix_index_up", "tandem_control_plane_up"})
"""Gauges of which the lowest counts."""
STARTED: SampleKey = ("tandem_requests_started_total", ())
ENDED = "tandem_requests_total"
FAILED: SampleKey = (ENDED, (("outcome", "failed"),))
REQUESTS = "tandem_requests"
"""The family of ENDED."""


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One family of metrics of one process."""

    name: str
    documentation: str
    type: str
    samples: tuple[tuple[str, dict[str, str], float], ...]

    def values(self) -> Values:
        return {(name, tuple(sorted(labels.items()))): value for name, labels, value in self.samples}


Families = list[Family]


def families_of(metrics: RouterMetrics) -> Families:
    """What this process has counted itself."""
    of_workers = {metric.name for metric in metrics.workers.collect()}
    return [_family(metric) for metric in metrics.registry.collect() if metric.name not in of_workers]


def _family(metric: Metric) -> Family:
    samples = tuple((sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples)
    return Family(metric.name, metric.documentation, metric.type, samples)


class MergedMetrics(Collector):
    """`own`: the metrics of the parent. `latest`: what each living process said last."""

    def __init__(
        self, own: RouterMetrics, latest: Callable[[], Sequence[Families]], *, usual_names: str | None = None
    ) -> None:
        self._own = own
        self._latest = latest
        self._gone: dict[str, Values] = {}
        """What processes that are gone have counted, by family."""
        self._registries = [CollectorRegistry()]
        self._registries[0].register(self)
        if usual_names is not None:
            self._registries.append(CollectorRegistry())
            self._registries[1].register(UsualNames(self.collect, usual_names))

    def render(self) -> bytes:
        return b"".join(generate_latest(registry) for registry in self._registries)

    def bury(self, families: Families) -> None:
        """A process has ended; this is the last that it said."""
        all_values: Values = {}
        for family in families:
            if family.type == "gauge":
                continue
            values = family.values()
            all_values |= values
            _add(self._gone.setdefault(family.name, {}), values)
        num_ended = sum(value for (name, _), value in all_values.items() if name == ENDED)
        num_lost = all_values.get(STARTED, 0.0) - num_ended
        if num_lost > 0:
            _add(self._gone.setdefault(REQUESTS, {}), {FAILED: num_lost})

    def collect(self) -> Iterable[Metric]:
        told = [{family.name: family for family in families} for families in self._latest()]
        of_workers = list(self._own.workers.collect())
        yield from of_workers
        names_of_workers = {metric.name for metric in of_workers}
        for metric in self._own.registry.collect():
            if metric.name in names_of_workers:
                continue
            others = [families[metric.name] for families in told if metric.name in families]
            yield self._merged(_family(metric), others)

    def _merged(self, own: Family, others: Sequence[Family]) -> Metric:
        merged = Metric(own.name, own.documentation, own.type)
        values = own.values()
        if own.name in LOWEST:
            values = {
                key: min([value, *(other.values().get(key, value) for other in others)])
                for key, value in values.items()
            }
        else:
            for more in (*(other.values() for other in others), self._gone.get(own.name, {})):
                _add(values, more)
        for (name, labels), value in values.items():
            merged.add_sample(name, dict(labels), value)
        return merged


def _add(values: Values, more: Values) -> None:
    for key, value in more.items():
        if key[0].endswith("_created"):  # the time of its making: the first counts
            values[key] = min(value, values.get(key, value))
        else:
            values[key] = values.get(key, 0.0) + value
