"""Forks of beams over a real pool: who owns what afterwards, and what is copied."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tandem.workers.batch import BlockCopy
from tandem.workers.beams import Fork
from tandem.workers.block_pool import BlockPool
from tandem.workers.fork import fork
from tandem.workers.prefix_cache import PrefixCache
from tandem.workers.sequence import Sequence
from tandem.workers.types import SamplingParams

BLOCK_SIZE = 4
PARAMS = SamplingParams(max_tokens=9, seed=0)


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, PrefixCache(BLOCK_SIZE))


def make_beams(pool: BlockPool, num_tokens: int, count: int, num_live: int) -> list[Sequence]:
    """Beams whose tokens are all computed, each with blocks of its own; those from `num_live` on have none."""
    beams = []
    for index in range(count):
        tokens = [100 * index + place for place in range(num_tokens)]
        beam = Sequence("r", index, tokens, num_tokens, PARAMS, b"root", index)
        if index < num_live:
            beam.block_ids = pool.allocate(-(-num_tokens // BLOCK_SIZE))
            beam.num_computed = num_tokens
        beams.append(beam)
    return beams


def check(pool: BlockPool, beams: list[Sequence]) -> None:
    pool.check()
    owners = Counter(block_id for beam in beams for block_id in beam.block_ids)
    owners.update(beam.copy.source for beam in beams if beam.copy is not None)
    for block_id in range(pool.num_blocks):
        assert pool.num_owners(block_id) == owners[block_id]


def test_the_first_child_inherits_and_the_others_share_and_copy() -> None:
    pool = make_pool(20)
    beams = make_beams(pool, 6, 4, 4)
    before = [list(beam.block_ids) for beam in beams]
    fork(pool, BLOCK_SIZE, beams, [Fork(2, 7), Fork(0, 8), Fork(2, 9), Fork(2, 10)], room=4)
    assert [beam.token_ids[-1] for beam in beams] == [7, 8, 9, 10]
    assert [beam.token_ids[0] for beam in beams] == [200, 0, 200, 200]
    assert (beams[0].block_ids, beams[1].block_ids) == (before[2], before[0])
    for beam in beams[2:]:
        assert beam.block_ids[0] == before[2][0]
        assert beam.copy == BlockCopy(before[2][1], beam.block_ids[1], 2)
        assert beam.num_computed == 6
    assert pool.counts().used == 2 * 2 + 2
    check(pool, beams)


def test_full_blocks_need_no_copy() -> None:
    pool = make_pool(4)
    beams = make_beams(pool, 8, 2, 1)
    fork(pool, BLOCK_SIZE, beams, [Fork(0, 1), Fork(0, 2)], room=2)
    assert beams[0].block_ids == beams[1].block_ids
    assert beams[0].block_ids is not beams[1].block_ids
    assert beams[1].copy is None
    check(pool, beams)


@pytest.mark.parametrize(("num_blocks", "room"), [(4, 3), (20, 2)])
def test_who_finds_no_block_or_no_room_waits_with_its_tokens(num_blocks: int, room: int) -> None:
    pool = make_pool(num_blocks)
    beams = make_beams(pool, 6, 3, 2)
    fork(pool, BLOCK_SIZE, beams, [Fork(0, 1), Fork(0, 2), Fork(1, 3)], room=room)
    waiting = [beam for beam in beams if not beam.block_ids]
    assert len(waiting) == 1
    assert (waiting[0].num_computed, waiting[0].num_registered, waiting[0].copy) == (0, 0, None)
    assert len(waiting[0].token_ids) == 7
    check(pool, beams)


def test_children_of_who_lost_its_blocks_wait_and_surplus_beams_give_theirs_back() -> None:
    pool = make_pool(20)
    beams = make_beams(pool, 6, 3, 3)
    pool.release(beams[1].block_ids)
    beams[1].block_ids, beams[1].num_computed = [], 0
    fork(pool, BLOCK_SIZE, beams, [Fork(1, 1), Fork(1, 2)], room=3)
    assert [beam.block_ids for beam in beams] == [[], [], []]
    assert pool.counts().used == 0
    check(pool, beams)


def test_random_forks_leave_every_block_with_its_owners() -> None:
    rng = random.Random(3)
    for _ in range(300):
        pool = make_pool(rng.randint(12, 30))
        count = rng.randint(1, 5)
        beams = make_beams(pool, rng.randint(1, 9), count, rng.randint(1, min(count, 4)))
        live = [index for index, beam in enumerate(beams) if beam.block_ids]
        forks = [Fork(rng.choice(live), token_id) for token_id in range(rng.randint(0, count))]
        room = rng.randint(0, count)
        fork(pool, BLOCK_SIZE, beams, forks, room)
        check(pool, beams)
        assert sum(bool(beam.block_ids) for beam in beams) <= room
