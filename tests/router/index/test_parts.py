"""Parts of the prefix index that need no server."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from redis.exceptions import RedisError

from tandem.router.index.client import Breaker
from tandem.router.index.reader import Answer, parse_answer
from tandem.router.index.routes import RecentRoutes, noted_positions


def test_breaker_backs_off_and_forgets() -> None:
    now = 0.0
    breaker = Breaker(clock=lambda: now)
    pauses = []
    for _ in range(10):
        breaker.fail()
        breaker.fail()  # the same outage, seen twice
        pauses.append(breaker.remaining_s)
        now += breaker.remaining_s
    assert pauses[0] <= 0.125
    assert pauses[3] > 0.5
    assert max(pauses) <= 12.5
    breaker.succeed()
    assert breaker.can_try
    assert breaker.is_up


@pytest.mark.parametrize("num_blocks", [*range(1, 200), 3125, 4000])
def test_positions_are_few_and_close(num_blocks: int) -> None:
    positions = noted_positions(num_blocks)
    assert positions[0] == 1
    assert positions[-1] == num_blocks
    assert all(low < high <= max(low + 1, low * 33 / 32) for low, high in itertools.pairwise(positions))
    assert len(positions) <= 260


def test_two_prompts_share_the_positions_that_they_both_have() -> None:
    assert set(noted_positions(900)[:-1]) <= set(noted_positions(3125))


def keys_of(seed: int, count: int) -> list[bytes]:
    return [random.Random(f"{seed} {number}").randbytes(16) for number in range(count)]


def test_recent_routes_against_a_list_of_all_of_them() -> None:
    rng = random.Random(5)
    routes = RecentRoutes()
    stems = [keys_of(seed, 40) for seed in range(4)]
    told: list[tuple[list[bytes], bytes, float]] = []
    for now in range(200):
        keys = rng.choice(stems)[: rng.randint(1, 40)] + keys_of(1000 + now, rng.randint(0, 5))
        owner = bytes([rng.randint(0, 5)]) * 4
        routes.note(keys, [owner], float(now))
        told.append((keys, owner, float(now)))
        asked = rng.choice(told)[0][:30] + keys_of(5000 + now, 3)
        owners = {bytes([number]) * 4: None for number in range(4)}
        known = set(rng.sample(sorted(owners), 2))
        expected: dict[bytes, int] = {}
        for keys, owner, when in told:
            shared = sum(1 for _ in iter_common(keys, asked))
            if shared and owner in owners and when >= now - (10 if owner in known else 50):
                expected[owner] = max(shared, expected.get(owner, 0))
        found = routes.longest_prefix(asked, owners, since=now - 50, known=known, known_since=now - 10)
        assert found == expected


def iter_common(one: list[bytes], other: list[bytes]) -> Any:
    for left, right in zip(one, other):
        if left != right:
            return
        yield left


def test_recent_routes_are_bounded_and_forget_ends_of_old_prompts_first() -> None:
    routes = RecentRoutes(max_notes=100)
    prompts = [keys_of(seed, 30) for seed in range(5)]
    for number, keys in enumerate(prompts):
        routes.note(keys, [b"wwww"], float(number))
        assert len(routes) <= 100

    def length(keys: list[bytes]) -> int | None:
        found = routes.longest_prefix(keys, {b"wwww": None}, since=0.0, known=set(), known_since=0.0)
        return found.get(b"wwww")

    assert [length(keys) for keys in prompts] == [None, 10, 30, 30, 30]


def test_answers_are_parsed_and_checked() -> None:
    ids = {b"aaaa": "a", b"bbbb": "b"}
    good = [b"era", 0, 3, b"aaaa\1bbbb\1cccc\1", 9, b"bbbb\2"]
    assert parse_answer(good, ids, 9) == Answer(b"era", False, {"a": 3, "b": 9})
    assert parse_answer([b"era", 2], ids, 9) == Answer(b"era", True, {})
    assert parse_answer([b"era", 0, 3, b"torn"], ids, 9) == Answer(b"era", False, {})
    for bad in (
        b"x",
        [],
        [b"era"],
        [b"era", 0, 3],
        [b"", 0, 10, b""],
        [b"", 0, 0, b""],
        [b"", 0, b"3", b""],
        [b"", 0, 3, 3],
    ):
        with pytest.raises(RedisError):
            parse_answer(bad, ids, 9)
