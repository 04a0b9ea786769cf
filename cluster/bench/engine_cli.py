"""The command lines of `tandem bench engine` and `tandem bench ops`."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tandem.cluster.bench.command_line import JsonPath, failures_of, numbers, put_json, table_console, tell_progress

if TYPE_CHECKING:
    from tandem.cluster.bench.engine import EngineOptions

PEERS = Path(__file__).parents[2] / "tests" / "bench" / "peers"
"""In a checkout. The installed package has no adapters: --peers says where they are."""


def engine(
    model: Annotated[
        str, typer.Argument(help="As for tandem serve, or random:qwen2.5-0.5b, random:qwen2.5-1.5b.")
    ] = "smollm2-135m-instruct",
    threads: Annotated[str, typer.Option(help="Cores to pin every side to: one table for each.")] = "1,2",
    streams: Annotated[str, typer.Option(help="Sequences per decode step.")] = "1,8,32",
    context: Annotated[str, typer.Option(help="Tokens of context of each of them.")] = "64,512",
    prefill: Annotated[str, typer.Option(help="Prompt lengths, tokens.")] = "512,1024",
    chunk: Annotated[int, typer.Option(help="Our prefill chunk, as --max-num-batched-tokens of tandem serve.")] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds; in each, every side measures everything once.")] = 5,
    steps: Annotated[int, typer.Option(help="Decode steps that are timed, per round.")] = 16,
    against: Annotated[
        list[str] | None,
        typer.Option(help="A peer: NAME, NAME=PYTHON or NAME:VARIANT=PYTHON. Repeat for several.", metavar="NAME"),
    ] = None,
    peers: Annotated[Path, typer.Option(help="Folder with NAME_peer.py.", show_default=False)] = PEERS,
    scratch: Annotated[
        Path | None, typer.Option(help="Keep logs and what peers convert or compile here. Default: a temporary folder.")
    ] = None,
    json_path: JsonPath = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables to this file, for a README.")] = None,
) -> None:
    """Measure decode steps and prefill beside other engines, and beside what this machine's memory and cores can do.

    tandem bench engine --against transformers --against vllm=/opt/vllm/bin/python
    """
    from tandem.cluster.bench.engine import bench_engine
    from tandem.cluster.bench.engine_figures import Decode, Prefill
    from tandem.cluster.bench.engine_report import print_engine_report, to_json, to_markdown
    from tandem.cluster.bench.sides import parse_against

    with failures_of("engine", OSError):
        pairs = itertools.product(numbers("--context", context), numbers("--streams", streams))
        decodes = tuple(Decode(num_streams, length) for length, num_streams in pairs)
        prefills = tuple(map(Prefill, numbers("--prefill", prefill)))
        specs = tuple(parse_against(text, peers) for text in against or ())
        with _folder(scratch) as folder:
            options = _options(
                model,
                folder,
                threads=numbers("--threads", threads),
                decodes=decodes,
                prefills=prefills,
                chunk=chunk,
                rounds=rounds,
                steps=steps,
                peers=specs,
            )
            reports = bench_engine(options, folder, tell_progress)
        print_engine_report(options, reports, _wide(table_console(json_path)))
        put_json(json_path, to_json(options, reports))
        if markdown is not None:
            markdown.write_text(to_markdown(options, reports), encoding="utf-8")


def ops(
    shape: Annotated[str, typer.Argument(help="Whose layers and heads: qwen2.5-1.5b, qwen2.5-0.5b.")] = "qwen2.5-1.5b",
    backend: Annotated[str, typer.Option(help="Our backend.")] = "cpu",
    markdown: Annotated[Path | None, typer.Option(help="Write the table to this file, for a README.")] = None,
) -> None:
    """Count the operations that one more token costs: ours, and those of Hugging Face's model of the same shape.

    Exit code 1 if ours are more than nine per layer and six around them, or more than one call from Python.
    """
    from tandem.cluster.bench.ops import bench_ops, print_ops_report, to_markdown
    from tandem.kernels.ops import load_ops

    with failures_of("ops", ValueError, OSError):
        report = bench_ops(shape, load_ops(backend), tell_progress)
        if markdown is not None:
            markdown.write_text(to_markdown(report), encoding="utf-8")
    print_ops_report(report, _wide(Console()))
    raise typer.Exit(0 if report.is_within else 1)


def _options(model: str, scratch: Path, **values: object) -> EngineOptions:
    """Find the model, or make it."""
    from tandem.cluster.bench.engine import EngineOptions
    from tandem.cluster.bench.random_models import PREFIX, is_random, shape_of, write_random_model
    from tandem.cluster.model_source import resolve_model
    from tandem.workers.models.checkpoint import read_config

    if is_random(model):
        shape, folder = shape_of(model), scratch / model.removeprefix(PREFIX)
        if not folder.exists():
            folder.mkdir()
            write_random_model(shape, folder)
        config = read_config(folder)
    else:
        resolved = resolve_model(model, dtype="bfloat16")
        folder, config = resolved.folder, resolved.config
    return EngineOptions(model=model, folder=folder, config=config, **values)  # type: ignore[arg-type]


def _wide(console: Console) -> Console:
    """The tables need some width; a file or a pipe has no say in it."""
    if not console.is_terminal:
        console.width = 140
    return console


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="tandem-bench-") as name:
            yield Path(name)
    else:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
