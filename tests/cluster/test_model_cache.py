"""Entries of the cache: whole or absent, made once by whoever comes first."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.cluster import model_cache
from tandem.cluster.model_cache import cache_folder, cached, ignore_progress
from tandem.workers.errors import ModelError

MAKE_SLOWLY = """
import os, sys, time
from pathlib import Path
from tandem.cluster.model_cache import cached, ignore_progress

entry, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

def make(target):
    with log.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    target.write_text("half")
    time.sleep(seconds)
    target.write_text("whole")

cached(entry, make, progress=ignore_progress)
assert entry.read_text() == "whole"
"""
"""Asks for the entry, and notes in a log when it was really made there."""


def start(entry: Path, log: Path, seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", MAKE_SLOWLY, str(entry), str(log), str(seconds)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONSAFEPATH": "1"})


def write(text: str) -> Callable[[Path], None]:
    def make(target: Path) -> None:
        target.write_text(text)

    return make


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("TANDEM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder().name == "tandem"


def test_made_once_then_found(tmp_path: Path) -> None:
    entry, calls = tmp_path / "a" / "entry", []

    def make(target: Path) -> None:
        calls.append(target)
        target.write_text("whole")

    for _ in range(3):
        assert cached(entry, make, progress=ignore_progress).read_text() == "whole"
    assert len(calls) == 1
    assert calls[0] != entry


def test_folders_are_entries_too(tmp_path: Path) -> None:
    def make(target: Path) -> None:
        target.mkdir()
        (target / "file").write_text("content")

    assert (cached(tmp_path / "entry", make, progress=ignore_progress) / "file").read_text() == "content"


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        target.write_text("half")
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        cached(tmp_path / "entry", fail, progress=ignore_progress)
    assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]


def test_a_full_disk_is_a_model_error(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    with pytest.raises(ModelError, match="cannot be written: No space left"):
        cached(tmp_path / "entry", fail, progress=ignore_progress)


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot be written"):
        cached(tmp_path / "file" / "entry", Path.touch, progress=ignore_progress)


def test_two_processes_make_it_once(tmp_path: Path) -> None:
    entry, log = tmp_path / "entry", tmp_path / "log"
    processes = [start(entry, log, 0.5) for _ in range(3)]
    assert [process.wait(30) for process in processes] == [0, 0, 0]
    assert len(log.read_text().split()) == 1


def test_a_killed_maker_is_replaced_and_swept_up(tmp_path: Path) -> None:
    entry, log = tmp_path / "entry", tmp_path / "log"
    process = start(entry, log, 60)
    wait_for(log)
    process.kill()
    process.wait(30)
    assert not entry.exists()
    assert list(tmp_path.glob(".entry.tmp-*"))
    cached(entry, write("new"), progress=ignore_progress)
    assert entry.read_text() == "new"
    assert not list(tmp_path.glob(".entry.tmp-*"))


def test_who_waits_is_told(tmp_path: Path) -> None:
    entry, log = tmp_path / "entry", tmp_path / "log"
    process = start(entry, log, 1.0)
    wait_for(log)
    messages: list[str] = []
    cached(entry, lambda target: pytest.fail("made twice"), progress=lambda message, *_: messages.append(message))
    assert process.wait(30) == 0
    assert messages == ["waiting for another process that prepares entry"]


def test_content_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[bool] = []
    monkeypatch.setattr(model_cache.os, "fsync", lambda _: flushed.append((tmp_path / "entry").exists()))
    cached(tmp_path / "entry", write("x"), progress=ignore_progress)
    assert flushed == [False]
