"""The sides of a comparison: child processes that take turns. Whoever does not measure is stopped.

A side that is stopped (SIGSTOP, its whole process group) can neither spin nor wake up, so that engines whose threads
busy-wait when idle cost the others nothing.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tandem.cluster.bench.cpu_use import cpu_use
from tandem.workers.errors import UserError

START_TIMEOUT_S = 900.0
"""Engines that compile take minutes."""
COMMAND_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 10.0
_READ_BYTES = 1 << 16
_SIDE_PROCESS = Path(__file__).with_name("side_process.py")
_LOG_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SideSpec:
    """Which engine: a name for the tables, the Python it is installed in, and its adapter (see `side_process`)."""

    name: str
    python: str
    adapter: Path
    variant: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a side answered, and how many cores everybody else used meanwhile."""

    body: dict[str, Any]
    others: float

    @property
    def error(self) -> str | None:
        error: str | None = self.body.get("error")
        return error


class SideFailed(UserError):
    """A side ended, or did not answer in time."""


class Side:
    """A running side. Between calls it is stopped. Use as a context manager; leaving ends it."""

    def __init__(self, spec: SideSpec, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.spec = spec
        self._log = log
        command = [spec.python, str(_SIDE_PROCESS), str(spec.adapter), "--variant", spec.variant, *arguments]
        # The engines' Pythons are not ours: no setting of ours must change where they look for modules.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**inherited, **environment},
                start_new_session=True,  # a group of its own, to be stopped as one; and Ctrl-C is for us
            )
        self._pending = b""

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self) -> dict[str, Any]:
        """Block until the engine is loaded. Raises `SideFailed` with its last words if it is not."""
        ready: dict[str, Any] = self._receive(START_TIMEOUT_S)["ready"]
        self._signal(signal.SIGSTOP)
        return ready

    def measure(self, command: Mapping[str, Any]) -> Reply:
        """Let it run for one command. Raises `SideFailed` if it ends meanwhile or takes too long."""
        before, started = cpu_use(self._process.pid), time.monotonic()
        self._signal(signal.SIGCONT)
        stdin = _opened(self._process.stdin)
        try:
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise self._failure("ended") from error
        body = self._receive(COMMAND_TIMEOUT_S)
        after, elapsed_s = cpu_use(self._process.pid), time.monotonic() - started
        self._signal(signal.SIGSTOP)
        return Reply(body, after.others_since(before, elapsed_s))

    def close(self) -> None:
        """End it: ask first, then insist. Only ever its own process group."""
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            _opened(self._process.stdin).close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        _opened(self._process.stdout).close()

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        stdout = _opened(self._process.stdout)
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._failure(f"gave no answer within {timeout_s:g} s")
                received = os.read(stdout.fileno(), _READ_BYTES)
                if not received:
                    raise self._failure("ended")
                self._pending += received
        line, _, self._pending = self._pending.partition(b"\n")
        body: dict[str, Any] = json.loads(line)
        return body

    def _failure(self, what: str) -> SideFailed:
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _LOG_TAIL_BYTES))
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return SideFailed(f"{self.spec.name} {what}: {lines[-1].strip() if lines else 'it said nothing'}")


def parse_against(text: str, folder: Path) -> SideSpec:
    """`NAME`, `NAME=PYTHON`, `NAME:VARIANT=PYTHON`: the adapter is NAME_peer.py in `folder`. Raises `UserError`."""
    name, _, python = text.partition("=")
    base, _, variant = name.partition(":")
    adapter = folder / f"{base.replace('-', '_').replace('.', '_')}_peer.py"
    if not adapter.is_file():
        known = sorted(path.name.removesuffix("_peer.py") for path in folder.glob("*_peer.py"))
        raise UserError(f"--against {base}: no {adapter}; there are: {', '.join(known) or 'none'}")
    if python and not Path(python).is_file():
        raise UserError(f"--against {name}: {python} is not a Python interpreter")
    return SideSpec(name, python or sys.executable, adapter, variant)


def _opened(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
