"""The file: what was written is read, what was damaged is not, whoever damaged it and when."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from offload_blocks import BLOCK_BYTES, BLOCK_SIZE, NAMESPACE, content, record_of

from tandem.workers.offload.disk_file import (
    FILE_HEADER_BYTES,
    DiskError,
    DiskFile,
    num_slots_for,
    slot_bytes_for,
    worker_file,
)
from tandem.workers.offload.records import Record

SLOT = slot_bytes_for(BLOCK_BYTES, BLOCK_SIZE)


def open_file(path: Path, num_slots: int = 8, namespace: bytes = NAMESPACE) -> DiskFile:
    return DiskFile(path, num_slots, BLOCK_BYTES, BLOCK_SIZE, namespace)


def holds(file: DiskFile, slot: int, name: int) -> bool:
    into = np.zeros(BLOCK_BYTES, dtype=np.uint8)
    is_good = file.read(slot, record_of(name), into)
    assert not is_good or np.array_equal(into, content(name)), "bytes of something else were served"
    return is_good


def test_what_was_written_is_found_again(disk_path: Path) -> None:
    file = open_file(disk_path)
    for slot, name in enumerate([10, 11, 12]):
        file.write(slot, record_of(name, priority=name), 7 + slot, content(name))
    file.close()
    file = open_file(disk_path)
    found = [(s.record, s.slot, s.written) for s in file.scan()]
    assert found == [(record_of(name, priority=name), slot, 7 + slot) for slot, name in enumerate([10, 11, 12])]
    assert all(holds(file, slot, name) for slot, name in enumerate([10, 11, 12]))
    assert not holds(file, 0, 11)
    assert not holds(file, 5, 10)
    file.close()


def test_nobody_else_can_read_it(disk_path: Path) -> None:
    disk_path.parent.mkdir()
    disk_path.touch(mode=0o666)
    open_file(disk_path).close()
    assert stat.S_IMODE(disk_path.stat().st_mode) == 0o600


def test_sizes_stay_below_what_was_asked_for(disk_path: Path) -> None:
    limit = 10_000
    num_slots = num_slots_for(limit, BLOCK_BYTES, BLOCK_SIZE)
    file = open_file(disk_path, num_slots)
    for slot in range(num_slots):
        file.write(slot, record_of(slot), slot, content(slot))
    file.close()
    assert limit - SLOT < disk_path.stat().st_size <= limit
    assert num_slots_for(FILE_HEADER_BYTES + SLOT - 1, BLOCK_BYTES, BLOCK_SIZE) == 0


@pytest.mark.parametrize("byte", [0, 15, 16, 40, 60, 80, 105, 512, 700, 1511])
def test_a_flipped_bit_anywhere_in_a_slot(disk_path: Path, byte: int) -> None:
    file = open_file(disk_path)
    for slot in range(3):
        file.write(slot, record_of(slot), slot, content(slot))
    file.close()
    with disk_path.open("r+b") as raw:
        raw.seek(FILE_HEADER_BYTES + SLOT + byte)
        value = raw.read(1)[0]
        raw.seek(-1, os.SEEK_CUR)
        raw.write(bytes([value ^ 4]))
    file = open_file(disk_path)
    assert not holds(file, 1, 1)
    assert holds(file, 0, 0)
    assert holds(file, 2, 2)
    file.write(1, record_of(9), 9, content(9))  # and the slot is as good as any
    assert holds(file, 1, 9)
    file.close()


@pytest.mark.parametrize("num_bytes", [0, 5, FILE_HEADER_BYTES, FILE_HEADER_BYTES + SLOT + 100, 2 * SLOT + 5000])
def test_a_truncated_file(disk_path: Path, num_bytes: int) -> None:
    file = open_file(disk_path)
    for slot in range(3):
        file.write(slot, record_of(slot), slot, content(slot))
    file.close()
    os.truncate(disk_path, num_bytes)
    file = open_file(disk_path)
    num_whole = max(0, (num_bytes - FILE_HEADER_BYTES) // SLOT)
    assert [holds(file, slot, slot) for slot in range(3)] == [slot < num_whole for slot in range(3)]
    file.close()


def test_another_model_or_key_starts_with_nothing(disk_path: Path) -> None:
    file = open_file(disk_path)
    file.write(0, record_of(1), 1, content(1))
    file.close()
    other = open_file(disk_path, namespace=b"m" * 16)
    assert other.scan() == []
    assert not holds(other, 0, 1)
    other.close()
    larger = DiskFile(disk_path, 8, 2 * BLOCK_BYTES, BLOCK_SIZE, NAMESPACE)
    assert larger.scan() == []
    larger.close()
    assert open_file(disk_path).scan() == [], "the file was made afresh"


def test_somebody_elses_file_is_left_alone(disk_path: Path) -> None:
    disk_path.parent.mkdir()
    disk_path.write_bytes(b"my only copy of something")
    with pytest.raises(DiskError, match="not a file of this program"):
        open_file(disk_path)
    assert disk_path.read_bytes() == b"my only copy of something"


def test_two_workers_do_not_share_a_file(disk_path: Path) -> None:
    file = open_file(disk_path)
    with pytest.raises(DiskError, match="in use"):
        open_file(disk_path)
    file.close()
    open_file(disk_path).close()
    assert worker_file(Path("/d"), "a/../b") != worker_file(Path("/d"), "b")
    assert worker_file(Path("/d"), "..").parent.parent == Path("/d")


def test_it_shrinks_with_its_limit(disk_path: Path) -> None:
    file = open_file(disk_path)
    for slot in range(5):
        file.write(slot, record_of(slot), slot, content(slot))
    file.close()
    file = open_file(disk_path, num_slots=2)
    assert [found.slot for found in file.scan()] == [0, 1]
    assert disk_path.stat().st_size == FILE_HEADER_BYTES + 2 * SLOT
    file.close()


def test_a_torn_write_leaves_nothing_to_serve(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut after every number of system calls that a write makes."""
    pwrite = os.pwrite
    for num_calls in range(4):  # header, half of the bytes, the other half, header
        file = open_file(disk_path)
        file.write(0, record_of(1), 1, content(1))
        left = num_calls

        def cut(fd: int, data: memoryview, offset: int) -> int:
            nonlocal left
            if left == 0:
                raise OSError("torn")
            left -= 1
            return pwrite(fd, data[: max(1, len(data) // 2)] if len(data) > 600 else data, offset)

        monkeypatch.setattr(os, "pwrite", cut)
        with contextlib.suppress(OSError):
            file.write(0, record_of(2), 2, content(2))
        monkeypatch.undo()
        file.close()
        file = open_file(disk_path)
        assert (holds(file, 0, 1), holds(file, 0, 2)) == (num_calls == 0, False)
        file.close()


def name_of(record: Record) -> int:
    return int.from_bytes(record.key, "big")


WRITER = """
import sys
from pathlib import Path
from offload_blocks import BLOCK_BYTES, BLOCK_SIZE, NAMESPACE, content, record_of
from tandem.workers.offload.disk_file import DiskFile
file = DiskFile(Path(sys.argv[1]), 8, BLOCK_BYTES, BLOCK_SIZE, NAMESPACE)
for number in range(10**9):
    if number % 8 == 0:
        print("all slots written", flush=True)
    file.write(number % 8, record_of(number % 50), number, content(number % 50))
"""


def test_kill_9_in_the_middle_of_writing(disk_path: Path) -> None:
    for pause_s in (0.0, 0.0013, 0.0105):
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *sys.path]))
        command = [sys.executable, "-c", WRITER, str(disk_path)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert child.stdout is not None
        assert child.stdout.readline() + child.stdout.readline()
        time.sleep(pause_s)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        file = open_file(disk_path)
        whole = [stored for stored in file.scan() if holds(file, stored.slot, name_of(stored.record))]
        assert len(whole) >= 7, "at most the slot that was being written is lost"
        assert all(stored.record == record_of(name_of(stored.record)) for stored in whole)
        file.write(0, record_of(3), 1 << 40, content(3))
        assert holds(file, 0, 3)
        file.close()
