"""One side of a comparison, as a process of its own: loads an engine once, then measures on command.

    PYTHON side_process.py ADAPTER.py --model FOLDER --cores 0,1 ...
    -> {"ready": {...}}                                               once the engine is loaded
    <- {"measure": "decode", "streams": 8, "context": 512, "steps": 16, "warm_up": 2, "seed": 3}
    -> {"seconds": [0.021, ...], ...}                                 or {"error": "..."}

One JSON object a line. Run by path with the engine's own Python, so this file and the adapters need the standard
library and that engine, nothing of Tandem. An adapter is a file with

    load(options) -> measure        measure(command: dict) -> reply: dict
    environment(options) -> dict    (optional) variables that must be set before anything is imported

Between commands the process waits on its standard input. Whatever a library prints goes to standard error.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

Measure = Callable[[dict[str, Any]], dict[str, Any]]

_PR_SET_PDEATHSIG = 1
_STARTED_AGAIN = "TANDEM_BENCH_STARTED_AGAIN"


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    _end_with_parent()
    os.sched_setaffinity(0, options.cores)
    adapter = _import(options.adapter)
    _set_environment(adapter, options)
    # Standard output is the protocol's alone: what libraries print must not get in between.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    started = time.perf_counter()
    measure: Measure = adapter.load(options)
    _send(replies, {"ready": {"adapter": options.adapter.stem, "load_s": time.perf_counter() - started}})
    for line in sys.stdin:
        _send(replies, _answer(measure, line))
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options that every adapter gets."""
    parser = argparse.ArgumentParser()
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--model", type=Path, help="folder in Hugging Face format")
    parser.add_argument(
        "--variant", default="", help="what the adapter makes of it, e.g. another format of the weights"
    )
    parser.add_argument("--cores", type=lambda text: tuple(map(int, text.split(","))), default=(0,))
    parser.add_argument("--max-len", type=int, default=2048, help="most tokens of one sequence")
    parser.add_argument("--max-seqs", type=int, default=32, help="most sequences at once")
    parser.add_argument("--chunk", type=int, default=512, help="most prompt tokens per step, where that can be chosen")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"), help="folder for converted weights and caches")
    return parser.parse_args(arguments)


def _answer(measure: Measure, line: str) -> dict[str, Any]:
    try:
        return measure(json.loads(line))
    except Exception as error:  # noqa: BLE001  (any engine's any error; the parent shows it, and the next may work)
        return {"error": f"{type(error).__name__}: {error}"}


def _send(replies: Any, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _import(path: Path) -> ModuleType:
    # This file's folder must not come first on the module path (a neighbour is called `statistics`); an adapter's
    # folder comes last, for the files that it may have beside it.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.resolve()]
    sys.path.append(str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _set_environment(adapter: ModuleType, options: argparse.Namespace) -> None:
    """Start again with the adapter's variables: preloaded libraries and OpenMP read them at the very start."""
    if os.environ.get(_STARTED_AGAIN) or "environment" not in vars(adapter):
        return
    wanted: dict[str, str] = adapter.environment(options)
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted, _STARTED_AGAIN: "1"})


def _end_with_parent() -> None:
    """A side that waits while stopped never sees its standard input close; the kernel ends it all the same."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
