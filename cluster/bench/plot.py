"""One picture of a run: how latencies are distributed, and when they happened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandem.cluster.bench.serve import ServeReport
from tandem.cluster.bench.statistics import RequestRecord
from tandem.workers.errors import UserError

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d1690e", "#666666"


def save_plot(report: ServeReport, path: Path) -> None:
    """Write a PNG (or what the suffix says). Raises `UserError` if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    options = report.options
    ok = [record for record in report.records if record.error is None]
    figure = Figure(figsize=(12, 8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, height_ratios=(1, 1.1))
    first, second, third = (figure.add_subplot(grid[0, column]) for column in range(3))
    timeline = figure.add_subplot(grid[1, :])
    _distribution(first, [r.ttft_s for r in ok if r.ttft_s is not None], "time to first token", options.slo_ttft_s)
    itls = [itl for r in ok if (itl := r.mean_itl_s) is not None]
    _distribution(second, itls, "mean inter-token latency", options.slo_itl_s)
    _distribution(third, [r.duration_s for r in ok], "end to end", None)
    _timeline(timeline, report.records)
    summary = report.summary
    figure.suptitle(
        f"{report.model}: {summary.num_ok} requests ok, {summary.num_failed} failed, "
        f"{summary.output_tokens_per_s:.0f} output tokens/s, goodput {summary.goodput.requests_per_s:.2f} requests/s "
        f"({summary.goodput.share:.0%})"
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the plot cannot be written: {error}") from error


def _distribution(axes: Any, values: Sequence[float], title: str, limit_s: float | None) -> None:
    """The share of requests that took at most so long, with p50, p90 and p99 marked."""
    axes.set_title(title)
    axes.set_xlabel("seconds")
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    if not values:
        axes.text(0.5, 0.5, "nothing measured", ha="center", va="center", transform=axes.transAxes, color=_GREY)
        return
    ordered = np.sort(values)
    axes.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), drawstyle="steps-post", color=_BLUE, linewidth=2)
    for percent in (50, 90, 99):
        value = float(np.percentile(ordered, percent))
        axes.plot([value], [percent / 100], "o", color=_BLUE, label=f"p{percent}  {value:.3g} s")
    if limit_s is not None:
        axes.axvline(limit_s, color=_ORANGE, linestyle="--", label=f"limit  {limit_s:g} s")
    axes.set_xlim(left=0)
    axes.legend(loc="lower right", framealpha=0.9)


def _timeline(axes: Any, records: Sequence[RequestRecord]) -> None:
    """One line per request from sending to its end; the part before the first token in orange, failures crossed."""
    axes.set_title("each request: waiting for the first token, then streaming")
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel("request")
    axes.grid(alpha=0.3)
    answered = [record for record in records if record.ttft_s is not None]
    failed = [record for record in records if record.error is not None]
    first_tokens = [record.started_s + (record.ttft_s or 0.0) for record in answered]
    numbers = [record.number for record in answered]
    width = max(0.6, min(4.0, 250.0 / max(1, len(records))))
    axes.hlines(numbers, [r.started_s for r in answered], first_tokens, color=_ORANGE, linewidth=width, label="waiting")
    axes.hlines(numbers, first_tokens, [r.ended_s for r in answered], color=_BLUE, linewidth=width, label="streaming")
    if failed:
        axes.plot([r.ended_s for r in failed], [r.number for r in failed], "x", color="black", label="failed")
    axes.set_xlim(left=0)
    axes.legend(loc="upper left", framealpha=0.9)
