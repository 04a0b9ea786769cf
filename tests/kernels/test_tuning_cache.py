"""The tuning file: whole after kills, merged between writers, strict about what it reads."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.kernels.tuning import DeviceKey, TuningKey
from tandem.kernels.tuning_cache import (
    MAX_DEVICES,
    MAX_FILE_BYTES,
    Remembered,
    TuningCacheError,
    TuningLock,
    export_results,
    import_results,
    merge_results,
    read_results,
)

DEVICE = DeviceKey("a machine", 2, {"torch": "2.13", "source": "abc"})
OTHER = DeviceKey("a machine", 2, {"torch": "2.14", "source": "abc"})

WRITER = """
import os, signal, sys
from pathlib import Path
from tandem.kernels.tuning import DeviceKey, TuningKey
from tandem.kernels.tuning_cache import Remembered, merge_results

path, op, rounds, kill = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "kill"
device = DeviceKey("a machine", 2, {"torch": "2.13", "source": "abc"})
if kill:
    Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
print("begins", flush=True)
for number in range(rounds):
    keys = [TuningKey(op, str(number % 50), 1 << n, "f") for n in range(20)]
    result = Remembered(choice="a", seconds={"a": 1.0}, noise=0.0, num_rounds=5)
    merge_results(path, device, dict.fromkeys(keys, result))
"""
"""Writes a file again and again; with "kill", dies just before the first new file would take the old one's place."""


