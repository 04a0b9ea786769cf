"""What came of a tuning, for people (a table per op and shape: candidates down, buckets across) and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tandem.kernels.autotune import DeviceKey, TuningReport, TuningResult
from tandem.workers.warm_up import Phase

CLOSE = 0.05
"""Candidates up to this much slower than the fastest are marked."""
MAX_WIDTH = 1000
LEGEND = "> chosen   * fastest   ~ within 5 % of it   - not available or not measured"


def show_report(console: Console, report: TuningReport, device: DeviceKey, path: Path, phases: Sequence[Phase]) -> None:
    """Print all tables and a summary."""
    tables = [_table(results) for results in _groups(report)]
    unbounded = console.options.update(max_width=MAX_WIDTH)
    widths = [Measurement.get(console, unbounded, table).maximum for table in tables]
    console.width = max(console.width, *widths, 0)  # a wrapped line can be read, a cut one cannot
    for table in tables:
        console.print(table)
        console.print()
    for line in _summary(report, device, path, phases):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def report_as_json(report: TuningReport, device: DeviceKey, path: Path, phases: Sequence[Phase]) -> str:
    """One object; seconds by candidate, as measured."""
    results = [
        {
            "op": result.key.op,
            "shape": result.key.shape,
            "bucket": result.key.bucket,
            "dtype": result.key.dtype,
            "choice": result.choice.name,
            "source": result.source,
            "seconds": result.seconds,
            "unavailable": list(result.unavailable),
            "worst_over_best": _worst_over_best(result),
            "noise": result.noise,
            "num_rounds": result.num_rounds,
        }
        for result in report.results
    ]
    return json.dumps(
        {
            "device": msgspec.to_builtins(device),
            "file": str(path),
            "elapsed_s": report.elapsed_s,
            "phases": {phase.name: phase.seconds for phase in phases},
            "results": results,
        }
    )


def _groups(report: TuningReport) -> list[list[TuningResult]]:
    """Results of one op, shape and dtype together, buckets ascending; groups in the order of their first."""
    groups: dict[tuple[str, str, str], list[TuningResult]] = {}
    for result in report.results:
        groups.setdefault((result.key.op, result.key.shape, result.key.dtype), []).append(result)
    return [sorted(group, key=lambda result: result.key.bucket) for group in groups.values()]


def _table(results: Sequence[TuningResult]) -> Table:
    key = results[0].key
    fastest = [min(result.seconds.values(), default=0.0) for result in results]
    unit, scale = ("ms", 1e3) if min(filter(None, fastest), default=0.0) >= 1e-3 else ("us", 1e6)
    title = f"{key.op} {key.shape} {key.dtype}, {unit}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("bucket", no_wrap=True)
    for result in results:
        table.add_column(str(result.key.bucket), justify="right", no_wrap=True)
    for name in dict.fromkeys(name for result in results for name in _names(result)):
        table.add_row(name, *(_cell(result, name, scale) for result in results))
    table.add_section()
    table.add_row("worst / best", *(_ratio(result) for result in results), style="dim")
    table.add_row(
        "noise", *(f"{100 * result.noise:.1f} % " if result.seconds else "- " for result in results), style="dim"
    )
    return table


def _names(result: TuningResult) -> list[str]:
    """Candidates that have a row because of this result."""
    return list(dict.fromkeys([*result.seconds, *result.unavailable, result.choice.name]))


def _cell(result: TuningResult, name: str, scale: float) -> Text:
    is_chosen = result.choice.name == name
    if name not in result.seconds:
        return Text(f"{'>' if is_chosen else ''}- ")
    ratio = result.seconds[name] / min(result.seconds.values())
    mark, style = ("*", "green") if ratio == 1 else ("~", "yellow") if ratio <= 1 + CLOSE else (" ", "")
    text = f"{'>' if is_chosen else ''}{_digits(result.seconds[name] * scale)}{mark}"
    return Text(text, style=f"bold {style}" if is_chosen else style)


def _digits(number: float) -> str:
    """Three digits that count, as far as they come after the point."""
    return f"{number:.2f}" if number < 10 else f"{number:.1f}" if number < 100 else f"{number:.0f}"


def _worst_over_best(result: TuningResult) -> float | None:
    return max(result.seconds.values()) / min(result.seconds.values()) if result.seconds else None


def _ratio(result: TuningResult) -> str:
    ratio = _worst_over_best(result)
    return "- " if ratio is None else f"{ratio:.2f} "


def _summary(report: TuningReport, device: DeviceKey, path: Path, phases: Sequence[Phase]) -> list[str]:
    sources = {"measured": "measured", "cache": "from the file", "only": "without a choice", "default": "not measured"}
    counts = [f"{report.count(source)} {said}" for source, said in sources.items() if report.count(source)]
    lines = [
        LEGEND,
        f"{device.name}, {device.num_threads} threads: {', '.join(counts) or 'nothing to choose'}",
        f"{', '.join(f'{phase.name} {phase.seconds:.1f} s' for phase in phases)}; kept in {path}",
    ]
    if report.count("default"):
        lines.append("What was not measured keeps its default: give it more time with --deadline.")
    return lines
