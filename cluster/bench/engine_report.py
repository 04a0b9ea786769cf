"""How `tandem bench engine` is shown: one table per number of cores, on a terminal, as Markdown, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tandem.cluster.bench.engine import OURS, CoreReport, EngineOptions
from tandem.cluster.bench.engine_figures import Decode, LoopTimes, Row, ratio, weight_bytes

HEADINGS = ("workload", "engine", "tokens/s", "step or prompt, ms", "of the limit", "tandem is", "others' cores")


def print_engine_report(options: EngineOptions, reports: Sequence[CoreReport], console: Console) -> None:
    for report in reports:
        table = Table(title=_title(options, report), title_justify="left")
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading in HEADINGS[:2] else "right")
        for row in report.rows:
            table.add_row(*cells(report, row), style="bold" if row.side == OURS else None)
        console.print(table)
        for note in notes(report):
            console.print(note, highlight=False, markup=False, soft_wrap=True)


def to_markdown(options: EngineOptions, reports: Sequence[CoreReport]) -> str:
    """The same tables for a README."""
    lines: list[str] = []
    for report in reports:
        lines += [f"### {_title(options, report)}", "", _line(HEADINGS), _line(["---"] * 2 + ["---:"] * 5)]
        lines += [_line(cells(report, row)) for row in report.rows]
        lines += ["", *(f"* {note}" for note in notes(report)), ""]
    return "\n".join(lines)


def to_json(options: EngineOptions, reports: Sequence[CoreReport]) -> bytes:
    """Everything that was measured, with what follows from it."""
    body = {
        "model": options.model,
        "rounds": options.rounds,
        "steps": options.steps,
        "seed": options.seed,
        "weight_bytes": weight_bytes(options.config, 2),
        "cores": [asdict(report) | {"rows": [_row(report, row) for row in report.rows]} for report in reports],
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"


def cells(report: CoreReport, row: Row) -> list[str]:
    """One row of the table."""
    if row.error is not None:
        return [row.workload.label, row.side, "failed", row.error[:60], "", "", f"{row.others:.2f}"]
    share, ours = row.share(report.limits), _same_workload(report, row)
    faster = None if ours is None or row.side == OURS else ratio(ours, row)
    spread = f"{1e3 * min(row.seconds):.1f}-{1e3 * max(row.seconds):.1f}"
    return [
        row.workload.label,
        row.side,
        f"{row.tokens_per_s:,.0f}" if row.tokens_per_s >= 100 else f"{row.tokens_per_s:.1f}",
        f"{1e3 * row.median_s:.1f} ({spread})",
        "" if share is None else f"{share:.0%}",
        "" if faster is None else f"{faster:.2f}x",
        f"{row.others:.2f}",
    ]


def notes(report: CoreReport) -> list[str]:
    """The limits, what belongs to no single row, and what went wrong."""
    limits = report.limits
    lines = [
        f"Read bandwidth: {limits.best_bandwidth / 1e9:.1f} GB/s ({_listed(limits.bandwidth, 1e9)})",
        f"Matrix rate, bfloat16: {limits.best_matrix / 1e9:,.0f} GFLOP/s ({_listed(limits.matrix, 1e9)})",
    ]
    lines += [line for line in (_growth(report),) if line is not None]
    if report.loop is not None:
        lines.append(_loop_line(report.loop))
    return lines + [f"Failed: {failure}" for failure in report.failures]


def _growth(report: CoreReport) -> str | None:
    """How much longer a step of many streams takes than a step of one, at the same context."""
    ours = [row for row in report.rows if row.side == OURS and row.error is None and isinstance(row.workload, Decode)]
    by_size = {(row.workload.streams, row.workload.context): row for row in ours if isinstance(row.workload, Decode)}
    parts = [
        f"{streams} x {context}: {row.median_s / by_size[1, context].median_s:.2f}x"
        for (streams, context), row in by_size.items()
        if streams > 1 and (1, context) in by_size
    ]
    return f"A step of many streams against a step of one: {', '.join(parts)}" if parts else None


def _loop_line(loop: LoopTimes) -> str:
    parts = {"schedule": loop.schedule, "runner's Python": loop.host, "account": loop.apply}
    listed = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in parts.items())
    return (
        f"Whole engine, {loop.streams} streams: step {1e3 * loop.step:.2f} ms, runner {1e3 * loop.execute:.2f}; "
        f"{listed} ms; all but the model {loop.overhead:.1%}"
    )


def _row(report: CoreReport, row: Row) -> dict[str, Any]:
    body = asdict(row) | {"workload": row.workload.label}
    if row.error is None:
        body |= {"median_s": row.median_s, "tokens_per_s": row.tokens_per_s, "share": row.share(report.limits)}
    return body


def _same_workload(report: CoreReport, row: Row) -> Row | None:
    return next((other for other in report.rows if other.side == OURS and other.workload == row.workload), None)


def _title(options: EngineOptions, report: CoreReport) -> str:
    now = datetime.now(UTC).date().isoformat()
    return f"{options.model}, bfloat16, {report.num_cores} core(s), medians of {options.rounds} rounds, {now}"


def _listed(rates: dict[str, float], unit: float) -> str:
    return ", ".join(f"{name} {rate / unit:,.1f}" for name, rate in sorted(rates.items(), key=lambda item: -item[1]))


def _line(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"
