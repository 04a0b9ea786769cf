"""Who owns which block. No tensor: a block is a number below `num_blocks`.

    FREE ──allocate──> USED ──release, content has no name──> FREE
      ▲                 │ ▲
      │                 │ └──share── CACHED ──evicted by allocate──> USED (new content)
      │                 └──release, content has a name──> CACHED
      │   USED ──expect──> INCOMING ──arrived──> USED
      │                        │ release ──> FREE
      └──end_quarantine── QUARANTINED <──quarantine── INCOMING

A USED block has one owner per sequence that holds it (shared prompt blocks); an INCOMING one exactly one.
free + cached + used + incoming + quarantined == total after every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from tandem.workers.prefix_cache import PrefixCache
from tandem.workers.types import BlockCounts


class BlockState(IntEnum):
    """See the drawing above. By number: the pool's counts are a list."""

    FREE = 0
    CACHED = 1
    USED = 2
    INCOMING = 3
    QUARANTINED = 4


class BlockPool:
    """States, owners and generations of all blocks. O(1) or O(log n) per block; misuse is our bug and asserts."""

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self.cache = cache
        self._state = [BlockState.FREE] * num_blocks
        self._num_owners = [0] * num_blocks
        self._generation = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))
        """A stack: the block freed last is handed out first, while it is still warm in the processor's cache."""
        self._num = [num_blocks, 0, 0, 0, 0]
        """Number of blocks by state."""

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: all free and all cached ones."""
        return self._num[BlockState.FREE] + self._num[BlockState.CACHED]

    def state(self, block_id: int) -> BlockState:
        return self._state[block_id]

    def generation(self, block_id: int) -> int:
        """How many times this block was handed out for new content. Part of a ticket: an old number, other content."""
        return self._generation[block_id]

    def num_owners(self, block_id: int) -> int:
        return self._num_owners[block_id]

    def count_idle(self, block_ids: Sequence[int]) -> int:
        """How many of these would leave `num_available` if they were shared."""
        return sum(self._state[block_id] is BlockState.CACHED for block_id in block_ids)

    def allocate(self, num: int) -> list[int]:
        """Hand out blocks for new content: USED, one owner, next generation. Evicts when no free one is left."""
        assert num <= self.num_available, f"{num} blocks asked for, {self.num_available} available"
        return [self._take() for _ in range(num)]

    def share(self, block_ids: Sequence[int]) -> None:
        """One more owner for blocks with known content (USED or CACHED), found with `PrefixCache.match`."""
        for block_id in block_ids:
            if self._state[block_id] is BlockState.CACHED:
                self.cache.mark_busy(block_id)
                self._move(block_id, BlockState.USED)
            assert self._state[block_id] is BlockState.USED, self._say(block_id)
            self._num_owners[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One owner less for each block, USED or INCOMING. The only way in which an owner gives blocks back."""
        idle: list[int] = []
        for block_id in block_ids:
            assert self._num_owners[block_id] > 0, self._say(block_id)
            self._num_owners[block_id] -= 1
            if self._num_owners[block_id] == 0:
                if block_id in self.cache:
                    self._move(block_id, BlockState.CACHED)
                    idle.append(block_id)
                else:
                    self._give_back(block_id)
        self.cache.mark_idle(idle)

    def expect(self, block_ids: Sequence[int]) -> None:
        """USED -> INCOMING: somebody else is about to fill these blocks of one owner."""
        for block_id in block_ids:
            assert self._state[block_id] is BlockState.USED, self._say(block_id)
            assert self._num_owners[block_id] == 1, self._say(block_id)
            assert block_id not in self.cache, self._say(block_id)
            self._move(block_id, BlockState.INCOMING)

    def arrived(self, block_ids: Sequence[int]) -> None:
        """INCOMING -> USED: nobody else writes into these blocks any more."""
        for block_id in block_ids:
            assert self._state[block_id] is BlockState.INCOMING, self._say(block_id)
            self._move(block_id, BlockState.USED)

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """INCOMING -> QUARANTINED: the owner gives up blocks that somebody may still write into."""
        for block_id in block_ids:
            assert self._state[block_id] is BlockState.INCOMING, self._say(block_id)
            self._num_owners[block_id] = 0
            self._move(block_id, BlockState.QUARANTINED)

    def end_quarantine(self, block_ids: Sequence[int]) -> None:
        """QUARANTINED -> FREE: the late writer is done or gone."""
        for block_id in block_ids:
            assert self._state[block_id] is BlockState.QUARANTINED, self._say(block_id)
            self._give_back(block_id)

    def counts(self) -> BlockCounts:
        free, cached, used, incoming, quarantined = self._num
        return BlockCounts(
            total=self.num_blocks, free=free, cached=cached, used=used, incoming=incoming, quarantined=quarantined
        )

    def check(self) -> None:
        """Raises AssertionError, with what differs, unless all books agree. O(num_blocks): tests, and when idle."""
        by_state = [0] * len(BlockState)
        for block_id, state in enumerate(self._state):
            by_state[state] += 1
            has_owner = state in (BlockState.USED, BlockState.INCOMING)
            assert (self._num_owners[block_id] > 0) == has_owner, self._say(block_id)
            assert (block_id in self.cache) <= (state in (BlockState.USED, BlockState.CACHED)), self._say(block_id)
        assert by_state == self._num, f"blocks by state are {by_state}, counted as {self._num}"
        assert sum(by_state) == self.num_blocks, f"{sum(by_state)} blocks of {self.num_blocks}"
        assert len(set(self._free)) == len(self._free) == by_state[BlockState.FREE], "the free list is off"
        assert all(self._state[block_id] is BlockState.FREE for block_id in self._free), "the free list holds others"
        assert self.cache.num_idle == by_state[BlockState.CACHED], "the prefix cache counts other idle blocks"
        self.cache.check()

    def _take(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id = self.cache.evict()
            assert self._state[block_id] is BlockState.CACHED, self._say(block_id)
        self._move(block_id, BlockState.USED)
        self._num_owners[block_id] = 1
        self._generation[block_id] += 1
        return block_id

    def _give_back(self, block_id: int) -> None:
        self._move(block_id, BlockState.FREE)
        self._free.append(block_id)

    def _move(self, block_id: int, state: BlockState) -> None:
        self._num[self._state[block_id]] -= 1
        self._num[state] += 1
        self._state[block_id] = state

    def _say(self, block_id: int) -> str:
        state, owners = self._state[block_id].name, self._num_owners[block_id]
        return f"block {block_id} is {state} with {owners} owners, named: {block_id in self.cache}"
