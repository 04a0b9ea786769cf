"""What is missing from the pool may come from lower tiers or a peer: who waits for it, and who may share it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import pytest
from engine_play import IN_ORDER

from tandem.workers.batch import BatchItem
from tandem.workers.engine import Engine
from tandem.workers.fake_runner import FakeRunner, expected_tokens
from tandem.workers.sequence import Sequence, Status
from tandem.workers.types import CachedTokens, Request

MakeEngine = Callable[..., Engine]
MakeRequest = Callable[..., Request]


class Holds:
    """Tiers that hold so many blocks, whatever is asked for."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def num_held(self, keys: SequenceOf[bytes]) -> int:
        return min(len(keys), self.num_blocks)


def fill(engine: Engine, sequence: Sequence, end: int) -> None:
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    start = sequence.num_computed
    runner._write(BatchItem(sequence.token_ids[start:end], start, sequence.block_ids, None))


def finish(engine: Engine) -> int:
    """Step to the end; how many tokens were computed."""
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    before = len(runner.batches)
    for _ in range(200):
        if engine.is_idle:
            break
        engine.step()
        engine.check()
    assert engine.is_idle
    return sum(batch.num_tokens for batch in runner.batches[before:])


def test_nothing_to_fetch_changes_nothing(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50)
    [sequence] = engine.add(make_request("r", range(30)))
    engine.step()
    assert sequence.status is Status.RUNNING
    assert (sequence.num_pool_blocks, sequence.num_tier_blocks, sequence.num_source_blocks) == (0, 0, 0)


@pytest.mark.parametrize("hold", [False, True])
def test_tiers_then_peer_then_the_rest_is_computed(
    make_engine: MakeEngine, make_request: MakeRequest, hold: bool
) -> None:
    engine = make_engine(50)
    engine.add(make_request("before", range(9), max_tokens=1))
    finish(engine)  # two blocks are here
    engine.scheduler.admission.tiers = Holds(2)
    [sequence] = engine.add(make_request("r", range(30)), hold=hold, num_source_blocks=6)
    assert engine.step() == []
    assert sequence.status is Status.INCOMING
    assert (sequence.num_pool_blocks, sequence.num_tier_blocks, sequence.num_source_blocks) == (2, 2, 6)
    fill(engine, sequence, 24)
    engine.blocks_arrived(sequence, 12, "host")
    engine.blocks_arrived(sequence, 16, "disk")
    engine.check()
    assert engine.counts().incoming == 4
    engine.blocks_arrived(sequence, 24, "peer")
    engine.check()
    assert sequence.cached == CachedTokens(pool=8, host=4, disk=4, peer=8)
    engine.fill_ended(sequence, sequence.num_computed)
    engine.step()
    assert sequence.token_ids[30] == expected_tokens(range(30), 1, seed=0)[0]
    engine.release(sequence)
    finish(engine)


