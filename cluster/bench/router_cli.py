"""The command line of `tandem bench router`, and how its result is shown."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from tandem.cluster.bench.command_line import JsonPath, failures_of, numbers, put_json, table_console, tell_progress

if TYPE_CHECKING:
    from tandem.cluster.bench.router import Case, RouterReport
    from tandem.cluster.bench.router_faults import FaultCase

HEADINGS = (
    "workers", "tokens", "per s", "p50", "p99", "CPU", "least", "hash", "policy", "cores", "Redis", "late", "load"
)  # fmt: skip
LEGEND = (
    "Of one decision, in milliseconds: p50 and p99 on the clock; the gateway's CPU time, mean and least, and what "
    "hashing and the policy take of it; Redis's CPU time. per s: one after another. cores: the gateway's at "
    "99 requests/s. late: look-ups beyond the budget. load: cores that others kept busy."
)
FAULT_HEADINGS = (
    "fault", "count", "p50 before", "p99", "p50 under", "p99", "max", "added p50", "added p99", "late", "whole after, s"
)  # fmt: skip
FAULT_LEGEND = (
    "On the clock, in milliseconds, of decisions at 99 per second: in the window before the fault, and under it. late: "
    "look-ups beyond the budget; after three Redis is not asked for a while. whole after: from the fault's end until "
    "a look-up found what a worker had just published."
)
PolicyChoice = Literal["cost", "round-robin", "least-loaded", "prefix"]


def router(
    workers: Annotated[str, typer.Option(help="How many workers: one case for each.")] = "1,100,1000",
    tokens: Annotated[str, typer.Option(help="Prompt lengths: one case for each.")] = "1000,4000,100000",
    blocks: Annotated[int, typer.Option(min=0, help="Blocks in the index, besides those asked for.")] = 1_000_000,
    decisions: Annotated[int, typer.Option(min=1, help="Timed decisions per case.")] = 500,
    budget: Annotated[float, typer.Option(min=0.0001, help="For a look-up, in seconds, as in the gateway.")] = 0.005,
    policy: Annotated[
        PolicyChoice, typer.Option(help="As for tandem serve --router-policy; some never ask the index.")
    ] = "cost",
    seed: Annotated[int, typer.Option(help="Other prompts, other loads.")] = 0,
    json_path: JsonPath = None,
    faults: Annotated[
        bool,
        typer.Option(
            "--faults",
            help="Instead: what a Redis that fails adds to a decision, for the first of --workers and --tokens.",
        ),
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Of all faults.")] = 1,
) -> None:
    """Measure what a routing decision costs: hashing, the index in a real server, the policy, the books.

    tandem bench router --workers 100 --tokens 100000 --blocks 10000000
    tandem bench router --faults --workers 100 --tokens 4000 --blocks 10000
    """
    from tandem.cluster.bench.router import RouterBenchOptions, bench_router
    from tandem.cluster.bench.router_faults import bench_faults

    with failures_of("router"):
        options = RouterBenchOptions(
            num_workers=numbers("--workers", workers),
            prompt_tokens=numbers("--tokens", tokens),
            num_blocks=blocks,
            num_decisions=decisions,
            budget_s=budget,
            policy=policy,
            seed=seed,
        )
        if faults:
            cases = asyncio.run(bench_faults(options, tell_progress, rounds=rounds))
            print_faults(cases, table_console(json_path))
            put_json(json_path, msgspec.json.format(msgspec.json.encode([asdict(case) for case in cases])) + b"\n")
            return
        report = asyncio.run(bench_router(options, tell_progress))
        print_router_report(report, table_console(json_path))
        put_json(json_path, to_json(report))


def print_router_report(report: RouterReport, console: Console) -> None:
    title = f"{report.options.policy}, {report.index_blocks:,} blocks in the index ({report.index_bytes / 1e6:,.0f} MB)"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for case in report.cases:
        table.add_row(*cells(case))
    console.print(table)
    console.print(LEGEND, style="dim", highlight=False)


def cells(case: Case) -> list[str]:
    """One row of the table; times in milliseconds."""
    return [
        f"{case.num_workers:,}",
        f"{case.prompt_tokens:,}",
        f"{case.decisions_per_s:,.0f}",
        *(f"{1e3 * seconds:.2f}" for seconds in (case.wall_p50_s, case.wall_p99_s, case.cpu_mean_s, case.cpu_least_s)),
        f"{1e3 * case.hash_s:.2f}",
        f"{1e3 * case.policy_s:.2f}",
        f"{case.cores_at_rate:.2f}",
        f"{1e3 * case.server_cpu_s:.2f}",
        f"{case.share_late:.0%}",
        f"{case.others:.1f}",
    ]


def to_json(report: RouterReport) -> bytes:
    """Everything that was measured, with what follows from it."""
    cases = [
        asdict(case) | {"decisions_per_s": case.decisions_per_s, "cores_at_rate": case.cores_at_rate}
        for case in report.cases
    ]
    return msgspec.json.format(msgspec.json.encode(asdict(report) | {"cases": cases}), indent=2) + b"\n"


def print_faults(cases: list[FaultCase], console: Console) -> None:
    table = Table(title="A decision while Redis fails", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in FAULT_HEADINGS:
        table.add_column(heading, justify="left" if heading == "fault" else "right", no_wrap=True)
    for case in cases:
        table.add_row(*fault_cells(case))
    console.print(table)
    console.print(FAULT_LEGEND, style="dim", highlight=False)


def fault_cells(case: FaultCase) -> list[str]:
    """One row of the table; times in milliseconds, the recovery in seconds."""
    healthy, under = case.healthy, case.under_fault
    seconds = (healthy.p50, healthy.p99, under.p50, under.p99, under.max or 0.0, case.added_p50_s, case.added_p99_s)
    return [
        case.fault,
        f"{under.count}",
        *(f"{1e3 * each:.2f}" for each in seconds),
        f"{case.share_late:.1%}",
        f"{case.recovery_s:.1f}",
    ]
