"""`tandem top`: two samples make rates and one screen."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tandem.cluster import top
from tandem.cluster.top import Sample, bar, parse_metrics, quantile, rates, run_top, screen
from tandem.router.metrics import RouterMetrics

BLOCKS = {"total": 24, "used": 6, "incoming": 3, "cached": 12, "quarantined": 0, "free": 3}
CLUSTER = {
    "model": "m",
    "redis": {"up": False},
    "workers": [
        {"id": "decode-0", "state": "ready", "address": "10.0.0.1:7400", "epoch": 3, "running": 2, "waiting": 1}
        | {"blocks": BLOCKS}
    ],
}


def sample(metrics: RouterMetrics, at: float, cluster: Any = CLUSTER) -> Sample:
    return Sample(at, cluster, parse_metrics(metrics.render().decode()))


def two_samples() -> tuple[Sample, Sample]:
    metrics = RouterMetrics(list)
    metrics.prompt_tokens.inc(1000)
    metrics.time_to_first_token.observe(200)
    before = sample(metrics, 10.0)
    metrics.prompt_tokens.inc(400)
    metrics.cached_tokens.labels("decode").inc(100)
    metrics.generation_tokens.value += 60
    metrics.started.inc(5)
    metrics.requests.labels("ok").inc(3)
    metrics.requests.labels("failed").inc(1)
    metrics.time_to_first_token.observe(0.3)
    return before, sample(metrics, 12.0)


def test_rates_are_of_the_time_between_the_samples() -> None:
    told = dict(rates(*two_samples()))
    assert told == {
        "in flight": "1",
        "ended": "2.0/s",
        "failed": "0.5/s",
        "prompt": "200 tok/s",
        "cached": "25 %",
        "written": "30 tok/s",
        "first token p50": "<= 500 ms",
        "between p50": "-",
    }


def test_a_quantile_of_what_is_new() -> None:
    inf = float("inf")
    assert quantile(0.5, {0.1: 5, 1.0: 5, inf: 5}, {0.1: 5, 1.0: 9, inf: 10}) == 1.0
    assert quantile(0.99, {}, {0.1: 5, inf: 10}) == inf
    assert quantile(0.5, {inf: 5}, {inf: 5}) is None


def test_a_bar_is_as_long_as_the_pool() -> None:
    assert bar(BLOCKS).plain == "█" * 21 + "···"
    assert [str(span.style) for span in bar(BLOCKS).spans][:3] == ["red", "yellow", "blue"]
    assert bar(dict.fromkeys(BLOCKS, 0)).plain == "·" * 24


def test_the_screen_shows_workers_and_rates() -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(screen(*two_samples()))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("decode-0", "10.0.0.1:7400", "prefix index down", "200 tok/s", "<= 500 ms"):
        assert word in text


def test_a_cluster_that_goes_away_is_said_and_looked_for_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = iter([*two_samples(), None, two_samples()[1]])

    def take(url: str) -> Sample:
        found = next(samples)
        if found is None:
            raise top.UserError("no Tandem cluster answers")
        return found

    monkeypatch.setattr(top, "take_sample", take)
    run_top("http://nowhere", interval_s=0, rounds=3)
    assert next(samples, None) is None
    assert "decode-0" in capsys.readouterr().out
