"""The record that says where a prompt's KV was found."""

from __future__ import annotations

import pytest

from tandem.workers.types import CachedTokens


def test_sources_add_up() -> None:
    cached = CachedTokens(pool=3).plus("host", 4).plus("disk", 5).plus("peer", 6).plus("host", 1)
    assert cached == CachedTokens(pool=3, host=5, disk=5, peer=6)
    assert cached.total == 19


@pytest.mark.parametrize("limit", range(21))
def test_what_comes_first_in_the_prompt_counts_first(limit: int) -> None:
    cached = CachedTokens(pool=3, host=5, disk=5, peer=6).at_most(limit)
    order = [cached.pool, cached.host, cached.disk, cached.peer]
    assert cached.total == min(limit, 19)
    assert all(later == 0 or earlier == full for earlier, later, full in zip(order, order[1:], [3, 5, 5]))
