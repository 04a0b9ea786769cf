"""The scheduler's queues."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from tandem.workers.sequence import Sequence


def _order(sequence: Sequence) -> int:
    return sequence.order


class ByAge:
    """Sequences, oldest first. O(log n) to find; the moves of a Python list do not count at these lengths."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._items)

    @property
    def oldest(self) -> Sequence:
        return self._items[0]

    def add(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._items, sequence.order, key=_order)
        assert self._items[index] is sequence, f"sequence {sequence.order} is not here"
        del self._items[index]
