"""What lower tiers know of a block beside its bytes, and the order in which they give blocks up."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

TierEvent = Callable[[Literal["stored", "removed"], bytes, Literal["host", "disk"]], None]
"""Told of every key that enters or leaves a tier, on the event loop."""


@dataclass(frozen=True, slots=True)
class Record:
    """The name of one block's content."""

    key: bytes
    parent_key: bytes | None
    """None: the first block of a prompt."""
    token_ids: bytes
    """The block's own tokens, packed (`pack`): compared on every hit, as the prefix cache does."""
    priority: int

    def is_of(self, parent_key: bytes | None, token_ids: bytes) -> bool:
        return self.parent_key == parent_key and self.token_ids == token_ids


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as unsigned 32-bit numbers: 4 bytes each instead of an object."""
    return array("I", token_ids).tobytes()


class EvictionOrder:
    """Keys by (priority, last use): the lowest priority goes first, and of these the one unused for longest.

    A prompt's blocks are touched from its end to its beginning, so a block without whose parent it is useless to keep
    goes before that parent. O(1) per call; finding the first looks at 101 priorities at most.
    """

    def __init__(self) -> None:
        self._by_priority: dict[int, OrderedDict[bytes, None]] = {}
        self._priority: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._priority)

    def add(self, key: bytes, priority: int) -> None:
        """As the most recently used of its priority."""
        self.remove(key)
        self._priority[key] = priority
        self._by_priority.setdefault(priority, OrderedDict())[key] = None

    def touch(self, key: bytes) -> None:
        """It was used just now. Unknown keys are fine: a key that is being read is not in the order."""
        priority = self._priority.get(key)
        if priority is not None:
            self._by_priority[priority].move_to_end(key)

    def remove(self, key: bytes) -> None:
        priority = self._priority.pop(key, None)
        if priority is not None:
            keys = self._by_priority[priority]
            del keys[key]
            if not keys:
                del self._by_priority[priority]

    def first(self) -> bytes | None:
        """The key to give up first; None when there is none."""
        if not self._by_priority:
            return None
        return next(iter(self._by_priority[min(self._by_priority)]))


def nobody_listens(kind: Literal["stored", "removed"], key: bytes, tier: Literal["host", "disk"]) -> None:
    """A `TierEvent` that goes nowhere."""
