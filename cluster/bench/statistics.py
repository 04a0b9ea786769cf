"""What was measured, and what follows from it. Pure functions over plain records; no clock, no network.

Percentiles are `numpy.percentile` with linear interpolation between the two nearest values. Rates are per second of the
run: from the start of the first measured request to the end of the last.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the client saw it. Times in seconds; moments count from the start of the run."""

    number: int
    scheduled_s: float
    started_s: float
    ended_s: float
    error: str | None
    """None: it ended as it should. Otherwise the kind of failure."""
    ttft_s: float | None
    """From sending the request to its first token. None: it never came."""
    gaps_s: tuple[float, ...]
    """Between one event with tokens and the next."""
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    turn: int = 0
    """Place in its conversation; the turn before has the number before."""
    reusable_share: float = 0.0
    """Share of the prompt that an endless cache would have held."""

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def mean_itl_s(self) -> float | None:
        """Mean time per token after the first; None for outputs of one token."""
        if self.output_tokens < 2 or not self.gaps_s:
            return None
        return sum(self.gaps_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a set of durations, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float | None
    """None where only a histogram is known."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that succeeded within both limits."""

    good: int
    share: float
    """Of all requests, failed ones included."""
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """One turn of all conversations, tokens per request on average. New: neither in the prompt nor in the answer of the
    turn before. Computed: not from the cache."""

    turn: int
    count: int
    prompt_tokens: float
    new_tokens: float
    computed_tokens: float
    most_recomputed: int
    """Most tokens that any one of them computed beyond its new ones."""
    ttft_p50: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What all requests of a run come to. Latencies are of those that succeeded; durations in seconds."""

    num_ok: int
    num_failed: int
    errors: Mapping[str, int]
    """Failed requests by kind."""
    duration_s: float
    ttft: Percentiles | None
    itl_per_request: Percentiles | None
    itl_per_gap: Percentiles | None
    end_to_end: Percentiles | None
    start_delay: Percentiles | None
    """How late requests were sent against their schedule. Large values: this client was too slow, not the server."""
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    goodput: Goodput
    cached_share: float | None
    """Cached prompt tokens of all prompt tokens; None when the server does not say."""
    ideal_cached_share: float | None
    """The same from an endless cache. None for no prompts."""
    turns: tuple[TurnFigures, ...]
    """Of conversations; empty when every request stands alone."""


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """None for no values."""
    if not values:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Percentiles(len(values), float(np.mean(values)), p50, p90, p99, max(values))


def goodput(records: Sequence[RequestRecord], *, slo_ttft_s: float, slo_itl_s: float, duration_s: float) -> Goodput:
    """A request is good if it succeeded, its first token came within `slo_ttft_s`, and its mean inter-token latency is
    at most `slo_itl_s` (outputs of one token have none, and meet it)."""
    good = sum(is_good(record, slo_ttft_s=slo_ttft_s, slo_itl_s=slo_itl_s) for record in records)
    return Goodput(good, good / len(records) if records else 0.0, good / duration_s if duration_s > 0 else 0.0)


def is_good(record: RequestRecord, *, slo_ttft_s: float, slo_itl_s: float) -> bool:
    if record.error is not None or record.ttft_s is None or record.ttft_s > slo_ttft_s:
        return False
    return record.mean_itl_s is None or record.mean_itl_s <= slo_itl_s


def summarise(records: Sequence[RequestRecord], *, slo_ttft_s: float, slo_itl_s: float) -> Summary:
    """Latencies are those of successful requests; tokens and rates count what failed requests delivered, too."""
    ok = [record for record in records if record.error is None]
    started_s = min((record.started_s for record in records), default=0.0)
    duration_s = max((record.ended_s for record in records), default=0.0) - started_s
    output_tokens = sum(record.output_tokens for record in records)
    reported = [record for record in ok if record.cached_tokens is not None and record.prompt_tokens]
    return Summary(
        num_ok=len(ok),
        num_failed=len(records) - len(ok),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        duration_s=duration_s,
        ttft=percentiles([record.ttft_s for record in ok if record.ttft_s is not None]),
        itl_per_request=percentiles([itl for record in ok if (itl := record.mean_itl_s) is not None]),
        itl_per_gap=percentiles([gap for record in ok for gap in record.gaps_s]),
        end_to_end=percentiles([record.duration_s for record in ok]),
        start_delay=percentiles([record.started_s - record.scheduled_s for record in records]),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in ok),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / duration_s if duration_s > 0 else 0.0,
        requests_per_s=len(ok) / duration_s if duration_s > 0 else 0.0,
        goodput=goodput(records, slo_ttft_s=slo_ttft_s, slo_itl_s=slo_itl_s, duration_s=duration_s),
        cached_share=_share_of_prompts(reported, lambda record: record.cached_tokens or 0),
        ideal_cached_share=_share_of_prompts(
            reported, lambda record: record.reusable_share * (record.prompt_tokens or 0)
        ),
        turns=turn_figures(reported),
    )


def _share_of_prompts(records: Sequence[RequestRecord], tokens_of: Callable[[RequestRecord], float]) -> float | None:
    """Of all their prompt tokens. None for no prompts."""
    num_tokens = sum(record.prompt_tokens or 0 for record in records)
    return sum(map(tokens_of, records)) / num_tokens if num_tokens else None


def turn_figures(records: Sequence[RequestRecord]) -> tuple[TurnFigures, ...]:
    """By turn, of records with known prompt and cached tokens. A turn whose predecessor failed is left out."""
    by_number = {record.number: record for record in records}
    by_turn: dict[int, list[tuple[RequestRecord, int]]] = defaultdict(list)
    for record in records:
        before = by_number.get(record.number - 1) if record.turn else None
        if record.turn == 0 or before is not None:
            known = 0 if before is None else (before.prompt_tokens or 0) + before.output_tokens
            by_turn[record.turn].append((record, (record.prompt_tokens or 0) - known))
    if set(by_turn) <= {0}:
        return ()
    return tuple(_turn(turn, members) for turn, members in sorted(by_turn.items()))


def _turn(turn: int, members: Sequence[tuple[RequestRecord, int]]) -> TurnFigures:
    computed = [(record.prompt_tokens or 0) - (record.cached_tokens or 0) for record, _ in members]
    new = [num_new for _, num_new in members]
    return TurnFigures(
        turn=turn,
        count=len(members),
        prompt_tokens=float(np.mean([record.prompt_tokens for record, _ in members])),
        new_tokens=float(np.mean(new)),
        computed_tokens=float(np.mean(computed)),
        most_recomputed=max(mine - theirs for mine, theirs in zip(computed, new, strict=True)),
        ttft_p50=float(np.median([record.ttft_s for record, _ in members if record.ttft_s is not None])),
    )


@dataclass(frozen=True, slots=True)
class Histogram:
    """A Prometheus histogram: cumulative counts by upper bound, ascending, the last bound infinite."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float
    """Sum of the observations."""

    def since(self, earlier: Histogram | None) -> Histogram:
        """What was observed after `earlier`. A server that restarted meanwhile counts from its restart."""
        if earlier is None or earlier.bounds != self.bounds or earlier.counts[-1] > self.counts[-1]:
            return self
        counts = tuple(now - before for now, before in zip(self.counts, earlier.counts, strict=True))
        return Histogram(self.bounds, counts, self.total - earlier.total)

    def quantile(self, share: float) -> float:
        """Linear within the bucket, as Prometheus does it; the last finite bound for what lies beyond."""
        rank = share * self.counts[-1]
        lower_bound = lower_count = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= rank and count > lower_count:
                if bound == float("inf"):
                    return lower_bound
                return lower_bound + (bound - lower_bound) * (rank - lower_count) / (count - lower_count)
            lower_bound, lower_count = bound, count
        return lower_bound

    def percentiles(self) -> Percentiles | None:
        """None for no observations."""
        count = self.counts[-1]
        if count <= 0:
            return None
        p50, p90, p99 = (self.quantile(share) for share in (0.5, 0.9, 0.99))
        return Percentiles(int(count), self.total / count, p50, p90, p99, None)