def test_arrived_blocks_are_shared_while_the_rest_is_awaited(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(50)
    [waits] = engine.add(make_request("waits", range(30)), num_source_blocks=6)
    engine.step()
    fill(engine, waits, 12)
    engine.blocks_arrived(waits, 12, "peer")
    [other] = engine.add(make_request("other", range(20)))
    engine.step()
    assert other.block_ids[:3] == waits.block_ids[:3]
    assert other.cached == CachedTokens(pool=12)
    assert engine.cancel("waits") == [waits]
    engine.blocks_arrived(waits, 24, "peer")  # too late
    engine.check()
    engine.release_incoming(waits)
    finish(engine)
    assert other.token_ids[20:] == expected_tokens(range(20), 8, seed=0)


def test_two_who_fetch_the_same_end_with_one_copy(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50)
    one, two = (engine.add(make_request(str(i), range(30)), num_source_blocks=6)[0] for i in range(2))
    engine.step()
    for sequence in (one, two):
        fill(engine, sequence, 24)
        engine.blocks_arrived(sequence, 24, "peer")
        engine.check()
    assert one.block_ids[:6] == two.block_ids[:6]
    for sequence in (one, two):
        engine.fill_ended(sequence, 24)
    finish(engine)


def test_what_is_slower_than_computing_is_not_fetched(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50)
    engine.scheduler.admission.tiers = Holds(3)
    asked: list[int] = []

    def is_fill_faster(sequence: Sequence) -> bool:
        asked.append(sequence.num_tier_blocks)
        return False

    engine.scheduler.admission.is_fill_faster = is_fill_faster
    [sequence] = engine.add(make_request("r", range(30)))
    finish(engine)
    assert (asked, sequence.cached.total) == ([3], 0)


@pytest.mark.parametrize(("num_held", "wants_remote"), [(2, True), (6, False)])
def test_a_handover_follows_only_when_much_is_left(
    make_engine: MakeEngine, make_request: MakeRequest, num_held: int, wants_remote: bool
) -> None:
    engine = make_engine(50, local_prefill_tokens=8)
    engine.scheduler.admission.tiers = Holds(num_held)
    [sequence] = engine.add(make_request("r", range(30)), wants_remote=True)
    engine.step()
    assert (sequence.status, sequence.wants_remote) == (Status.INCOMING, wants_remote)


def test_a_source_is_believed_up_to_the_last_token(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50)
    [sequence] = engine.add(make_request("r", range(32)), num_source_blocks=100)
    engine.step()
    assert sequence.num_source_blocks == 7, "the last token is computed here"


def test_evicted_blocks_are_told_while_their_content_is_there(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(4)
    evicted: list[tuple[bytes, bytes | None, tuple[int, ...], int, int]] = []
    engine.cache.on_evict = lambda *block: evicted.append(block)
    [first] = engine.add(make_request("a", range(8), max_tokens=1))
    engine.step()
    keys, blocks = list(first.block_keys), [0, 1]
    engine.add(make_request("b", range(50, 62), max_tokens=1))
    engine.step()
    assert evicted == [(keys[1], keys[0], (4, 5, 6, 7), blocks[1], 35)]


def test_a_source_that_holds_no_more_than_the_pool_is_not_asked(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(50)
    engine.add(make_request("before", range(13), max_tokens=1))
    finish(engine)
    [sequence] = engine.add(make_request("r", range(30)), num_source_blocks=3)
    engine.step()
    assert sequence.status is Status.RUNNING


def test_who_is_sent_back_asks_its_source_no_more(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(10)
    [sequence] = engine.add(make_request("r", range(30)), num_source_blocks=6)
    engine.step()
    late = sequence.block_ids[:3]
    assert not engine.quarantine(sequence, late)
    engine.end_quarantine(late)
    engine.step()
    assert (sequence.status, sequence.num_source_blocks) == (Status.RUNNING, 0)
    finish(engine)


@IN_ORDER
def test_what_it_finds_of_itself_when_it_comes_back_is_not_cached(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(50)
    engine.add(make_request("before", range(9), max_tokens=1))
    finish(engine)
    [sequence] = engine.add(make_request("r", range(30)))
    engine.step()
    assert (sequence.cached, sequence.num_computed) == (CachedTokens(pool=8), 24)
    engine.scheduler._preempt(sequence)
    engine.scheduler.admission.tiers = Holds(1)
    engine.step()
    assert sequence.status is Status.INCOMING
    fill(engine, sequence, 28)
    engine.blocks_arrived(sequence, 28, "host")
    assert sequence.cached == CachedTokens(pool=8)
    engine.fill_ended(sequence, 28)
    engine.step()
    assert len(sequence.token_ids) == 31
    engine.scheduler.admission.tiers = Holds(0)
    engine.scheduler._preempt(sequence)
    engine.pool.release(engine.pool.allocate(50))  # what it had is gone
    engine.step()
    assert sequence.num_pool_blocks == 0
    assert sequence.cached == CachedTokens(pool=8), "this was told with the first token"
