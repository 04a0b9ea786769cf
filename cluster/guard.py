"""A small process beside `tandem serve` that cleans up when that one is killed and has no time to do so itself.

    python -m tandem.cluster.guard FOLDER     its standard input is a pipe that ends when the parent does

Ray's main processes die with us, but some of their children notice only after minutes. All processes of one cluster
have its folder as their current folder, and are found by that. (Not by a mark in their environment: some set their
title, and overwrite it.)
"""

from __future__ import annotations

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
