"""How a run is shown: a table for people, JSON for programs, progress while it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tandem.cluster.bench.serve import ServeReport
from tandem.cluster.bench.statistics import Percentiles, RequestRecord, TurnFigures

_LINE_INTERVAL_S = 5.0


def print_report(report: ServeReport, console: Console) -> None:
    summary, options = report.summary, report.options
    table = Table(title=f"{report.model} at {options.url}", title_justify="left")
    table.add_column("seconds")
    for name in ("p50", "p90", "p99", "mean", "max", "count"):
        table.add_column(name, justify="right")
    for label, values in latencies(report).items():
        table.add_row(label, *_cells(values))
    console.print(table)
    good = summary.goodput
    limits = f"TTFT <= {options.slo_ttft_s:g} s, mean ITL <= {options.slo_itl_s:g} s"
    facts = {
        "requests": f"{summary.num_ok} ok, {summary.num_failed} failed{_listed(summary.errors)}",
        "throughput": f"{summary.output_tokens_per_s:.1f} output tokens/s, {summary.requests_per_s:.2f} requests/s",
        "goodput": f"{good.requests_per_s:.2f} requests/s, {good.share:.1%} of requests ({limits})",
        "prompts": f"{summary.prompt_tokens} tokens, {_share(summary.cached_share)} cached "
        f"({_share(summary.ideal_cached_share)} with an endless cache)",
        "run": f"{summary.duration_s:.1f} s, seed {options.seed}" + (", interrupted" * report.was_interrupted),
    }
    for label, text in facts.items():
        console.print(f"{label:<11}{text}", highlight=False, soft_wrap=True)
    if summary.turns:
        console.print(_turns_table(summary.turns))
    if summary.start_delay and summary.start_delay.p99 > 0.1 and options.concurrency is None:
        console.print(
            f"Requests were sent up to {summary.start_delay.max:.2f} s late: this client was too slow for the load.",
            style="yellow",
        )


def _turns_table(turns: Sequence[TurnFigures]) -> Table:
    table = Table(title="Tokens per turn (mean)", title_justify="left")
    for name in ("turn", "requests", "prompt", "new", "computed", "most recomputed", "TTFT p50, s"):
        table.add_column(name, justify="right")
    for turn in turns:
        means = (f"{value:.1f}" for value in (turn.prompt_tokens, turn.new_tokens, turn.computed_tokens))
        table.add_row(str(turn.turn + 1), str(turn.count), *means, str(turn.most_recomputed), f"{turn.ttft_p50:.4f}")
    return table


def latencies(report: ServeReport) -> dict[str, Percentiles | None]:
    summary = report.summary
    return {
        "first token (TTFT)": summary.ttft,
        "ITL, request's mean": summary.itl_per_request,
        "ITL, each gap": summary.itl_per_gap,
        "end to end": summary.end_to_end,
        "handover": report.handover,
    }


def to_json(report: ServeReport) -> bytes:
    """`{"options", "model", "summary", "handover", "was_interrupted", "requests": [...]}`; the key is left out."""
    options: dict[str, Any] = asdict(report.options) | {"api_key": None}
    body = {
        "options": options,
        "model": report.model,
        "summary": asdict(report.summary),
        "handover": report.handover and asdict(report.handover),
        "was_interrupted": report.was_interrupted,
        "requests": [asdict(record) for record in report.records],
    }
    return msgspec.json.format(msgspec.json.encode(body, enc_hook=_plain), indent=2) + b"\n"


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value).__name__)


def _cells(values: Percentiles | None) -> list[str]:
    if values is None:
        return ["n/a"] * 5 + ["0"]
    seconds = [values.p50, values.p90, values.p99, values.mean, values.max]
    return ["n/a" if value is None else f"{value:.4f}" for value in seconds] + [str(values.count)]


def _listed(errors: Any) -> str:
    return f" ({', '.join(f'{kind}: {count}' for kind, count in errors.items())})" if errors else ""


def _share(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"


class ConsoleProgress:
    """A bar on a terminal, a plain line every few seconds elsewhere. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total: int | None = None
        self._num_sent = self._num_ended = self._num_failed = 0
        self._next_line_s = time.monotonic() + _LINE_INTERVAL_S
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)

    def __enter__(self) -> ConsoleProgress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("warming up", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def started(self, total: int | None) -> None:
        self._total = total
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, total=total, description="requests")

    def sent(self) -> None:
        self._num_sent += 1
        self._show()

    def ended(self, record: RequestRecord) -> None:
        self._num_ended += 1
        self._num_failed += record.error is not None
        self._show()

    def _show(self) -> None:
        running, failed = self._num_sent - self._num_ended, self._num_failed
        text = f"{running} running, {failed} failed"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._num_ended, description=text)
        elif time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + _LINE_INTERVAL_S
            total = "" if self._total is None else f" of {self._total}"
            self._console.print(f"{self._num_ended}{total} requests ended, {text}", highlight=False)
