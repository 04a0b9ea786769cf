"""What was routed lately: an approximate memory of which worker was given which beginnings of prompts.

It bridges the moment between a decision and the worker's word about it, and it is what the router goes by when the
index is not there. Bounded, least recently used first; knows nothing of evictions, so it forgets by age.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import lru_cache

EXACT_BLOCKS = 64
"""Every block up to here is noted; behind it ever fewer, at least 32 between a block and its double."""


@lru_cache(maxsize=8192)
def noted_positions(num_blocks: int) -> tuple[int, ...]:
    """Which blocks, counted from 1, of a prompt of `num_blocks` are noted: about 64 + 32 log2(num_blocks / 64).

    A common beginning of two prompts is thus found up to 1/32 of its length, one prompt that begins another exactly.
    """
    positions = list(range(1, min(num_blocks, EXACT_BLOCKS) + 1))
    position = EXACT_BLOCKS
    while position < num_blocks:
        position += 1 << (position.bit_length() - EXACT_BLOCKS.bit_length() + 1)
        positions.append(min(position, num_blocks))
    return tuple(positions)


class RecentRoutes:
    """Block key -> owners and when each was last given a prompt with that block. Times in seconds, of one clock.

    Neighbouring blocks mostly have the same owners, so they share one dictionary of them, which is never written to
    again. That spares memory and the garbage collector, and a beginning that a thousand workers have been given is
    looked at once rather than block by block.
    """

    def __init__(self, max_notes: int = 100_000) -> None:
        self._max_notes = max_notes
        self._num_notes = 0
        self._by_key: dict[bytes, Mapping[bytes, float]] = {}
        """Least recently noted first."""

    def __len__(self) -> int:
        """Notes: pairs of block and owner."""
        return self._num_notes

    def note(self, keys: Sequence[bytes], owners: Iterable[bytes], now: float) -> None:
        """These owners are about to hold the blocks. `keys`: thinned out by `noted_positions`, in order."""
        fresh: Mapping[bytes, float] = dict.fromkeys(owners, now)
        before: Mapping[bytes, float] | None = None
        after = fresh
        for key in reversed(keys):  # beginnings of prompts last: they are the last to be forgotten
            notes = self._by_key.pop(key, None)
            if notes is not before:
                before, after = notes, fresh if notes is None else {**notes, **fresh}
            self._num_notes += len(after) - (0 if notes is None else len(notes))
            self._by_key[key] = after
        while self._num_notes > self._max_notes:
            oldest = next(iter(self._by_key))
            self._num_notes -= len(self._by_key.pop(oldest))

    def longest_prefix(
        self,
        keys: Sequence[bytes],
        owners: Mapping[bytes, object],
        *,
        since: float,
        known: Set[bytes],
        known_since: float,
    ) -> dict[bytes, int]:
        """How many blocks from the start each of `owners` was given since then, or since `known_since` if it is one of
        `known`. 0.1 ms for 3,000 blocks."""
        lengths: dict[bytes, int] = {}
        by_key = self._by_key
        seen: Mapping[bytes, float] | None = None
        for position in range(len(keys), 0, -1):
            notes = by_key.get(keys[position - 1])
            if notes is None or notes is seen:
                continue
            seen = notes
            for owner in notes.keys() - lengths.keys():
                if owner in owners and notes[owner] >= (known_since if owner in known else since):
                    lengths[owner] = position
            if len(lengths) == len(owners):
                break
        return lengths
