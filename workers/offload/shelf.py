"""Which block is in which slot of a tier, and which one is given up first. No bytes, no threads, no I/O.

FREE ──take_free──> the caller's ──put──> held ──pop_first──> the caller's ──give_back──> FREE
                                           └──forget──> FREE, once nobody reads it any more
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.workers.offload.records import EvictionOrder, Record


@dataclass(slots=True, eq=False)
class Entry:
    """A block that a tier holds. While it has readers it is not given up."""

    record: Record
    slot: int
    num_readers: int = 0


class Shelf:
    """The slots of one tier, numbered from 0, and the blocks in them."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._entries: dict[bytes, Entry] = {}
        self._order = EvictionOrder()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def take_free(self) -> int | None:
        """A slot that nobody loses a block for; None: there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def put(self, record: Record, slot: int) -> None:
        """Hold the block that the caller has put into its slot, as the most recently used of its priority."""
        self._entries[record.key] = Entry(record, slot)
        self._order.add(record.key, record.priority)

    def adopt(self, found: Iterable[tuple[Record, int]]) -> list[Record]:
        """Hold what was found in slots that are free, the last as the most recently used. Returns what is held now:
        of blocks that were found twice, the first."""
        adopted: list[Record] = []
        slots: set[int] = set()
        for record, slot in found:
            if record.key not in self._entries:
                self.put(record, slot)
                adopted.append(record)
                slots.add(slot)
        self._free = [slot for slot in self._free if slot not in slots]
        return adopted

    def find(self, key: bytes, parent_key: bytes | None, token_ids: bytes) -> Entry | None:
        """None also where the key stands for other tokens."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.record.is_of(parent_key, token_ids) else None

    def touch(self, key: bytes) -> None:
        """It was used just now. Unknown keys are fine."""
        self._order.touch(key)

    def pop_first(self) -> Entry | None:
        """Give up the block of the lowest priority, of these the one unused for longest: its slot is the caller's.
        None: there is none without readers."""
        key = self._order.first()
        if key is None:
            return None
        self._order.remove(key)
        return self._entries.pop(key)

    def begin_read(self, entry: Entry) -> None:
        entry.num_readers += 1
        self._order.remove(entry.record.key)

    def end_read(self, entry: Entry) -> None:
        """It counts as used now."""
        entry.num_readers -= 1
        if entry.num_readers > 0:
            return
        if self._entries.get(entry.record.key) is entry:
            self._order.add(entry.record.key, entry.record.priority)
        else:
            self._free.append(entry.slot)  # it was forgotten meanwhile

    def forget(self, entry: Entry) -> bool:
        """Its bytes are not what they should be. False: somebody else has found that out before."""
        if self._entries.get(entry.record.key) is not entry:
            return False
        del self._entries[entry.record.key]
        self._order.remove(entry.record.key)
        if entry.num_readers == 0:
            self._free.append(entry.slot)
        return True

    def check(self) -> None:
        """Raises AssertionError unless each slot is free or holds a block, while the caller has none."""
        held = [entry.slot for entry in self._entries.values()]
        assert sorted([*held, *self._free]) == list(range(self._num_slots)), "a slot is lost, or has two owners"
        num_read = sum(entry.num_readers > 0 for entry in self._entries.values())
        assert len(self._order) == len(self._entries) - num_read, "the eviction order has other keys"
