"""The pool alone: who owns a block, and what is caught. (Everything else: test_pool_twin.py.)"""

from __future__ import annotations

import pytest

from tandem.workers.block_pool import BlockPool, BlockState
from tandem.workers.prefix_cache import PrefixCache


def test_shared_block_stays_until_its_last_owner_goes() -> None:
    cache = PrefixCache(1)
    pool = BlockPool(2, cache)
    [block] = pool.allocate(1)
    cache.add(b"a", None, [1], block)
    pool.share([block])
    pool.release([block])
    assert pool.state(block) is BlockState.USED
    pool.release([block])
    assert pool.state(block) is BlockState.CACHED
    assert pool.generation(block) == 1, "being shared is not new content"


def test_double_release_and_other_misuse_are_caught() -> None:
    pool = BlockPool(2, PrefixCache(1))
    [block] = pool.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks asked for, 1 available"):
        pool.allocate(2)
    with pytest.raises(AssertionError, match=f"block {block} is USED with 1 owners"):
        pool.arrived([block])
    pool.release([block])
    with pytest.raises(AssertionError, match=f"block {block} is FREE with 0 owners"):
        pool.release([block])
    with pytest.raises(AssertionError, match="is FREE"):
        pool.share([block])


def test_check_sees_a_lost_block() -> None:
    pool = BlockPool(3, PrefixCache(1))
    pool.allocate(1)
    pool._free.pop()
    with pytest.raises(AssertionError, match="free list"):
        pool.check()
