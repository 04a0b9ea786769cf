"""The scheduler's queues."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from tandem.workers.sequence import Sequence

_rank = attrgetter("rank")


class ByAge:
    """Sequences, oldest first, where a priority counts as youth (`Sequence.rank`). O(log n) to find; the moves of a
    Python list do not count at these lengths."""

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
        insort(self._items, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._items, sequence.rank, key=_rank)
        assert self._items[index] is sequence, f"sequence {sequence.order} is not here"
        del self._items[index]
