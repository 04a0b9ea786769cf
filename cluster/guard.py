"""That nothing outlives `tandem serve`, also where it is killed and has no time to clean up.

What it starts itself dies with it (`die_with_parent`). For the rest there is a small process beside it:

    python -m tandem.cluster.guard FOLDER     its standard input is a pipe that ends when the parent does

Ray's main processes die with us, but some of their children notice only after minutes. All processes of one cluster
have its folder as their current folder, and are found by that. (Not by a mark in their environment: some set their
title, and overwrite it.)
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROUNDS = 5
ROUND_S = 0.2
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: nothing may be loaded after a fork


def die_with_parent() -> None:
    """In a child, between fork and exec: be killed when the parent's thread that started it ends, however it ends."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def this_family() -> set[int]:
    """This process and all below it, by pid."""
    return {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """While this lasts, a guard watches over us. `folder` must be our current folder, and be so for nobody else."""
    guard = subprocess.Popen(
        [sys.executable, "-P", "-m", "tandem.cluster.guard", str(folder)],
        stdin=subprocess.PIPE,
        cwd="/",
        start_new_session=True,  # Ctrl-C is not for it
    )
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


def processes_in(folder: str) -> list[psutil.Process]:
    """Processes whose current folder this is."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == folder:
                found.append(process)
        except psutil.Error:
            continue  # somebody else's, or just gone
    return found


def end_processes(folder: str, *, spared: Collection[int] = ()) -> None:
    """End all processes whose current folder this is. Several rounds: a dying process may have started another."""
    for _ in range(ROUNDS):
        for process in processes_in(folder):
            try:
                if process.pid not in spared:
                    process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(ROUND_S)


def main() -> None:
    """Wait for the parent's end, then end what it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder = sys.argv[1]
    sys.stdin.buffer.read()
    end_processes(folder)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
