"""`tandem bench engine`: how fast one engine decodes and reads prompts, beside other engines and beside the machine.

    for each number of cores:  start every side, pinned to the same cores
        for each round:        the limits; then each workload on every side in turn, another one first each round
        medians over the rounds -> rows, shares of the limits, ratios

Sides are processes (`sides.py`) that take turns: whoever does not measure is stopped. What differs between rounds on a
shared machine so meets all of them alike.
"""

from __future__ import annotations

import os
import secrets
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.cluster.bench.engine_figures import (
    Decode,
    Limits,
    LoopTimes,
    Prefill,
    Row,
    Workload,
    decode_bytes,
    median_by_kernel,
    prefill_operations,
)
from tandem.cluster.bench.sides import Reply, Side, SideFailed, SideSpec
from tandem.workers.errors import UserError
from tandem.workers.models.config import ModelConfig

OURS = "tandem"
_ITEMSIZE = 2
"""bfloat16, the dtype that every side serves unless its name says otherwise."""
_FOLDER = Path(__file__).parent

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What to measure. Raises `UserError` for what cannot be."""

    model: str
    folder: Path
    config: ModelConfig
    threads: tuple[int, ...] = (1, 2)
    decodes: tuple[Decode, ...] = (Decode(1, 512), Decode(8, 512), Decode(32, 512))
    prefills: tuple[Prefill, ...] = (Prefill(1024),)
    loop_streams: int = 8
    rounds: int = 5
    steps: int = 16
    warm_up: int = 3
    chunk: int = 512
    peers: tuple[SideSpec, ...] = ()
    seed: int = field(default_factory=lambda: secrets.randbelow(1 << 30))

    def __post_init__(self) -> None:
        available = len(os.sched_getaffinity(0))
        if max(self.threads) > available:
            raise UserError(f"--threads {max(self.threads)}: this machine lends us {available} cores")
        if min(self.threads) < 1 or self.rounds < 1 or self.steps < 1:
            raise UserError("--threads, --rounds and --steps must be at least 1")

    @property
    def max_seqs(self) -> int:
        return max([one.streams for one in self.decodes] + [self.loop_streams])

    @property
    def max_len(self) -> int:
        """Room for the longest sequence and for the steps that are measured, in whole blocks."""
        longest = max([one.context for one in self.decodes] + [one.tokens for one in self.prefills])
        return -(-(longest + 4 * (self.warm_up + self.steps) + 1) // 128) * 128


@dataclass(frozen=True, slots=True)
class CoreReport:
    """Everything measured on one number of cores."""

    num_cores: int
    limits: Limits
    rows: tuple[Row, ...]
    loop: LoopTimes | None
    failures: tuple[str, ...]
    """Sides that could not be started, or ended in mid-run: one line each."""


def bench_engine(options: EngineOptions, scratch: Path, progress: Progress) -> list[CoreReport]:
    """Run everything. `scratch` is an existing folder for logs and for what adapters convert and compile."""
    return [_CoreRun(options, num, scratch, progress).run() for num in options.threads]


class _CoreRun:
    """The run on one number of cores."""

    def __init__(self, options: EngineOptions, num_cores: int, scratch: Path, progress: Progress) -> None:
        self._options = options
        self._cores = sorted(os.sched_getaffinity(0))[:num_cores]
        self._scratch = scratch
        self._progress = progress
        self._replies: dict[tuple[Workload, str], list[Reply]] = defaultdict(list)
        self._loops: list[dict[str, Any]] = []
        self._failures: list[str] = []

    def run(self) -> CoreReport:
        bandwidth: list[dict[str, float]] = []
        matrix: list[dict[str, float]] = []
        with ExitStack() as stack:
            limits = stack.enter_context(self._start(SideSpec("limits", sys.executable, _FOLDER / "limits_side.py")))
            limits.wait_ready()
            ours = SideSpec(OURS, sys.executable, _FOLDER / "tandem_side.py")
            sides = [side for spec in (ours, *self._options.peers) if (side := self._try_start(spec, stack))]
            for number in range(self._options.rounds):
                self._progress(f"{len(self._cores)} core(s), round {number + 1} of {self._options.rounds}")
                bandwidth.append(_rates(limits.measure({"measure": "bandwidth"})))
                matrix.append(_rates(limits.measure({"measure": "matrix"})))
                self._round(number, sides)
        found = Limits(median_by_kernel(bandwidth), median_by_kernel(matrix))
        rows = tuple(self._row(workload, side) for workload, side in self._replies)
        loop = _loop_times(self._options.loop_streams, self._loops) if self._loops else None
        return CoreReport(len(self._cores), found, rows, loop, tuple(self._failures))

    def _round(self, number: int, sides: list[Side]) -> None:
        """Every workload on every side. Contexts stay the same from round to round, prompts never do."""
        options = self._options
        workloads: tuple[Workload, ...] = (*options.decodes, *options.prefills)
        for workload in workloads:
            command = _command(workload, options, number)
            for side in [*sides[number % len(sides) :], *sides[: number % len(sides)]] if sides else []:
                self._progress(f"    {workload.label}: {side.spec.name}")
                reply = self._measure(side, command, sides)
                if reply is not None:
                    self._replies[workload, side.spec.name].append(reply)
        for side in [side for side in sides if side.spec.name == OURS]:
            command = _command(Decode(options.loop_streams, options.decodes[0].context), options, number)
            reply = self._measure(side, command | {"measure": "loop"}, sides)
            if reply is not None and reply.error is not None:
                self._failures.append(f"the whole engine: {reply.error}")
            elif reply is not None:
                self._loops.append(reply.body)

    def _measure(self, side: Side, command: dict[str, Any], sides: list[Side]) -> Reply | None:
        """None: the side is gone; it takes no further part."""
        try:
            return side.measure(command)
        except SideFailed as error:
            self._failures.append(str(error))
            sides.remove(side)
            return None

    def _try_start(self, spec: SideSpec, stack: ExitStack) -> Side | None:
        self._progress(f"loading {spec.name}")
        side = stack.enter_context(self._start(spec))
        try:
            side.wait_ready()
        except SideFailed as error:
            self._failures.append(str(error))
            return None
        return side

    def _start(self, spec: SideSpec) -> Side:
        options, threads = self._options, str(len(self._cores))
        arguments = ["--model", str(options.folder), "--cores", ",".join(map(str, self._cores))]
        arguments += ["--max-len", str(options.max_len), "--max-seqs", str(options.max_seqs)]
        arguments += ["--chunk", str(options.chunk), "--scratch", str(self._scratch)]
        environment = {
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads),
            "OPENBLAS_NUM_THREADS": "1",  # numpy's kernels run on threads of our own
        }
        log = self._scratch / f"{spec.name.replace('/', '-')}-{threads}.log"
        return Side(spec, arguments, environment, log)

    def _row(self, workload: Workload, side: str) -> Row:
        replies = self._replies[workload, side]
        others = statistics.fmean(reply.others for reply in replies)
        error = next((reply.error for reply in replies if reply.error is not None), None)
        if error is None and len(replies) < self._options.rounds:
            error = "ended in mid-run"
        if error is not None:
            return Row(workload, side, (), others, error=error)
        seconds = tuple(statistics.median(reply.body["seconds"]) for reply in replies)
        return Row(workload, side, seconds, others, self._bytes_or_operations(workload, replies[0].body))

    def _bytes_or_operations(self, workload: Workload, body: dict[str, Any]) -> float | None:
        options = self._options
        if isinstance(workload, Prefill):
            return prefill_operations(options.config, workload.tokens)
        if body.get("format", "bfloat16") != "bfloat16":
            return None
        return decode_bytes(options.config, _ITEMSIZE, workload, options.steps, options.warm_up)


def _command(workload: Workload, options: EngineOptions, number: int) -> dict[str, Any]:
    if isinstance(workload, Prefill):
        return {"measure": "prefill", "tokens": workload.tokens, "seed": options.seed + 1000 * (number + 1)}
    return {
        "measure": "decode",
        "streams": workload.streams,
        "context": workload.context,
        "steps": options.steps,
        "warm_up": options.warm_up,
        "seed": options.seed,
    }


def _rates(reply: Reply) -> dict[str, float]:
    if reply.error is not None:
        raise UserError(f"the limits cannot be measured: {reply.error}")
    rates: dict[str, float] = reply.body["rates"]
    return rates


def _loop_times(streams: int, replies: Sequence[dict[str, Any]]) -> LoopTimes:
    names = ("step", "schedule", "host", "apply", "execute")
    return LoopTimes(streams, **{name: statistics.median(reply[name] for reply in replies) for name in names})
