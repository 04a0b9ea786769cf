"""Host memory below the block pool: one piece of memory cut into slots, each the bytes of one block.

    take_slot ──> somebody copies a block into it ──> put ──> held, most recently used
                                                       └──> what it gives up: its slots go to the disk's writer, then
                                                            `give_back`

No thread and no I/O here: whoever copies says when it is done. With a capacity of 0 nothing stays, and the spare slots
are the buffers of what passes through to the disk.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

from tandem.workers.offload.records import Record, TierEvent, nobody_listens
from tandem.workers.offload.shelf import Entry, Shelf


class HostTier:
    """At most `capacity` blocks, and `num_spare` slots for those on their way in or out."""

    def __init__(self, capacity: int, num_spare: int, block_bytes: int, on_event: TierEvent = nobody_listens) -> None:
        self.capacity = capacity
        self._on_event = on_event
        self._shelf = Shelf(capacity + num_spare)
        self._memory = _reserve(capacity + num_spare, block_bytes)

    def __len__(self) -> int:
        return len(self._shelf)

    def __contains__(self, key: bytes) -> bool:
        return key in self._shelf

    def slot_bytes(self, slot: int) -> npt.NDArray[np.uint8]:
        """A writable view, uint8 [block_bytes]."""
        view: npt.NDArray[np.uint8] = self._memory[slot]
        return view

    def take_slot(self) -> tuple[int | None, int]:
        """A slot to copy a block into, and how many blocks were lost for it (1 when the disk's writer has all others).

        None: every slot is being copied from or to.
        """
        slot = self._shelf.take_free()
        if slot is not None:
            return slot, 0
        victim = self._pop_victim()
        return (None, 0) if victim is None else (victim.slot, 1)

    def take_free_slot(self) -> int | None:
        """A slot that nobody loses a block for."""
        return self._shelf.take_free()

    def give_back(self, slot: int) -> None:
        self._shelf.give_back(slot)

    def put(self, record: Record, slot: int) -> list[Entry]:
        """Hold the block in `slot`. Returns what is given up for it, whose slots the caller gives back in time."""
        if record.key in self._shelf:
            self.give_back(slot)
            self.touch(record.key)
            return []
        self._shelf.put(record, slot)
        if self.capacity:
            self._on_event("stored", record.key, "host")
        given_up: list[Entry] = []
        while len(self._shelf) > self.capacity and (victim := self._pop_victim()) is not None:
            given_up.append(victim)
        return given_up

    def find(self, key: bytes, parent_key: bytes | None, token_ids: bytes) -> Entry | None:
        return self._shelf.find(key, parent_key, token_ids)

    def touch(self, key: bytes) -> None:
        self._shelf.touch(key)

    def begin_read(self, entry: Entry) -> None:
        self._shelf.begin_read(entry)

    def end_read(self, entry: Entry) -> None:
        self._shelf.end_read(entry)

    def check(self) -> None:
        """Raises AssertionError unless each slot is free or held, while nobody copies."""
        self._shelf.check()

    def _pop_victim(self) -> Entry | None:
        victim = self._shelf.pop_first()
        if victim is not None and self.capacity:
            self._on_event("removed", victim.record.key, "host")
        return victim


def _reserve(num_slots: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory that costs nothing until it is written. In huge pages where the system has them: the first copy of a block
    into small ones takes four times as long."""
    # Private: shared memory, Python's default, gets huge pages only where the system is set up for it.
    memory = mmap.mmap(-1, max(1, num_slots * block_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8, count=num_slots * block_bytes).reshape(num_slots, block_bytes)
