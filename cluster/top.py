"""`tandem top`: what a cluster does right now, redrawn every second or two.

    GET /cluster, GET /metrics  ->  Sample  ->  rates between two samples  ->  one screen

`rates` and `screen` are pure: two samples in, something to look at out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tandem.cluster.status import STATES, fetch_cluster, wide_console
from tandem.workers.errors import UserError

BAR_WIDTH = 24
BAR_PARTS = (("used", "red"), ("incoming", "yellow"), ("cached", "blue"), ("quarantined", "magenta"))
Series = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Sample:
    """What the admin port said at one moment (seconds of a monotonic clock)."""

    at: float
    cluster: Mapping[str, Any]
    values: Mapping[Series, float]

    def total(self, name: str, **labels: str) -> float:
        """Sum of all series of this name that have these labels."""
        wanted = labels.items()
        return sum(
            value for (series, has), value in self.values.items() if series == name and wanted <= dict(has).items()
        )

    def buckets(self, name: str) -> dict[float, float]:
        """Cumulative counts by upper bound."""
        counts: dict[float, float] = {}
        for (series, labels), value in self.values.items():
            if series == f"{name}_bucket":
                bound = float(dict(labels)["le"])
                counts[bound] = counts.get(bound, 0.0) + value
        return counts


def parse_metrics(text: str) -> dict[Series, float]:
    """Every sample of a page of metrics. Raises `ValueError`."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def take_sample(url: str) -> Sample:
    """Raises `UserError` if no cluster answers."""
    cluster = fetch_cluster(url)
    try:
        answer = httpx.get(f"{url.rstrip('/')}/metrics", timeout=5.0, trust_env=False).raise_for_status()
        values = parse_metrics(answer.text)
    except (httpx.HTTPError, ValueError) as error:
        raise UserError(f"{url} does not show its metrics ({type(error).__name__})") from error
    return Sample(time.monotonic(), cluster, values)


def quantile(share: float, before: Mapping[float, float], now: Mapping[float, float]) -> float | None:
    """The upper bound of the bucket in which that share of the observations between two samples ends; None: none."""
    fresh = {bound: count - before.get(bound, 0.0) for bound, count in sorted(now.items())}
    num_all = fresh.get(float("inf"), 0.0)
    if num_all <= 0:
        return None
    return next(bound for bound, count in fresh.items() if count >= share * num_all)


def rates(before: Sample, now: Sample) -> list[tuple[str, str]]:
    """(what, how much) between two samples."""
    seconds = max(now.at - before.at, 1e-9)

    def per_second(name: str, **labels: str) -> float:
        return (now.total(name, **labels) - before.total(name, **labels)) / seconds

    prompt = per_second("tandem_prompt_tokens_total")
    cached = per_second("tandem_cached_tokens_total")
    told = [
        ("in flight", f"{now.total('tandem_requests_in_flight'):.0f}"),
        ("ended", f"{per_second('tandem_requests_total'):.1f}/s"),
        ("failed", f"{per_second('tandem_requests_total', outcome='failed'):.1f}/s"),
        ("prompt", f"{prompt:.0f} tok/s"),
        ("cached", f"{100 * cached / prompt:.0f} %" if prompt > 0 else "-"),
        ("written", f"{per_second('tandem_generation_tokens_total'):.0f} tok/s"),
    ]
    for label, name in (("first token", "time_to_first_token"), ("between", "inter_token_latency")):
        name = f"tandem_{name}_seconds"
        found = quantile(0.5, before.buckets(name), now.buckets(name))
        told.append((f"{label} p50", "-" if found is None else f"<= {1000 * found:.0f} ms"))
    return told


def bar(blocks: Mapping[str, int]) -> Text:
    """One worker's KV blocks: used, incoming, cached, quarantined, and the rest free."""
    text, length, total = Text(), 0, max(blocks["total"], 1)
    so_far = 0
    for state, color in BAR_PARTS:
        so_far += blocks[state]
        end = round(BAR_WIDTH * so_far / total)
        text.append("█" * (end - length), style=color)
        length = end
    return text.append("·" * (BAR_WIDTH - length), style="dim")


def screen(before: Sample, now: Sample) -> Group:
    """Everything, as something that rich can draw."""
    summary = Text()
    for what, how_much in rates(before, now):
        summary.append(f"{what} ", style="dim").append(f"{how_much}   ", style="bold")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("worker", "state", "address"):
        table.add_column(name)
    for name in ("epoch", "running", "waiting"):
        table.add_column(name, justify="right")
    table.add_column("KV blocks")
    for worker in now.cluster["workers"]:
        color = STATES.get(worker["state"], "white")
        numbers = [str(worker[name]) for name in ("epoch", "running", "waiting")]
        state = Text(worker["state"], style=color)
        table.add_row(worker["id"], state, worker["address"], *numbers, bar(worker["blocks"]))
    index = {True: "up", False: "down", None: "not configured"}[now.cluster["redis"]["up"]]
    legend = Text(f"{now.cluster['model']}   prefix index {index}   KV: ", style="dim")
    for name, color in BAR_PARTS:
        legend.append(f"█ {name} ", style=color)
    return Group(legend, summary, Text(), table)


def run_top(url: str, *, interval_s: float, rounds: int | None = None) -> None:
    """Until Ctrl-C, or for so many rounds. Raises `UserError` when the cluster is not there at the start."""
    console, before = wide_console(), take_sample(url)
    with Live(console=console, screen=console.is_terminal and rounds is None, auto_refresh=False) as live:
        while rounds is None or rounds > 0:
            time.sleep(interval_s)
            rounds = None if rounds is None else rounds - 1
            try:
                now = take_sample(url)
            except UserError as error:
                live.update(Text(str(error), style="red"), refresh=True)
                continue
            live.update(screen(before, now), refresh=True)
            before = now
