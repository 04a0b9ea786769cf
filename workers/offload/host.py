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
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandem.workers.offload.records import EvictionOrder, Record, TierEvent, nobody_listens


@dataclass(slots=True, eq=False)
class HostEntry:
    """A block held in host memory. While it has readers it is not given up."""

    record: Record
    slot: int
    num_readers: int = 0


class HostTier:
    """At most `capacity` blocks, and `num_spare` slots for those on their way in or out."""

    def __init__(self, capacity: int, num_spare: int, block_bytes: int, on_event: TierEvent = nobody_listens) -> None:
        self.capacity = capacity
        self._on_event = on_event
        self.num_slots = capacity + num_spare
        self._memory = _reserve(self.num_slots, block_bytes)
        self._free = list(reversed(range(self.num_slots)))
        self._entries: dict[bytes, HostEntry] = {}
        self._order = EvictionOrder()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def slot_bytes(self, slot: int) -> npt.NDArray[np.uint8]:
        """A writable view, uint8 [block_bytes]."""
        view: npt.NDArray[np.uint8] = self._memory[slot]
        return view

    def take_slot(self) -> tuple[int | None, int]:
        """A slot to copy a block into, and how many blocks were lost for it (1 when the disk's writer has all others).

        None: every slot is being copied from or to.
        """
        if self._free:
            return self._free.pop(), 0
        victim = self._pop_victim()
        return (None, 0) if victim is None else (victim.slot, 1)

    def take_free_slot(self) -> int | None:
        """A slot that nobody loses a block for."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def put(self, record: Record, slot: int) -> list[HostEntry]:
        """Hold the block in `slot`. Returns what is given up for it, whose slots the caller gives back in time."""
        if record.key in self._entries:
            self.give_back(slot)
            self.touch(record.key)
            return []
        self._entries[record.key] = HostEntry(record, slot)
        self._order.add(record.key, record.priority)
        if self.capacity:
            self._on_event("stored", record.key, "host")
        given_up: list[HostEntry] = []
        while len(self._entries) > self.capacity and (victim := self._pop_victim()) is not None:
            given_up.append(victim)
        return given_up

    def find(self, key: bytes, parent_key: bytes | None, token_ids: bytes) -> HostEntry | None:
        entry = self._entries.get(key)
        return entry if entry is not None and entry.record.is_of(parent_key, token_ids) else None

    def touch(self, key: bytes) -> None:
        self._order.touch(key)

    def begin_read(self, entry: HostEntry) -> None:
        entry.num_readers += 1
        self._order.remove(entry.record.key)

    def end_read(self, entry: HostEntry) -> None:
        """It counts as used now."""
        entry.num_readers -= 1
        if entry.num_readers == 0:
            self._order.add(entry.record.key, entry.record.priority)

    def check(self, is_busy: Callable[[int], bool] = lambda slot: False) -> None:
        """Raises AssertionError unless each slot is free, held, or busy (being copied, says the caller)."""
        held = [entry.slot for entry in self._entries.values()]
        assert len(set(held) | set(self._free)) == len(held) + len(self._free), "a slot has two owners"
        for slot in set(range(self.num_slots)) - set(held) - set(self._free):
            assert is_busy(slot), f"slot {slot} is lost"
        num_read = sum(entry.num_readers > 0 for entry in self._entries.values())
        assert len(self._order) == len(self._entries) - num_read, "the eviction order has other keys"

    def _pop_victim(self) -> HostEntry | None:
        key = self._order.first()
        if key is None:
            return None
        self._order.remove(key)
        if self.capacity:
            self._on_event("removed", key, "host")
        return self._entries.pop(key)


def _reserve(num_slots: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory that costs nothing until it is written. In huge pages where the system has them: the first copy of a block
    into small ones takes four times as long."""
    # Private: shared memory, Python's default, gets huge pages only where the system is set up for it.
    memory = mmap.mmap(-1, max(1, num_slots * block_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8, count=num_slots * block_bytes).reshape(num_slots, block_bytes)
