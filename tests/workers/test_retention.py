"""What requests ask for their blocks, as time goes by: alone, then as the order in which an engine gives blocks up."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from engine_play import MakeEngine, MakeRequest, run

from tandem.workers import retention
from tandem.workers.block_pool import BlockPool
from tandem.workers.engine import Engine
from tandem.workers.errors import RequestError
from tandem.workers.prefix_cache import MAX_ENDS_PER_EVICTION, PrefixCache
from tandem.workers.retention import DEFAULT, Grant, Grants
from tandem.workers.types import Request, Retention

GRANTS = [
    retention.grant(Retention(priority=priority, duration_s=duration))
    for priority, duration in itertools.product([0, 20, 35, 50, 100], [1.0, 5.0, None])
]


def test_default_is_default_however_it_is_asked_for() -> None:
    assert retention.grant(Retention()) is DEFAULT
    assert retention.grant(Retention(priority=35, duration_s=3.0)) is DEFAULT


@pytest.mark.parametrize(("priority", "before", "after"), [(80, 80, 35), (0, 0, 35)])
def test_a_grant_falls_back_when_it_ends(priority: int, before: int, after: int) -> None:
    grants = (Grant(priority, 10.0),)
    assert retention.priority(grants, 5.0, 14.9) == before
    assert retention.priority(grants, 5.0, 15.0) == after
    assert retention.next_end(grants, 5.0, 14.9) == 15.0
    assert retention.next_end(grants, 5.0, 15.0) is None


def test_use_starts_a_grant_anew_unless_it_has_ended() -> None:
    grants = (Grant(80, 10.0),)
    assert retention.used(grants, 0.0, 9.0) is grants
    assert retention.used(grants, 0.0, 10.0) == (DEFAULT,)


def test_covering_is_never_being_lower() -> None:
    times = [0.0, 0.5, 1.0, 3.0, 5.0, 9.0]
    for one, other in itertools.product(GRANTS, GRANTS):
        is_never_lower = all(one.at(0.0, now) >= other.at(0.0, now) for now in times)
        assert one.covers(other) == is_never_lower, (one, other)


def test_only_grants_that_matter_are_kept() -> None:
    grants: Grants = (Grant(20, 5.0),)
    grants = retention.joined(grants, Grant(80, 1.0))
    assert grants == (Grant(80, 1.0),)
    assert retention.joined(grants, DEFAULT) is grants
    grants = retention.joined(grants, Grant(50, 5.0))
    assert set(grants) == {Grant(80, 1.0), Grant(50, 5.0)}
    assert [retention.priority(grants, 0.0, now) for now in (0.0, 1.0, 5.0)] == [80, 50, 35]
    assert retention.joined(grants, Grant(100, 9.0)) == (Grant(100, 9.0),)


# In an engine of ten blocks


@pytest.fixture
def times() -> list[float]:
    """The last is now."""
    return [0.0]


@pytest.fixture
def engine(make_engine: MakeEngine, times: list[float]) -> Engine:
    engine = make_engine(10)
    engine.cache._clock = lambda: times[-1]
    return engine


@pytest.fixture
def is_cached(engine: Engine, make_request: MakeRequest) -> Callable[[int], int]:
    """How many blocks of the prompt that begins with this token are still there."""

    def count(start: int) -> int:
        [sequence] = engine.add(make_request("probe", range(start, start + 13), max_tokens=1))
        found = engine.scheduler.names.find(sequence)
        engine.cancel("probe")
        return len(found.block_ids)

    return count


def prompt(make_request: MakeRequest, start: int, priority: int = 35, duration_s: float | None = None) -> Request:
    asked = Retention(priority=priority, duration_s=duration_s)
    return make_request(str(start), range(start, start + 13), max_tokens=1, retention=asked)


def test_low_priorities_go_first(engine: Engine, make_request: MakeRequest, is_cached: Callable[[int], int]) -> None:
    for start, priority in [(100, 80), (200, 35), (300, 10)]:
        engine.add(prompt(make_request, start, priority))
        run(engine)
    assert [is_cached(start) for start in (100, 200, 300)] == [3, 3, 3]
    engine.add(prompt(make_request, 400))
    run(engine)
    assert [is_cached(start) for start in (100, 200, 300, 400)] == [3, 3, 0, 3]
    engine.add(prompt(make_request, 500))
    run(engine)
    assert [is_cached(start) for start in (100, 200, 300, 400, 500)] == [3, 0, 0, 3, 3]


@pytest.mark.parametrize(("is_used_again", "is_kept"), [(False, False), (True, True)])
def test_a_priority_ends_unless_the_prompt_is_used_again(
    engine: Engine,
    make_request: MakeRequest,
    is_cached: Callable[[int], int],
    times: list[float],
    is_used_again: bool,
    is_kept: bool,
) -> None:
    engine.add(prompt(make_request, 100, 80, 10.0))
    run(engine)
    times.append(6.0)
    if is_used_again:
        engine.add(prompt(make_request, 100))
        run(engine)
    for start in (200, 300):
        engine.add(prompt(make_request, start))
        run(engine)
    times.append(12.0)
    engine.add(prompt(make_request, 400))
    run(engine)
    assert is_cached(100) == (3 if is_kept else 0)


def test_whoever_finds_a_prompt_may_ask_to_keep_it(
    engine: Engine, make_request: MakeRequest, is_cached: Callable[[int], int]
) -> None:
    for priority in (35, 80):
        engine.add(prompt(make_request, 100, priority))
        run(engine)
    for start in (200, 300, 400, 500):
        engine.add(prompt(make_request, start))
        run(engine)
    assert is_cached(100) == 3


def test_only_the_prompt_is_kept_longer(engine: Engine, make_request: MakeRequest) -> None:
    evicted: list[tuple[tuple[int, ...], int]] = []
    engine.cache.on_evict = lambda key, parent, tokens, block, priority: evicted.append((tokens, priority))
    asked = Retention(priority=80)
    engine.add(make_request("r", range(9), max_tokens=8, retention=asked))
    answer = run(engine)["r", 0]
    engine.pool.allocate(10)
    everything = [*range(9), *answer]
    assert evicted[0] == (tuple(everything[12:16]), 35)
    assert evicted[1] == (tuple(everything[8:12]), 35), "one token of the prompt, three of the answer"
    assert [priority for _, priority in evicted[2:]] == [80, 80]


def test_what_is_an_answer_here_may_have_been_a_prompt(engine: Engine, make_request: MakeRequest) -> None:
    """Two blocks, of which the second one's first user would not have kept any."""
    engine.add(make_request("a", range(8), max_tokens=1, retention=Retention(priority=0)))
    run(engine)
    asked = Retention(priority=10)
    engine.add(make_request("b", range(4), max_tokens=6, emitted={0: [4, 5, 6, 7, 8]}, retention=asked))
    run(engine)
    priorities: list[int] = []
    engine.cache.on_evict = lambda key, parent, tokens, block, priority: priorities.append(priority)
    engine.pool.allocate(10)
    assert priorities == [35, 10]


