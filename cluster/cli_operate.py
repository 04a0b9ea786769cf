"""Commands for those who run a cluster: `config`, `gateway`, `doctor`, `top`, `trace`. Registered by cli.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.cluster.cli_serve import given_flags

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
AsJson = Annotated[bool, typer.Option("--json", help="The same as JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command(context_settings=PASS_ON)(config)
    app.command(context_settings=PASS_ON)(gateway)
    app.command()(doctor)
    app.command()(top)
    app.command()(trace)


def config(
    context: typer.Context,
    print_: Annotated[bool, typer.Option("--print", help="Show every setting and where it comes from.")] = False,
    json: AsJson = False,
    template: Annotated[bool, typer.Option("--template", help="Show a file with every setting instead.")] = False,
) -> None:
    """Check a configuration, and show what comes of it: flag over environment over file over default.

    Takes the arguments of serve: tandem config --print --config cluster.yaml --decode 2

    Secrets are never shown.
    """
    from tandem.cluster.config_sources import explain

    if template:
        from tandem.cluster.config_template import template as make_template

        typer.echo(make_template(serve_command().params), nl=False)
        return
    cluster_config, settings = serve_settings(context.args)
    rows = explain(cluster_config, settings)
    if json:
        import msgspec

        shown = {name: {"value": value, "source": source} for name, value, source in rows}
        typer.echo(msgspec.json.format(msgspec.json.encode(shown)).decode())
    elif print_:
        width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
        for name, value, source in rows:
            typer.echo(f"{name:<{width}}  {value:<{value_width}}  {source}")
    else:
        typer.echo("the configuration is valid; --print shows what comes of it")


def gateway(
    context: typer.Context,
    cluster_url: Annotated[
        str, typer.Option(envvar="TANDEM_CLUSTER_URL", help="The admin port of tandem serve.")
    ] = "http://127.0.0.1:8001",
) -> None:
    """Serve the API of a running cluster from one more process, on this machine or another.

    Takes the arguments of serve; those about workers have no meaning here. --cluster-key must be the launcher's.

    tandem gateway MODEL --cluster-url http://head:8001 --host 0.0.0.0
    """
    cluster_config, _ = serve_settings(context.args)
    from tandem.cluster.gateway_app import run_gateway
    from tandem.cluster.logs import configure_logging

    configure_logging(cluster_config.log_format)
    run_gateway(cluster_config, cluster_url)


def doctor(
    port: Annotated[
        list[int] | None, typer.Option(min=1, max=65535, help="Ports that should be free. Repeat for several.")
    ] = None,
    redis_url: Annotated[str | None, typer.Option(envvar="TANDEM_REDIS_URL", help="As for serve.")] = None,
    measure: Annotated[bool, typer.Option(help="Measure how fast KV travels here; some seconds.")] = True,
    json: AsJson = False,
) -> None:
    """Check this machine: compiler, CPU, GPU, memory, limits, ports, Redis, KV transports. Says what to do.

    Exit code 1 if something is missing that serving needs.
    """
    from rich.console import Console
    from rich.markup import escape

    from tandem.cluster.doctor import Options, checks

    marks = {"ok": "[green]ok[/]  ", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}
    options = Options(redis_url=redis_url, measure_transfer=measure, **({"ports": tuple(port)} if port else {}))
    console = Console(soft_wrap=True, highlight=False)
    done = []
    for check in checks(options):
        done.append(check)
        if not json:
            console.print(f"{marks[check.verdict]}  {check.name:<24} {escape(check.found)}")
            if check.advice:
                console.print(f"      {'':<24} -> {escape(check.advice)}")
    if json:
        from dataclasses import asdict

        console.print_json(data=[asdict(check) for check in done])
    if any(check.verdict == "fail" for check in done):
        raise typer.Exit(1)


def top(
    url: Annotated[str, typer.Option(help="The admin port of a running cluster.")] = "http://127.0.0.1:8001",
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    rounds: Annotated[int | None, typer.Option(min=1, help="Stop after so many.", show_default="at Ctrl-C")] = None,
) -> None:
    """Watch a running cluster: requests, tokens, latencies, queues and KV blocks, live."""
    from tandem.cluster.top import run_top

    run_top(url, interval_s=interval, rounds=rounds)


def trace(
    request_id: Annotated[str, typer.Argument(help="The x-request-id of its answer.")],
    url: Annotated[
        list[str] | None, typer.Option(help="The admin port of a gateway. Repeat for several.", show_default="8001")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show one request's life: each edge, when it was, and how long it took to get there.

    A gateway remembers its last 4,096 requests.
    """
    from tandem.cluster.trace import show_trace

    show_trace(request_id, url or ["http://127.0.0.1:8001"], as_json=json)


def serve_settings(arguments: list[str]) -> tuple[Any, Any]:
    """The configuration that `tandem serve` would use with these arguments, and its settings. Raises `UserError`."""
    from tandem.cluster.config import load_settings

    with serve_command().make_context("tandem serve", list(arguments), resilient_parsing=False) as serve_context:
        file: Path | None = serve_context.params["config"]
        return load_settings(given_flags(serve_context), file, os.environ)


def serve_command() -> Any:
    """The parser of `tandem serve`."""
    from tandem.cluster.cli import app

    return typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
