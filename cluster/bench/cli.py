"""`tandem bench ...`: the command line of the benchmarks."""

from __future__ import annotations

import asyncio
from enum import Enum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from tandem.cluster.bench.command_line import JsonPath, failures_of, put_json, table_console, tell_progress
from tandem.cluster.bench.engine_cli import engine, ops
from tandem.cluster.bench.gateway_cli import gateway
from tandem.cluster.bench.router_cli import router

bench_app = typer.Typer(
    help="Measure a server or an engine, or check that answers are the same whichever way.", no_args_is_help=True
)
bench_app.command("engine")(engine)
bench_app.command("ops")(ops)
bench_app.command("gateway")(gateway)
bench_app.command("router")(router)


class _Api(str, Enum):  # noqa: UP042  (typer shows the values of plain string enums)
    completions = "completions"
    chat = "chat"


@bench_app.command("serve")
def serve(
    url: Annotated[str, typer.Option(help="The server, any that speaks the OpenAI API.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to name. Default: the first of /v1/models.")] = None,
    api: Annotated[_Api, typer.Option(help="Which endpoint to use.")] = _Api.completions,
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals, requests per second.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Arrivals from a file: Mooncake (JSON lines) or Azure (CSV).")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="Closed loop: so many requests at any time.")] = None,
    time_scale: Annotated[float, typer.Option(help="Stretch the trace's times; 2 halves its rate.")] = 1.0,
    length_scale: Annotated[float, typer.Option(help="Scale the trace's lengths.")] = 1.0,
    duration: Annotated[float, typer.Option(help="Send requests for so many seconds at most.")] = 60.0,
    max_requests: Annotated[int | None, typer.Option(help="Send so many requests at most.")] = None,
    input_len: Annotated[int, typer.Option(help="Prompt length, tokens (or common words, see --tokens).")] = 512,
    input_len_spread: Annotated[int, typer.Option(help="Prompt lengths are uniform within +- this.")] = 0,
    output_len: Annotated[int, typer.Option(help="Tokens to generate per request.")] = 64,
    shared_prefix_len: Annotated[int, typer.Option(help="First tokens that prompts have in common.")] = 0,
    shared_prefixes: Annotated[int, typer.Option(help="So many different ones, drawn at random per prompt.")] = 1,
    turns: Annotated[
        int, typer.Option(help="Requests per conversation: each repeats the one before and its answer, and goes on.")
    ] = 1,
    turn_input_len: Annotated[int, typer.Option(help="What every turn after the first adds, tokens or words.")] = 64,
    tokens: Annotated[
        int | None, typer.Option(help="Send token ids below this number instead of words. Needs --api completions.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats a run. Default: fresh, and shown in the report.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for full output lengths. Some servers refuse the field: --no-ignore-eos.")
    ] = True,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.0,
    warmup: Annotated[int, typer.Option(help="Requests beforehand that are not counted.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request counts as failed.")] = 300.0,
    slo_ttft: Annotated[float, typer.Option(help="Goodput: longest time to first token, seconds.")] = 1.0,
    slo_itl: Annotated[float, typer.Option(help="Goodput: longest mean inter-token latency, seconds.")] = 0.1,
    api_key: Annotated[str | None, typer.Option(help="Bearer token to send.", envvar="OPENAI_API_KEY")] = None,
    admin_url: Annotated[
        str | None, typer.Option(help="Tandem's admin port, for handover times, e.g. http://127.0.0.1:8001")
    ] = None,
    json_path: JsonPath = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this file, e.g. run.png")] = None,
) -> None:
    """Send a load to a server and report latencies, throughput and goodput.

    Choose one of --rate (requests come when they come), --trace (as they came elsewhere) and --concurrency (the next
    when one has ended). Ctrl-C ends the load and reports what there is.
    """
    from tandem.cluster.bench.plot import save_plot
    from tandem.cluster.bench.report import ConsoleProgress, print_report, to_json
    from tandem.cluster.bench.serve import ServeOptions, bench_serve

    fresh = {} if seed is None else {"seed": seed}
    with failures_of("serve"):
        options = ServeOptions(
            url=url,
            model=model,
            api=api.value,
            api_key=api_key,
            admin_url=admin_url,
            rate=rate,
            trace=trace,
            concurrency=concurrency,
            time_scale=time_scale,
            length_scale=length_scale,
            duration_s=duration,
            max_requests=max_requests,
            input_len=input_len,
            input_len_spread=input_len_spread,
            output_len=output_len,
            shared_prefix_len=shared_prefix_len,
            num_shared_prefixes=shared_prefixes,
            num_turns=turns,
            turn_input_len=turn_input_len,
            num_tokens=tokens,
            ignore_eos=ignore_eos,
            temperature=temperature,
            num_warm_up=warmup,
            request_timeout_s=timeout,
            slo_ttft_s=slo_ttft,
            slo_itl_s=slo_itl,
            **fresh,
        )
        with ConsoleProgress(Console(stderr=True)) as progress:
            report = asyncio.run(bench_serve(options, progress))
        print_report(report, table_console(json_path))
        put_json(json_path, to_json(report))
        if plot is not None:
            save_plot(report, plot)
    if report.summary.num_ok == 0:
        raise typer.Exit(1)


@bench_app.command("parity")
def parity(
    model: Annotated[str, typer.Argument(help="As for tandem serve.")] = "smollm2-135m-instruct",
    requests: Annotated[int, typer.Option(help="How many different requests, prompts of 1 to 2,000 tokens.")] = 40,
    chunk: Annotated[list[int], typer.Option(help="Prefill chunk, tokens. Repeat for several.")] = [64, 512],  # noqa: B006
    concurrency: Annotated[int, typer.Option(help="Requests at once, besides one at a time.")] = 16,
    vocab_size: Annotated[int, typer.Option(help="Prompts are random token ids below this.")] = 49_000,
    seed: Annotated[int, typer.Option(help="Other prompts, other seeds.")] = 0,
    dtype: Annotated[str, typer.Option(help="As for tandem serve.")] = "auto",
    json_path: JsonPath = None,
) -> None:
    """Check that answers do not depend on how they were served: bit for bit.

    Starts a server of its own for each of {aggregated, disaggregated} x {chunks} x {alone, many at once}, and asks it
    everything twice: cold, then cached. Exit code 1 if anything differs.
    """
    from tandem.cluster.bench.parity import compare_ways, show_outcomes

    console = Console(stderr=True)
    with failures_of("parity"):
        outcomes = asyncio.run(
            compare_ways(
                model,
                num_requests=requests,
                chunks=chunk,
                concurrency=concurrency,
                seed=seed,
                vocab_size=vocab_size,
                arguments=("--dtype", dtype),
                on_outcome=lambda outcome: console.print(
                    f"{outcome.num_equal}/{outcome.num_requests} equal: {outcome.way}"
                ),
                on_progress=tell_progress,
            )
        )
        show_outcomes(outcomes, table_console(json_path))
        put_json(json_path, msgspec.json.encode(outcomes))
    raise typer.Exit(0 if all(outcome.difference is None for outcome in outcomes) else 1)
