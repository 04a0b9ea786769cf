"""What a killed launcher leaves is ended, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def wait_until(question: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not question():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


PARENT = """
import os, sys, subprocess, time
from pathlib import Path
from tandem.cluster.guard import guarded
folder = Path(sys.argv[1])
os.chdir(folder)
with guarded(folder):
    child = subprocess.Popen(["sleep", "100"], start_new_session=True)
    print(child.pid, flush=True)
    if sys.argv[2] == "wait":
        time.sleep(100)
    child.kill()
    child.wait()
"""


def start_parent(folder: Path, mode: str) -> subprocess.Popen[str]:
    """It says the pid of its child, then waits to be killed or ends."""
    command = [sys.executable, "-P", "-c", PARENT, str(folder), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_the_guard_ends_what_a_killed_parent_leaves(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    bystander = subprocess.Popen(["sleep", "100"], cwd=tmp_path)
    with start_parent(folder, "wait") as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    wait_until(lambda: not child.is_running())
    wait_until(lambda: not folder.exists())
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_the_guard_goes_with_a_parent_that_ends_well(tmp_path: Path) -> None:
    with start_parent(tmp_path, "end") as parent:
        parent.communicate(timeout=30)
    assert parent.returncode == 0
    assert tmp_path.exists()
    assert not [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in (process.info["cmdline"] or []) and "tandem.cluster.guard" in process.info["cmdline"]
    ]
