from __future__ import annotations

import random
from itertools import takewhile
from typing import Any

import numpy as np
import pytest

from tandem.cluster.bench.client import parse_histogram
from tandem.cluster.bench.reuse import SeenPrefixes, reusable_share
from tandem.cluster.bench.statistics import (
    Histogram,
    RequestRecord,
    TurnFigures,
    goodput,
    is_good,
    percentiles,
    summarise,
    turn_figures,
)

INFINITY = float("inf")


def record(**changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "number": 0,
        "scheduled_s": 0.0,
        "started_s": 0.0,
        "ended_s": 1.0,
        "error": None,
        "ttft_s": 0.5,
        "gaps_s": (0.1, 0.1, 0.1),
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "output_tokens": 4,
    }
    return RequestRecord(**(values | changes))


def test_percentiles_are_those_of_numpy() -> None:
    values = [5.0, 1.0, 2.0, 4.0, 3.0]
    found = percentiles(values)
    assert found is not None
    assert (found.count, found.mean, found.p50, found.max) == (5, 3.0, 3.0, 5.0)
    assert found.p90 == pytest.approx(4.6)
    assert found.p99 == pytest.approx(np.percentile(values, 99))
    assert percentiles([]) is None


def test_mean_itl_counts_tokens_not_events() -> None:
    # Two events of two tokens each: one gap of 0.3 s for three tokens after the first.
    assert record(gaps_s=(0.3,), output_tokens=4).mean_itl_s == pytest.approx(0.1)
    assert record(gaps_s=(), output_tokens=1).mean_itl_s is None


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"ttft_s": 1.0}, True),
        ({"ttft_s": 1.001}, False),
        ({"ttft_s": None}, False),
        ({"error": "timeout"}, False),
        ({"gaps_s": (0.1, 0.1, 0.101)}, False),
        ({"gaps_s": (0.28, 0.01, 0.01)}, True),  # the mean counts, not the worst gap
        ({"gaps_s": (), "output_tokens": 1}, True),
    ],
)
def test_what_a_good_request_is(changes: dict[str, Any], good: bool) -> None:
    assert is_good(record(**changes), slo_ttft_s=1.0, slo_itl_s=0.1000001) is good


def test_goodput_counts_failures_in_its_share() -> None:
    records = [record(), record(), record(ttft_s=2.0), record(error="HTTP 503", ttft_s=None)]
    found = goodput(records, slo_ttft_s=1.0, slo_itl_s=0.11, duration_s=4.0)
    assert (found.good, found.share, found.requests_per_s) == (2, 0.5, 0.5)
    nothing = goodput([], slo_ttft_s=1.0, slo_itl_s=0.1, duration_s=0.0)
    assert (nothing.good, nothing.share, nothing.requests_per_s) == (0, 0.0, 0.0)


def test_summary() -> None:
    records = [
        record(number=0, started_s=1.0, ended_s=2.0, cached_tokens=50),
        record(number=1, scheduled_s=1.5, started_s=2.0, ended_s=5.0, cached_tokens=25, ttft_s=2.0),
        record(number=2, started_s=2.0, ended_s=3.0, error="timeout", output_tokens=2, cached_tokens=None),
        record(number=3, started_s=2.0, ended_s=2.1, error="HTTP 503", output_tokens=0, ttft_s=None, gaps_s=()),
        record(number=4, started_s=2.0, ended_s=2.1, error="HTTP 503", output_tokens=0, ttft_s=None, gaps_s=()),
    ]
    summary = summarise(records, slo_ttft_s=1.0, slo_itl_s=0.2)
    assert (summary.num_ok, summary.num_failed) == (2, 3)
    assert list(summary.errors.items()) == [("HTTP 503", 2), ("timeout", 1)]
    assert summary.duration_s == 4.0
    assert summary.output_tokens == 10
    assert summary.output_tokens_per_s == 2.5
    assert summary.requests_per_s == 0.5
    assert summary.cached_share == 75 / 200
    assert summary.ttft is not None
    assert summary.ttft.count == 2
    assert summary.itl_per_gap is not None
    assert summary.itl_per_gap.count == 6
    assert summary.goodput.good == 1
    assert summarise([], slo_ttft_s=1.0, slo_itl_s=0.1).output_tokens_per_s == 0.0
    assert summarise([record(cached_tokens=None)], slo_ttft_s=1.0, slo_itl_s=0.1).cached_share is None


def test_turns_are_compared_with_the_turn_before() -> None:
    turns = turn_figures(
        [
            record(number=0, prompt_tokens=100, cached_tokens=0, output_tokens=10, ttft_s=1.0),
            record(number=1, turn=1, prompt_tokens=150, cached_tokens=96, output_tokens=10, ttft_s=0.25),
            record(number=3, turn=1, prompt_tokens=150, cached_tokens=0, output_tokens=10),  # its first turn failed
        ]
    )
    assert turns == (
        TurnFigures(0, 1, 100.0, 100.0, 100.0, 0, 1.0),
        TurnFigures(1, 1, 150.0, 40.0, 54.0, 14, 0.25),
    )
    assert turn_figures([record(number=0), record(number=1)]) == ()


def test_seen_prefixes_against_comparing_with_everything() -> None:
    chooser = random.Random(5)
    seen, everything = SeenPrefixes(), list[list[int]]()
    for _ in range(300):
        symbols = [chooser.randrange(2) for _ in range(chooser.randrange(1, 12))]
        expected = max((_num_common(symbols, other) for other in everything), default=0)
        assert seen.add(symbols) == expected
        everything.append(symbols)


def _num_common(one: list[int], other: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other))))


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    assert (reusable_share(8, 8), reusable_share(4, 8), reusable_share(0, 1)) == (7 / 8, 0.5, 0.0)


def test_histogram_quantiles_are_linear_within_a_bucket() -> None:
    histogram = Histogram((0.1, 0.2, 0.4, INFINITY), (0, 10, 20, 20), 4.0)
    assert histogram.quantile(0.25) == pytest.approx(0.15)
    assert histogram.quantile(0.5) == pytest.approx(0.2)
    assert histogram.quantile(0.75) == pytest.approx(0.3)
    assert Histogram((0.1, INFINITY), (1, 10), 9.0).quantile(0.9) == 0.1  # beyond the last bound: nothing better known


def test_histogram_difference() -> None:
    earlier, later = Histogram((1.0, INFINITY), (2, 3), 4.0), Histogram((1.0, INFINITY), (12, 13), 9.0)
    difference = later.since(earlier)
    assert (difference.counts, difference.total) == ((10, 10), 5.0)
    assert later.since(None) == later
    assert earlier.since(later) == earlier  # the server has restarted
    assert later.since(later).percentiles() is None


def test_histogram_out_of_a_metrics_page() -> None:
    page = """# HELP tandem_handover_seconds x
# TYPE tandem_handover_seconds histogram
tandem_handover_seconds_bucket{le="0.1",worker="a"} 1
tandem_handover_seconds_bucket{le="+Inf",worker="a"} 2
tandem_handover_seconds_sum{worker="a"} 0.5
tandem_handover_seconds_count{worker="a"} 2
tandem_handover_seconds_bucket{le="0.1",worker="b"} 3
tandem_handover_seconds_bucket{le="+Inf",worker="b"} 3
tandem_handover_seconds_sum{worker="b"} 0.25
tandem_handover_seconds_count{worker="b"} 3
"""
    assert parse_histogram(page, "tandem_handover_seconds") == Histogram((0.1, INFINITY), (4, 5), 0.75)
    assert parse_histogram(page, "tandem_other_seconds") is None
