"""The command line of `tandem bench gateway`, and how its result is shown."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from tandem.cluster.bench.command_line import JsonPath, failures_of, numbers, put_json, table_console, tell_progress

if TYPE_CHECKING:
    from tandem.cluster.bench.gateway import GatewayReport, Requests, Streaming

STREAM_HEADINGS = (
    "asked/s", "read/s", "us/token", "per core", "cores", "per read", "p50", "p99", "max", "load"
)  # fmt: skip
REQUEST_HEADINGS = ("tokens", "parse", "template", "tokenise", "hash", "route", "rest", "whole", "clock")
STREAM_LEGEND = (
    "read/s: tokens that clients read. us/token: CPU time of the gateway's process. per core: tokens/s that this comes "
    "to. per read: tokens that a client gets at once. p50, p99, max: milliseconds from the worker's sending to the "
    "client's reading. load: cores that others kept busy; with any, believe the CPU time and not the clock."
)
REQUEST_LEGEND = (
    "Milliseconds: of parts the CPU time, medians; whole: CPU time of one request over HTTP with an answer of one "
    "token, and on the clock, least of 3."
)


def gateway(
    model: Annotated[str, typer.Argument(help="Whose tokenizer and template: as for tandem serve.")] = (
        "smollm2-135m-instruct"
    ),
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 256,
    workers: Annotated[int, typer.Option(min=1, help="Decode workers that they are spread over.")] = 1,
    rate: Annotated[float, typer.Option(min=1, help="Tokens per second, all streams together.")] = 30_000.0,
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds per measurement of streams.")] = 8.0,
    tokens: Annotated[str, typer.Option(help="Prompt lengths: one case for each.")] = "100,8000",
    requests: Annotated[int, typer.Option(min=1, help="Requests per prompt length, three times.")] = 60,
    idle: Annotated[int, typer.Option(min=0, help="Idle streams to hold. 0: skip.")] = 10_000,
    json_path: JsonPath = None,
) -> None:
    """Measure what a gateway costs per token, per request and per idle stream: a real one, before scripted workers.

    tandem bench gateway --streams 64 --rate 10000 --idle 0
    """
    from tandem.cluster.bench.gateway import GatewayBenchOptions, bench_gateway
    from tandem.cluster.model_source import resolve_model

    with failures_of("gateway"):
        options = GatewayBenchOptions(
            tokenizer_folder=resolve_model(model).folder,
            num_streams=streams,
            num_workers=workers,
            rate=rate,
            duration_s=duration,
            prompt_tokens=numbers("--tokens", tokens),
            num_requests=requests,
            num_idle=idle,
        )
        report = asyncio.run(bench_gateway(options, tell_progress))
        print_gateway_report(report, table_console(json_path))
        put_json(json_path, to_json(report))


def print_gateway_report(report: GatewayReport, console: Console) -> None:
    options = report.options
    console.print(f"{options.num_streams:,} streams, workers: {options.num_workers}", style="bold", highlight=False)
    _print_table(console, STREAM_HEADINGS, [stream_cells(each) for each in report.streaming], STREAM_LEGEND)
    _print_table(console, REQUEST_HEADINGS, [request_cells(each) for each in report.requests], REQUEST_LEGEND)
    idle = report.idle
    if idle is None:
        return
    console.print(
        f"{idle.num_streams:,} idle streams: {idle.bytes_per_stream / 1024:.1f} KiB each, {idle.cores:.2f} cores; "
        f"/health p50 {1e3 * idle.health.p50:.1f}, p99 {1e3 * idle.health.p99:.1f}, "
        f"at most {1e3 * (idle.health.max or 0):.1f} ms; while they were opened ({idle.opened_per_s:,.0f}/s) "
        f"p50 {1e3 * idle.health_opening.p50:.1f}, at most {1e3 * (idle.health_opening.max or 0):.1f} ms",
        highlight=False,
        soft_wrap=True,
    )


def _print_table(console: Console, headings: tuple[str, ...], rows: list[list[str]], legend: str) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(legend, style="dim", highlight=False)


def stream_cells(row: Streaming) -> list[str]:
    latency = row.latency
    return [
        f"{row.offered_per_s:,.0f}",
        f"{row.tokens_per_s:,.0f}",
        f"{1e6 * row.cpu_per_token_s:.1f}",
        f"{row.tokens_per_core_s:,.0f}",
        f"{row.cores:.2f}",
        f"{row.tokens_per_read:.2f}",
        f"{1e3 * latency.p50:.2f}",
        f"{1e3 * latency.p99:.2f}",
        f"{1e3 * (latency.max or 0.0):.1f}",
        f"{row.others:.1f}",
    ]


def request_cells(row: Requests) -> list[str]:
    parts = row.parts
    times = (parts.parse_s, parts.template_s, parts.tokenise_s, parts.hash_s, parts.route_s, parts.rest_s)
    return [f"{parts.prompt_tokens:,}", *(f"{1e3 * each:.2f}" for each in (*times, row.total_cpu_s, row.wall_s))]


def to_json(report: GatewayReport) -> bytes:
    """Everything that was measured, with what follows from it."""
    streaming = [asdict(each) | {"tokens_per_core_s": each.tokens_per_core_s} for each in report.streaming]
    body = asdict(report) | {"streaming": streaming}
    body["options"]["tokenizer_folder"] = report.options.tokenizer_folder.name
    return msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"