def start_writer(path: Path, op: str, rounds: int, *, kill: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", WRITER, str(path), op, str(rounds), "kill" if kill else ""]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def remembered(choice: str = "a") -> Remembered:
    return Remembered(choice=choice, seconds={"a": 1e-4, "b": 2e-4}, noise=0.01, num_rounds=5)


def key(bucket: int = 1, op: str = "linear") -> TuningKey:
    return TuningKey(op, "576x960", bucket, "bfloat16")


def warnings_of(path: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What reading `path` says; it must yield nothing."""
    with caplog.at_level(logging.WARNING):
        assert read_results(path, DEVICE) == {}
    return caplog.messages


def test_what_is_written_is_read_by_the_same_device_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "new" / "tuning.json"
    assert warnings_of(path, caplog) == []  # no file yet is no news
    merge_results(path, DEVICE, {key(): remembered(), key(2): remembered("b")})
    assert read_results(path, DEVICE) == {key(): remembered(), key(2): remembered("b")}
    for device in (OTHER, DeviceKey("a machine", 1, DEVICE.versions), DeviceKey("b", 2, DEVICE.versions)):
        assert read_results(path, device) == {}


def test_new_results_win_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    merge_results(path, DEVICE, {key(): remembered("a"), key(2): remembered("a")})
    merge_results(path, OTHER, {key(): remembered("a")})
    merge_results(path, DEVICE, {key(): remembered("b"), key(4): remembered("a")})
    assert read_results(path, DEVICE) == {key(): remembered("b"), key(2): remembered(), key(4): remembered()}
    assert read_results(path, OTHER) == {key(): remembered()}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tuning.json", "tuning.json.lock"]


def test_the_devices_that_were_written_to_longest_ago_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    devices = [DeviceKey("a machine", 1, {"source": str(number)}) for number in range(MAX_DEVICES + 2)]
    for device in devices[:-1]:
        merge_results(path, device, {key(): remembered()})
        merge_results(path, devices[0], {key(): remembered()})
    merge_results(path, devices[-1], {key(): remembered()})
    kept = [device for device in devices if read_results(path, device)]
    assert kept == [devices[0], *devices[3:]]


VALID: dict[str, Any] = {
    "format": "tandem-tuning",
    "version": 1,
    "devices": [
        {
            "device": {"name": "a machine", "num_threads": 2, "versions": {"torch": "2.13", "source": "abc"}},
            "entries": [
                {
                    "op": "linear",
                    "shape": "576x960",
                    "bucket": 1,
                    "dtype": "bfloat16",
                    "result": {"choice": "a", "seconds": {"a": 1e-4, "b": 2e-4}, "noise": 0.01, "num_rounds": 5},
                }
            ],
        }
    ],
}


def with_result(**changes: Any) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(VALID))
    changed["devices"][0]["entries"][0]["result"].update(changes)
    return changed


def test_the_format_is_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(VALID))
    assert read_results(path, DEVICE) == {key(): remembered()}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        json.dumps(VALID).encode()[:-20],
        b"\xff\xfe",
        b"[]",
        b'{"model": "mine"}',
        b"[" * 100_000,
        json.dumps(VALID | {"version": 2}).encode(),
        json.dumps(VALID | {"format": "other"}).encode(),
        json.dumps(VALID | {"extra": 1}).encode(),
        json.dumps(with_result(noise=-1)).encode(),
        json.dumps(with_result(seconds={"a": "fast"})).encode(),
        json.dumps(with_result(choice=None)).encode(),
        b" " * (MAX_FILE_BYTES + 1),
    ],
)
def test_a_file_that_is_not_ours_is_ignored_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = tmp_path / "tuning.json"
    path.write_bytes(content)
    (message,) = warnings_of(path, caplog)
    assert f"{path} are ignored" in message
    assert "\n" not in message
    merge_results(path, DEVICE, {key(): remembered()})
    assert read_results(path, DEVICE) == {key(): remembered()}


def test_what_cannot_be_read_is_ignored_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tuning.json").mkdir()
    (message,) = warnings_of(tmp_path / "tuning.json", caplog)
    assert "directory" in message


# Processes


def test_a_kill_in_mid_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    merge_results(path, DEVICE, {key(): remembered()})
    old = path.read_bytes()
    with start_writer(path, "linear", 1, kill=True) as writer:
        assert writer.wait(timeout=30) == -signal.SIGKILL
    assert path.read_bytes() == old
    assert len(list(tmp_path.glob(".tuning.json.tmp-*"))) == 1
    merge_results(path, DEVICE, {key(2): remembered()})  # the dead process holds no lock
    assert read_results(path, DEVICE) == {key(): remembered(), key(2): remembered()}
    assert list(tmp_path.glob(".tuning.json.tmp-*")) == []


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tuning.json"
    for delay_s in (0.0, 0.013, 0.029, 0.041):
        with start_writer(path, "linear", 1_000_000) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "begins\n"
            _wait_for(path)
            time.sleep(delay_s)
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait(timeout=30)
        assert len(read_results(path, DEVICE)) >= 20
    assert caplog.messages == []


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_two_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    writers = [start_writer(path, op, 15) for op in ("one", "two")]
    for writer in writers:
        with writer:
            assert writer.wait(timeout=60) == 0
    assert len(read_results(path, DEVICE)) == 2 * 15 * 20


def test_one_measures_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    waits: list[str] = []
    with TuningLock(path) as first:
        assert first.try_acquire(is_too_late=lambda: True, on_wait=lambda: waits.append("first"))
        with TuningLock(path) as second:
            assert not second.try_acquire(is_too_late=lambda: len(waits) > 0, on_wait=lambda: waits.append("second"))
    with TuningLock(path) as third:
        assert third.try_acquire(is_too_late=lambda: True, on_wait=lambda: waits.append("third"))
    assert waits == ["second"]


# Shipping


def test_results_can_be_shipped(tmp_path: Path) -> None:
    here, there, shipped = tmp_path / "here.json", tmp_path / "there.json", tmp_path / "shipped.json"
    merge_results(here, DEVICE, {key(): remembered(), key(2): remembered()})
    merge_results(here, OTHER, {key(4): remembered()})
    merge_results(there, DEVICE, {key(8): remembered()})
    assert export_results(here, DEVICE, shipped) == 2
    assert import_results(there, DEVICE, shipped) == 2
    assert read_results(there, DEVICE) == {key(): remembered(), key(2): remembered(), key(8): remembered()}
    assert read_results(shipped, OTHER) == {}


def test_another_devices_results_need_force(tmp_path: Path) -> None:
    here, shipped = tmp_path / "here.json", tmp_path / "shipped.json"
    merge_results(here, OTHER, {key(): remembered()})
    export_results(here, OTHER, shipped)
    with pytest.raises(TuningCacheError, match=r"of another device: torch is '2\.14' there, '2\.13' here"):
        import_results(here, DEVICE, shipped)
    assert read_results(here, DEVICE) == {}
    assert import_results(here, DEVICE, shipped, force=True) == 1
    assert read_results(here, DEVICE) == {key(): remembered()}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "is not a file of tuning results"),
        (json.dumps(VALID | {"devices": []}).encode(), "holds no results"),
        (None, "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_imported_says_why(tmp_path: Path, content: bytes | None, message: str) -> None:
    shipped = tmp_path / "shipped.json"
    if content is not None:
        shipped.write_bytes(content)
    for force in (False, True):
        with pytest.raises(TuningCacheError, match=message):
            import_results(tmp_path / "tuning.json", DEVICE, shipped, force=force)
    assert not (tmp_path / "tuning.json").exists()


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    with pytest.raises(TuningCacheError, match="nothing was tuned"):
        export_results(path, DEVICE, tmp_path / "shipped.json")
    merge_results(path, DEVICE, {key(): remembered()})
    with pytest.raises(TuningCacheError, match="cannot be written: No such file"):
        export_results(path, DEVICE, tmp_path / "absent" / "shipped.json")


def test_others_may_read_what_is_made_to_be_shipped(tmp_path: Path) -> None:
    path, target = tmp_path / "tuning.json", tmp_path / "exported.json"
    before = os.umask(0o022)
    try:
        merge_results(path, DEVICE, {key(): remembered()})
        export_results(path, DEVICE, target)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(file.stat().st_mode) for file in (path, target)] == [0o644, 0o644]
