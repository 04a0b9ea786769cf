"""The tree of named blocks, alone: matching, collisions, order of eviction, events."""

from __future__ import annotations

import pytest

from tandem.workers.prefix_cache import PrefixCache

SIZE = 4


def chain(cache: PrefixCache, text: str, first_block: int) -> list[int]:
    """Name the blocks `first_block`, ... with the letters of `text`, one block each; returns the blocks kept."""
    kept: list[int] = []
    for index in range(len(text)):
        block = cache.add(key(text[: index + 1]), kept[-1] if kept else None, tokens(text[index]), first_block + index)
        assert block is not None
        kept.append(block)
    return kept


def key(text: str) -> bytes:
    return text.encode()


def keys(text: str) -> list[bytes]:
    return [key(text[: end + 1]) for end in range(len(text))]


def tokens(text: str) -> list[int]:
    return [ord(letter) for letter in text for _ in range(SIZE)]


@pytest.fixture
def events() -> list[tuple[str, bytes]]:
    return []


@pytest.fixture
def cache(events: list[tuple[str, bytes]]) -> PrefixCache:
    return PrefixCache(SIZE, lambda kind, key: events.append((kind, key)))


def test_match_finds_the_longest_prefix(cache: PrefixCache) -> None:
    chain(cache, "abc", 10)
    assert cache.match(keys("abcd"), tokens("abcd")) == [10, 11, 12]
    assert cache.match(keys("abx"), tokens("abx")) == [10, 11]
    assert cache.match(keys("bc"), tokens("bc")) == []
    assert cache.match([], tokens("abc")) == []


def test_match_compares_token_ids_and_not_only_keys(cache: PrefixCache) -> None:
    chain(cache, "abc", 10)
    assert cache.match(keys("abc"), tokens("axc")) == [10]


def test_match_refuses_a_block_that_hangs_elsewhere(cache: PrefixCache) -> None:
    """A colliding key could name a block with the right tokens behind the wrong ones."""
    chain(cache, "ab", 10)
    assert cache.match([key("x"), key("ab")], tokens("xb")) == []
    cache.add(key("x"), None, tokens("x"), 20)
    assert cache.match([key("x"), key("ab")], tokens("xb")) == [20]


def test_same_content_is_kept_once(cache: PrefixCache, events: list[tuple[str, bytes]]) -> None:
    chain(cache, "ab", 10)
    assert chain(cache, "abc", 20) == [10, 11, 22]
    assert [kind for kind, _ in events] == ["stored"] * 3
    cache.check()


def test_collision_names_nothing(cache: PrefixCache, events: list[tuple[str, bytes]]) -> None:
    chain(cache, "a", 10)
    assert cache.add(key("a"), None, tokens("b"), 20) is None
    assert 20 not in cache
    assert events == [("stored", b"a")]


def test_least_recently_used_leaf_goes_first(cache: PrefixCache, events: list[tuple[str, bytes]]) -> None:
    chain(cache, "abc", 10)
    chain(cache, "abd", 20)  # shares 10 and 11, adds 22
    cache.mark_idle([12])
    cache.mark_idle([10, 11, 22])
    events.clear()
    assert [cache.evict() for _ in range(4)] == [12, 22, 11, 10]
    assert events == [("removed", b"abc"), ("removed", b"abd"), ("removed", b"ab"), ("removed", b"a")]
    assert len(cache) == 0


def test_parent_keeps_its_own_time_when_it_becomes_a_leaf(cache: PrefixCache) -> None:
    """Were it filed as just used, "c", used long after it, would go first."""
    chain(cache, "ab", 10)
    chain(cache, "c", 20)
    cache.mark_idle([10, 11])
    cache.mark_idle([20])
    assert [cache.evict() for _ in range(3)] == [11, 10, 20]


def test_used_again_counts_from_its_last_release(cache: PrefixCache) -> None:
    chain(cache, "a", 10)
    chain(cache, "b", 20)
    cache.mark_idle([10])
    cache.mark_idle([20])
    cache.mark_busy(10)
    cache.mark_idle([10])
    cache.check()
    assert [cache.evict() for _ in range(2)] == [20, 10]


def test_heap_of_leaves_does_not_grow_without_bound(cache: PrefixCache) -> None:
    chain(cache, "a", 10)
    for _ in range(1000):
        cache.mark_idle([10])
        cache.mark_busy(10)
    cache.mark_idle([10])
    assert len(cache._leaves) < 100
    cache.check()
    assert cache.evict() == 10
