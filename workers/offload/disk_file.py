"""One worker's blocks on local disk: a single file of fixed-size slots. Blocking calls, for threads of the tier.

    file header (4096 bytes) | slot | slot | ...       slot: header | the block's bytes, padded to 512

A slot's header says all about it (key, parent, tokens, namespace, digest of the bytes) and carries a digest of itself,
so there is no index that could disagree with the data: opening reads all headers. A slot is overwritten in three
steps (header zeroed, bytes, new header), so one that was torn by a kill is empty or fails a digest. Nothing is synced:
after a power cut digests decide, too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import xxhash

from tandem.workers.offload.records import Record

FILE_NAME = "blocks.kv"
FILE_HEADER_BYTES = 4096
ALIGNMENT = 512
_MAGIC = b"TandemKV"
_VERSION = 1
_FILE_HEADER = struct.Struct("<8sIQ")
"""Magic, version, bytes of a slot."""
_SLOT_HEADER = struct.Struct("<16s16s?16sBQ16sI")
"""Namespace, key, has parent, parent key, priority, order of writing, digest of the bytes, number of tokens."""
_DIGEST_BYTES = 16


class DiskError(OSError):
    """The file cannot be used: in use by another worker, or not one of ours."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """What a slot's header says."""

    record: Record
    slot: int
    written: int
    """Order of writing: the higher, the later."""


def slot_bytes_for(block_bytes: int, block_size: int) -> int:
    """Bytes that one block takes on disk."""
    return _header_bytes(block_size) + _round_up(block_bytes)


