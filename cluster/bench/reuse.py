"""How much of a load could come from a cache at best: what an endless cache that forgets nothing would have held.

Pure. A prompt counts as held from the moment it is sent, an answer from its end: a server that is still computing a
prompt when the same beginning arrives again cannot quite reach this.
"""

from __future__ import annotations

from collections.abc import Sequence


class SeenPrefixes:
    """All beginnings of everything seen so far. Time and memory are linear in the number of symbols.

    Symbols are token ids, or words where a load is made of words. A beginning is kept as its 64-bit hash, chained from
    symbol to symbol: at ten million of them the odds of any collision are one in 300,000.
    """

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def add(self, symbols: Sequence[object]) -> int:
        """Note a prompt (or a prompt with its answer); returns how many of its first symbols had been seen before."""
        longest = 0
        value = 0
        for length, symbol in enumerate(symbols, 1):
            value = hash((value, symbol))
            if value in self._hashes:
                longest = length
            else:
                self._hashes.add(value)
        return longest


def reusable_share(num_seen: int, num_symbols: int) -> float:
    """Share of a prompt that need not be computed; its last token always is, since the next one follows from it."""
    return min(num_seen, num_symbols - 1) / num_symbols
