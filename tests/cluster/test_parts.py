"""The parts that `tandem serve` is composed of, each alone: embedded Redis, guard, folder."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from tandem.cluster.app import run_folder
from tandem.cluster.redis_server import EmbeddedRedis
from tandem.workers.errors import UserError


def wait_until(question: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not question():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


async def ping(url: str) -> bool:
    async with Redis.from_url(url) as client:
        return bool(await client.ping())


async def test_the_embedded_redis_answers_only_through_its_socket(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    await server.start()
    try:
        assert await ping(server.url)
        assert server.pid is not None
        assert psutil.Process(server.pid).net_connections("inet") == []
        assert (tmp_path / "redis.sock").stat().st_mode & 0o077 == 0
    finally:
        await server.stop()
    assert not psutil.pid_exists(server.pid)


async def test_the_embedded_redis_is_started_again(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    await server.start()
    first = server.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    try:
        async with asyncio.timeout(10):
            while server.pid == first:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        assert await ping(server.url)
    finally:
        await server.stop()


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


def test_no_room_for_the_run_folder_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(UserError, match=r"no temporary folder .*: No such file .* TMPDIR"), run_folder():
        pass
