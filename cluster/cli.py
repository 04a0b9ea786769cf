"""The command `tandem`. Everything heavy is imported by the command that needs it: `tandem --help` takes a fraction of
a second, although torch and Ray are seconds away.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tandem.cluster.cli_operate import register as register_operating
from tandem.cluster.cli_serve import DtypeChoice
from tandem.cluster.cli_serve import register as register_serving
from tandem.cluster.logs import say
from tandem.workers.errors import TandemError, UserError

HELP = """
Serve large language models with two pools of workers: **prefill** workers read prompts, **decode** workers write
tokens, and the KV cache travels between them.

Begin with:

    tandem serve smollm2-135m-instruct    (a small chat model, on this machine)

    tandem chat                           (talk to it, from another terminal)

    tandem status                         (see its workers)
"""

app = typer.Typer(
    name="tandem",
    help=HELP,
    rich_markup_mode="markdown",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def main() -> None:
    """The entry point. A mistake of the user's is one line and exit code 2; any other failure of ours, exit code 1."""
    try:
        app()
    except UserError as error:
        _fail(str(error), 2)
    except TandemError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str, code: int) -> NoReturn:
    say(f"tandem: {' '.join(message.split())}", level=logging.ERROR)
    sys.exit(code)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tandem {version('tandem-serve')}")
        raise typer.Exit


@app.callback()
def tandem(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The root of all commands; its help is above."""


register_serving(app)


@app.command()
def status(
    url: Annotated[str, typer.Option(help="The admin port of a running cluster.")] = "http://127.0.0.1:8001",
    json: Annotated[bool, typer.Option("--json", help="The raw answer of /cluster.")] = False,
) -> None:
    """Show the workers of a running cluster: their state, blocks and queues."""
    from tandem.cluster.status import show_status

    show_status(url, as_json=json)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="A running server; any OpenAI-compatible one.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first that the server offers.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model should be told first.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="TANDEM_API_KEY", help="If the server wants one.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is always the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="For the same answers again.")] = None,
) -> None:
    """Talk to a running server. /reset begins anew, /quit (or Ctrl-D) ends.

    Piped text is one message:

    echo "What is the capital of France?" | tandem chat
    """
    from tandem.cluster.chat import ChatClient, run_chat

    sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    client = ChatClient(
        url, model=model, api_key=api_key, sampling={k: v for k, v in sampling.items() if v is not None}
    )
    run_chat(client, system=system)


@app.command()
def generate(
    prompt: Annotated[list[str], typer.Option(help="Text to continue. Repeat for several.")],
    model: Annotated[str, typer.Argument(help="As for serve.")] = "smollm2-135m-instruct",
    max_tokens: Annotated[int, typer.Option(help="Most tokens of each answer.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that add up to this.")] = 1.0,
    seed: Annotated[int, typer.Option(help="For the same answers again.")] = 0,
    dtype: Annotated[DtypeChoice, typer.Option(help="Of weights and KV.")] = "auto",
) -> None:
    """Continue prompts here and now: no server, no Ray, no network.

    tandem generate --prompt "The capital of France is"
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: a thread that spins costs whoever else is here
    from tandem.cluster.local import generate as generate_locally

    for text in generate_locally(
        model, prompt, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, dtype=dtype
    ):
        typer.echo(text)


@app.command()
def tune(
    model: Annotated[str, typer.Argument(help="As for serve.")] = "smollm2-135m-instruct",
    dtype: Annotated[DtypeChoice, typer.Option(help="Of weights and KV.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Compute threads of a worker.", show_default="half of the cores")
    ] = None,
    deadline: Annotated[float, typer.Option(min=0, help="Most seconds to measure; the rest keeps its defaults.")] = 120,
    force: Annotated[
        bool, typer.Option(help="Measure what is known, too. With --import: take another device's results.")
    ] = False,
    export: Annotated[Path | None, typer.Option(help="Then write this device's results into a file.")] = None,
    import_: Annotated[
        Path | None, typer.Option("--import", help="Take results from such a file instead of measuring.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Everything that was measured, as JSON.")] = False,
) -> None:
    """Find the fastest way to run each kernel on this machine, and keep it for the next start.

    Workers do the same when they start and find nothing; this does it ahead of time, and shows it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch, as in a worker
    from tandem.cluster.tune import TuneRequest, run_tune

    request = TuneRequest(
        model=model,
        dtype=dtype,
        num_threads=threads,
        deadline_s=deadline,
        force=force,
        export_to=export,
        import_from=import_,
        as_json=json,
    )
    run_tune(request)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Measure a running server (any OpenAI-compatible one), or compare ways of serving. See tandem bench --help."""
    from tandem.cluster.bench.cli import bench_app

    bench_app(args=context.args, prog_name="tandem bench")


register_operating(app)