def test_many_grants_that_end_at_once_cost_each_eviction_little() -> None:
    num_blocks, times = 1000, [0.0]
    cache = PrefixCache(4, clock=lambda: times[-1])
    pool = BlockPool(num_blocks, cache)
    for index, block in enumerate(pool.allocate(num_blocks)):
        asked = Retention(priority=80, duration_s=10.0 if index else None)
        cache.add(bytes([index >> 8, index & 255]), None, [index] * 4, block, retention=asked)
        pool.release([block])
    times.append(10.0)
    before = len(cache._ends)
    pool.allocate(1)
    assert before - len(cache._ends) == MAX_ENDS_PER_EVICTION
    pool.allocate(num_blocks - 2)
    cache.check()
    assert cache.keys() == [bytes(2)], "the one whose grant has no end"


def test_blocks_in_use_never_go(engine: Engine, make_request: MakeRequest) -> None:
    [held] = engine.add(prompt(make_request, 100, 0), hold=True)
    engine.step()
    before = list(held.block_ids)
    for start in range(200, 1000, 100):
        engine.add(prompt(make_request, start, 100))
        for _ in range(3):
            engine.step()
        engine.check()
    assert held.block_ids == before
    assert all(engine.pool.num_owners(block_id) == 1 for block_id in before)


@pytest.mark.parametrize("asked", [Retention(priority=101), Retention(priority=-1), Retention(duration_s=0.0)])
def test_what_no_block_can_be_kept_like_is_refused(engine: Engine, make_request: MakeRequest, asked: Retention) -> None:
    with pytest.raises(RequestError) as caught:
        engine.add(make_request("r", range(4), retention=asked))
    assert caught.value.param == "kv_retention"