def num_slots_for(disk_bytes: int, block_bytes: int, block_size: int) -> int:
    """Blocks that a file of at most `disk_bytes` holds."""
    return max(0, (disk_bytes - FILE_HEADER_BYTES) // slot_bytes_for(block_bytes, block_size))


def worker_file(path: Path, worker_id: str) -> Path:
    """A folder for each worker: two that are given the same path do not meet."""
    return path / f"worker-{quote(worker_id, safe='')}" / FILE_NAME


class DiskFile:
    """`num_slots` slots in `file`, which is made, locked, and cut to size. `namespace` (16 bytes) stands for all that
    KV depends on beside the tokens: slots of another one count as empty.

    Raises `DiskError` when another process has the file or it is not ours, `OSError` for what the system says. Reads
    and writes of different slots may run in several threads at once.
    """

    def __init__(self, file: Path, num_slots: int, block_bytes: int, block_size: int, namespace: bytes) -> None:
        self.num_slots = num_slots
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._namespace = namespace
        self._header_bytes = _header_bytes(block_size)
        self._slot_bytes = slot_bytes_for(block_bytes, block_size)
        self._users_lock = threading.Lock()
        self._num_users = 0
        self._is_closing = False
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock(file)
            self._prepare(file)
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Lets go of the lock, too: now, or when the calls under way in other threads have ended."""
        with self._users_lock:
            if not self._is_closing:
                self._is_closing = True
                self._close_if_unused()

    def scan(self) -> list[StoredRecord]:
        """Everything in the file that is whole as far as its header tells, in the order of slots."""
        with self._in_use():
            num_used = -(-max(0, os.fstat(self._fd).st_size - FILE_HEADER_BYTES) // self._slot_bytes)
            found = [self._read_header(slot) for slot in range(min(num_used, self.num_slots))]
            return [stored for stored, _ in filter(None, found)]

    def write(self, slot: int, record: Record, written: int, data: npt.NDArray[np.uint8]) -> None:
        """Put a block, uint8 [block_bytes], into a slot."""
        header = self._pack(record, written, xxhash.xxh3_128_digest(data.data))
        offset = self._offset(slot)
        with self._in_use():
            _write_all(self._fd, bytes(self._header_bytes), offset)
            _write_all(self._fd, data.data, offset + self._header_bytes)
            _write_all(self._fd, header, offset)

    def read(self, slot: int, record: Record, into: npt.NDArray[np.uint8]) -> bool:
        """Read a block into uint8 [block_bytes]. False, with rubbish in `into`: the slot does not hold it any more."""
        with self._in_use():
            found = self._read_header(slot)
            if found is None:
                return False
            stored, digest = found
            is_same = stored.record.key == record.key and stored.record.is_of(record.parent_key, record.token_ids)
            if not is_same or not _read_all(self._fd, into.data, self._offset(slot) + self._header_bytes):
                return False
        return xxhash.xxh3_128_digest(into.data) == digest

    def probe(self, buffer: npt.NDArray[np.uint8]) -> float:
        """Bytes per second of reading a block, as far as a first try tells (the system may have it in memory).

        `buffer` is uint8 [block_bytes]. What it holds is written where the file is empty, without a header.
        """
        offset = self._offset(0) + self._header_bytes
        with self._in_use():
            if os.fstat(self._fd).st_size < offset + len(buffer):
                _write_all(self._fd, buffer.data, offset)
            started = time.perf_counter()
            _read_all(self._fd, buffer.data, offset)
        xxhash.xxh3_128_digest(buffer.data)
        return len(buffer) / max(time.perf_counter() - started, 1e-9)

    # Inside

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """The descriptor stays open: its number could be another file's at once."""
        with self._users_lock:
            if self._is_closing:
                raise DiskError("the file is closed")
            self._num_users += 1
        try:
            yield
        finally:
            with self._users_lock:
                self._num_users -= 1
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_closing and self._num_users == 0:
            os.close(self._fd)

    def _lock(self, file: Path) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise DiskError(f"{file} is in use by another worker") from error
            raise
        os.fchmod(self._fd, 0o600)

    def _prepare(self, file: Path) -> None:
        """Start afresh when the slots have another size; leave alone what somebody else wrote."""
        size = os.fstat(self._fd).st_size
        header = os.pread(self._fd, _FILE_HEADER.size, 0)
        ours = _FILE_HEADER.pack(_MAGIC, _VERSION, self._slot_bytes)
        if size and not header.startswith(_MAGIC[: len(header)]):
            raise DiskError(f"{file} is not a file of this program; remove it or choose another folder")
        if header != ours:
            os.ftruncate(self._fd, 0)
            _write_all(self._fd, ours.ljust(FILE_HEADER_BYTES, b"\0"), 0)
        elif size > (end := self._offset(self.num_slots)):
            os.ftruncate(self._fd, end)

    def _offset(self, slot: int) -> int:
        return FILE_HEADER_BYTES + slot * self._slot_bytes

    def _pack(self, record: Record, written: int, digest: bytes) -> bytes:
        fixed = _SLOT_HEADER.pack(
            self._namespace,
            record.key,
            record.parent_key is not None,
            record.parent_key or b"",
            record.priority,
            written,
            digest,
            len(record.token_ids) // 4,
        )
        body = fixed + record.token_ids
        return (xxhash.xxh3_128_digest(body) + body).ljust(self._header_bytes, b"\0")

    def _read_header(self, slot: int) -> tuple[StoredRecord, bytes] | None:
        header = os.pread(self._fd, self._header_bytes, self._offset(slot))
        num_body = _SLOT_HEADER.size + 4 * self._block_size
        body = header[_DIGEST_BYTES : _DIGEST_BYTES + num_body]
        if len(body) < num_body or xxhash.xxh3_128_digest(body) != header[:_DIGEST_BYTES]:
            return None
        namespace, key, has_parent, parent, priority, written, digest, num_tokens = _SLOT_HEADER.unpack_from(body)
        if namespace != self._namespace or num_tokens != self._block_size:
            return None
        record = Record(key, parent if has_parent else None, body[_SLOT_HEADER.size :], priority)
        return StoredRecord(record, slot, written), digest


def _header_bytes(block_size: int) -> int:
    return _round_up(_DIGEST_BYTES + _SLOT_HEADER.size + 4 * block_size)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _read_all(fd: int, into: memoryview, offset: int) -> bool:
    """False: the file ends before."""
    view = memoryview(into)
    while view:
        num_read = os.preadv(fd, [view], offset)
        if num_read == 0:
            return False
        view, offset = view[num_read:], offset + num_read
    return True
