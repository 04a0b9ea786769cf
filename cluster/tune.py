"""`tandem tune`: what a worker does at its first start (time each op's candidates, keep the winners), ahead of time.

The results lie in the user's cache, where workers find them. `--export` and `--import` ship them to machines of the
same kind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.cluster.config import load_config
from tandem.cluster.model_cache import cache_folder
from tandem.cluster.model_source import DtypeChoice, resolve_model
from tandem.cluster.resolve import available_cores, resolve, resolve_device
from tandem.cluster.tune_table import report_as_json, show_report
from tandem.kernels.autotune import TunableOps, TuningReport, tune
from tandem.kernels.ops import Ops
from tandem.kernels.tuning_cache import TUNING_FILE, TuningCacheError, export_results, import_results
from tandem.workers.backend import create_ops
from tandem.workers.errors import UserError
from tandem.workers.models.checkpoint import load_weights
from tandem.workers.models.decoder import Decoder
from tandem.workers.warm_up import WarmUp, tuning_workload

MAX_NOISE = 0.1
"""What a worker measured while the machine was busier than that is measured again."""

CreateOps = Callable[[str], Ops]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """The flags of the command."""

    model: str
    dtype: DtypeChoice = "auto"
    num_threads: int | None = None
    deadline_s: float = 120.0
    force: bool = False
    export_to: Path | None = None
    import_from: Path | None = None
    as_json: bool = False


def run_tune(request: TuneRequest, *, create: CreateOps = create_ops, console: Console | None = None) -> None:
    """Tune (or import), export if asked to, and print what came of it. Raises `UserError`."""
    console = console or Console()
    path = cache_folder() / TUNING_FILE
    if request.export_to is not None and not request.export_to.absolute().parent.is_dir():
        # now, not after minutes of measuring
        raise UserError(f"--export {request.export_to}: there is no folder {request.export_to.absolute().parent}")
    torch.set_num_threads(request.num_threads or default_num_threads())
    with _display() as display:
        warm_up = WarmUp(display.tell)
        with warm_up.phase("preparing kernels"):
            ops, tunable_ops = _create_tunable(create)
        device = tunable_ops.device_key()
        try:
            if request.import_from is not None:
                count = import_results(path, device, request.import_from, force=request.force)
            else:
                report = _tune_model(request, ops, tunable_ops, path, warm_up, display)
            if request.export_to is not None:
                export_results(path, device, request.export_to)
        except TuningCacheError as error:
            raise UserError(str(error)) from error
    if request.import_from is not None:
        console.print(f"{count} results of {request.import_from} are now in {path}", highlight=False, soft_wrap=True)
    elif request.as_json:
        console.print_json(report_as_json(report, device, path, warm_up.phases))
    else:
        show_report(console, report, device, path, warm_up.phases)


def default_num_threads() -> int:
    """Those of a worker of `tandem serve` without flags: half of the cores, as there are two workers."""
    return max(1, available_cores() // 2)


def _create_tunable(create: CreateOps) -> tuple[Ops, TunableOps]:
    """The backend of this machine, as what it is and as what can be tuned."""
    ops = create(resolve_device("auto"))
    if not isinstance(ops, TunableOps):
        raise UserError(f"there is nothing to tune: the backend {ops.name!r} has no choices to make")
    return ops, ops


def _tune_model(
    request: TuneRequest, ops: Ops, tunable_ops: TunableOps, path: Path, warm_up: WarmUp, display: _Display
) -> TuningReport:
    """Load the model as a worker would, with the limits that `tandem serve` has without flags, and tune for it."""
    with warm_up.phase("finding the model"):
        model = resolve_model(request.model, dtype=request.dtype, device=resolve_device("auto"))
        limits = resolve(load_config({"model": request.model, "dtype": request.dtype}, None), model)
    with warm_up.phase("loading weights"), torch.inference_mode():
        weights = load_weights(model.folder, model.config, getattr(torch, model.dtype)).to(limits.device)
        decoder = Decoder(model.config, weights, ops, limits.max_model_len)
        del weights
    workload = tuning_workload(
        model.config,
        decoder.linears,
        dtype=model.dtype,
        block_size=limits.cluster.block_size,
        max_num_batched_tokens=limits.cluster.max_num_batched_tokens,
        max_num_seqs=limits.cluster.max_num_seqs,
        max_model_len=limits.max_model_len,
    )
    with warm_up.phase("tuning kernels"), torch.inference_mode():

        def show(message: str, done: int, total: int) -> None:
            display.advance(message, done, total)
            warm_up.advance(done, total)

        return tune(
            tunable_ops.tunables(workload),
            tunable_ops.device_key(),
            path,
            deadline_s=request.deadline_s,
            progress=show,
            force=request.force,
            max_noise=MAX_NOISE,
        )


class _Display:
    """Phases as lines on standard error. On a terminal: one line with a bar, in place."""

    def tell(self, phase: str) -> None:
        sys.stderr.write(f"{phase}\n")

    def advance(self, message: str, done: int, total: int) -> None:
        """More often than is good for lines."""


class _BarDisplay(_Display):
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)

    def tell(self, phase: str) -> None:
        self._progress.update(self._task, description=phase)

    def advance(self, message: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=message, completed=done, total=total)


@contextmanager
def _display() -> Iterator[_Display]:
    if not sys.stderr.isatty():
        yield _Display()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _BarDisplay(progress)
