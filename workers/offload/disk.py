"""Local disk as a tier: which blocks are in which slot, which slot goes next, and what to do when the disk fails.

All state lives on the event loop; reads and writes of the file run in two threads, one each. A disk that fails or hangs
costs what it held: the tier says so once, pauses, and tries again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from tandem.workers.offload.disk_file import DiskError, DiskFile, StoredRecord
from tandem.workers.offload.rates import MeasuredPath, PathSpeed
from tandem.workers.offload.records import Record, TierEvent, nobody_listens
from tandem.workers.offload.shelf import Entry, Shelf
from tandem.workers.tasks import Tasks

logger = logging.getLogger(__name__)

PAUSE_S = 30.0
"""How long the tier stays off after an error."""


class Destination:
    """Where a read may put its bytes, until somebody who cannot wait any longer takes that back.

    The bytes come to a buffer of the reading thread first. So a disk that hangs never writes into a block late.
    """

    def __init__(self, put: Callable[[npt.NDArray[np.uint8]], None]) -> None:
        self._put = put
        self._lock = threading.Lock()
        self._is_withdrawn = False

    def fill(self, data: npt.NDArray[np.uint8]) -> bool:
        with self._lock:
            if self._is_withdrawn:
                return False
            self._put(data)
            return True

    def withdraw(self) -> None:
        """After this returns nothing is put any more."""
        with self._lock:
            self._is_withdrawn = True


class DiskTier:
    """At most `num_slots` blocks in one file that `open_file` opens. `count(event)` is told what happens, for metrics:
    "evicted", "damaged", "error"."""

    def __init__(
        self,
        open_file: Callable[[], DiskFile],
        num_slots: int,
        block_bytes: int,
        count: Callable[[str], None],
        on_event: TierEvent = nobody_listens,
    ) -> None:
        self._on_event = on_event
        self.path = MeasuredPath(PathSpeed(bytes_per_s=0.5e9, latency_s=0.001))
        self._open_file = open_file
        self._count = count
        self._buffer = np.empty(block_bytes, dtype=np.uint8)
        """Of the reading thread."""
        self._file: DiskFile | None = None
        self._shelf = Shelf(num_slots)
        self._being_written: set[bytes] = set()
        self._numbers = itertools.count(1)
        self._writer = ThreadPoolExecutor(1, "kv-disk-write")
        self._reader = ThreadPoolExecutor(1, "kv-disk-read")
        self._is_paused = True  # until it is open
        self._has_warned = False
        self._retry: asyncio.TimerHandle | None = None
        self._tasks = Tasks()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._shelf)

    def __contains__(self, key: bytes) -> bool:
        """False while the tier is paused."""
        return key in self._shelf and self.is_on

    @property
    def is_on(self) -> bool:
        return not self._is_paused and not self._is_closed

    def will_hold(self, key: bytes) -> bool:
        return key in self._shelf or key in self._being_written

    async def open(self) -> None:
        """Open the file and find what it holds. Does not raise: a disk that fails is tried again later."""
        loop = asyncio.get_running_loop()
        try:
            file, stored, bytes_per_s = await loop.run_in_executor(self._reader, self._open_and_scan)
        except OSError as error:
            self._pause(error)
            return
        if self._is_closed:
            file.close()
            return
        self._file = file
        self.path.start_at(bytes_per_s)
        by_age = sorted(stored, key=lambda found: found.written)
        for record in self._shelf.adopt((found.record, found.slot) for found in by_age):
            self._on_event("stored", record.key, "disk")
        self._numbers = itertools.count(1 + max((found.written for found in stored), default=0))
        self._is_paused = False

    def close(self) -> None:
        """A read or write under way is not waited for: it may hang. The file is let go when it has ended."""
        self._is_closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._reader.shutdown(wait=False, cancel_futures=True)
        if self._file is not None:
            self._file.close()

    def find(self, key: bytes, parent_key: bytes | None, token_ids: bytes) -> Entry | None:
        return self._shelf.find(key, parent_key, token_ids) if self.is_on else None

    def touch(self, key: bytes) -> None:
        self._shelf.touch(key)

    async def write(self, record: Record, data: npt.NDArray[np.uint8]) -> bool:
        """Put a block into the best slot. False: it is not held (no slot is free of readers, or the disk fails)."""
        file, slot = self._file, self._take_slot()
        if file is None or slot is None:
            if slot is not None:
                self._shelf.give_back(slot)
            return False
        self._being_written.add(record.key)
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        try:
            await loop.run_in_executor(self._writer, file.write, slot, record, number, data)
        except OSError as error:
            self._shelf.give_back(slot)
            self._pause(error)
            return False
        finally:
            self._being_written.discard(record.key)
        self._has_warned = False
        self._shelf.put(record, slot)
        self._on_event("stored", record.key, "disk")
        return True

    async def read(self, entry: Entry, put: Callable[[npt.NDArray[np.uint8]], None], timeout_s: float) -> bool:
        """Hand the bytes of a block to `put`, which is called in another thread. False: they are not there, damaged,
        or late, and `put` was not called and will not be."""
        file = self._file
        if file is None or not self.is_on:
            return False
        destination = Destination(put)
        self._shelf.begin_read(entry)
        future = asyncio.get_running_loop().run_in_executor(self._reader, self._read, file, entry, destination)
        future.add_done_callback(lambda _: self._shelf.end_read(entry))
        try:
            is_good = await asyncio.wait_for(asyncio.shield(future), timeout_s)
        except TimeoutError:
            destination.withdraw()
            future.add_done_callback(_retrieve)
            self._pause(TimeoutError(f"nothing came for {timeout_s:.1f} s"))
            return False
        except OSError as error:
            self._pause(error)
            return False
        except asyncio.CancelledError:
            destination.withdraw()
            future.add_done_callback(_retrieve)
            raise
        if not is_good:
            self._forget(entry)
        return is_good

    def check(self) -> None:
        """Raises AssertionError unless each slot is free or held, while nothing is being written."""
        self._shelf.check()

    # Inside

    def _open_and_scan(self) -> tuple[DiskFile, list[StoredRecord], float]:
        file = self._open_file()
        try:
            found = file, file.scan(), file.probe(self._buffer)
            if self._is_closed:  # nobody waits for the file any more
                raise DiskError("closed while it was opened")
            return found
        except BaseException:
            file.close()
            raise

    def _read(self, file: DiskFile, entry: Entry, destination: Destination) -> bool:
        return file.read(entry.slot, entry.record, self._buffer) and destination.fill(self._buffer)

    def _take_slot(self) -> int | None:
        if not self.is_on:
            return None
        slot = self._shelf.take_free()
        if slot is not None:
            return slot
        victim = self._shelf.pop_first()
        if victim is None:
            return None
        self._count("evicted")
        self._on_event("removed", victim.record.key, "disk")
        return victim.slot

    def _forget(self, entry: Entry) -> None:
        """Its bytes are not what they should be."""
        if self._shelf.forget(entry):
            self._count("damaged")
            self._on_event("removed", entry.record.key, "disk")

    def _pause(self, error: Exception) -> None:
        self._count("error")
        if not self._has_warned:
            logger.warning("the disk tier is off for %.0f s, nothing else changes: %s", PAUSE_S, error)
            self._has_warned = True
        if self._is_closed or self._retry is not None:
            return
        self._is_paused = True
        self._retry = asyncio.get_running_loop().call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._retry = None
        if self._file is None:
            self._tasks.spawn(self.open(), "open the disk tier")
        else:
            self._is_paused = False


def _retrieve(future: asyncio.Future[bool]) -> None:
    """The error of a read that nobody waits for any more is seen by nobody either, and not reported as lost."""
    if not future.cancelled():
        future.exception()
