"""The tree of named blocks, alone: matching, collisions, order of eviction, events."""

from __future__ import annotations

import itertools
import random

import pytest

from tandem.workers import prefix_cache
from tandem.workers.prefix_cache import PrefixCache
from tandem.workers.types import Retention

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


def test_heaps_do_not_grow_without_bound(cache: PrefixCache) -> None:
    """And dropping what is stale keeps what is not, in order."""
    kept = Retention(priority=50, duration_s=9.0)
    for index, letter in enumerate("abcdefgh"):
        cache.add(key(letter), None, tokens(letter), 10 + index, retention=kept)
    cache.mark_idle(list(range(10, 17)))
    for _ in range(1000):
        cache.mark_idle([17])
        cache.mark_busy(17)
    cache.mark_idle([17])
    assert len(cache._leaves) < 100
    assert len(cache._ends) < 100
    cache.check()
    assert [cache.evict() for _ in range(8)] == list(range(10, 18))


# Inside a block


def test_the_child_that_begins_with_most_is_found(cache: PrefixCache) -> None:
    cache.add(b"root", None, [9, 9, 9, 9], 0)
    texts = [[1, 2, 3, 4], [1, 2, 4, 4], [1, 3, 3, 3], [2, 2, 2, 2]]
    for index, text in enumerate(texts):
        cache.add(bytes(text), 0, text, 1 + index)
    assert cache.match_inside(0, b"", [1, 2, 3, 9]) == (1, 3)
    assert cache.match_inside(0, b"", [1, 2, 4]) == (2, 3)
    assert cache.match_inside(0, b"", [1, 3, 0, 0]) == (3, 2)
    assert cache.match_inside(0, b"", [2, 9, 9, 9]) == (4, 1)
    assert cache.match_inside(0, b"", [3, 2, 3, 4]) is None
    assert cache.match_inside(0, b"", []) is None
    assert cache.match_inside(1, b"", [1, 2, 3]) is None, "no children"


def test_first_blocks_are_found_under_their_own_root(cache: PrefixCache) -> None:
    cache.add(b"red", None, [1, 2, 3, 4], 1, root=b"red")
    assert cache.match_inside(None, b"red", [1, 2, 9]) == (1, 2)
    assert cache.match_inside(None, b"blue", [1, 2, 9]) is None
    cache.mark_idle([1])
    cache.evict()
    assert cache.match_inside(None, b"red", [1, 2, 9]) is None


def test_one_child_of_many_is_found_with_few_comparisons(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    texts = {tuple(rng.choices(range(12), k=SIZE)) for _ in range(5000)}
    for block, text in enumerate(sorted(texts, key=lambda _: rng.random())):
        cache.add(bytes(text), None, text, block)
    cache.check()
    num_looked_at = 0

    def count(node: prefix_cache.Node) -> tuple[int, ...]:
        nonlocal num_looked_at
        num_looked_at += 1
        return node.token_ids

    monkeypatch.setattr(prefix_cache, "_token_ids", count)
    for _ in range(200):
        wanted = rng.choices(range(12), k=rng.randrange(1, SIZE + 1))
        best = max(sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(t, wanted))) for t in texts)
        found = cache.match_inside(None, b"", wanted)
        assert found is not None
        assert found[1] == best
    assert num_looked_at < 200 * 14


def test_colliding_children_can_be_told_apart(cache: PrefixCache) -> None:
    for block in (10, 11):
        cache.add(key(str(block)), None, tokens("a"), block)
    cache.mark_idle([11])
    assert cache.evict() == 11
    cache.check()
    assert 10 in cache
