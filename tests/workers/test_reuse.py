"""A match that ends inside a block, choices that share a prompt: what is copied, pinned and computed."""

from __future__ import annotations

import pytest
from engine_play import IN_ORDER, MakeEngine, MakeRequest, run, runner_of, start_handover

from tandem.workers.batch import BlockCopy
from tandem.workers.block_pool import BlockState
from tandem.workers.engine import Engine
from tandem.workers.fake_runner import expected_tokens
from tandem.workers.sequence import Sequence, Status
from tandem.workers.types import CachedTokens, Request


def num_computed(engine: Engine) -> int:
    return sum(batch.num_tokens for batch in runner_of(engine).batches)


def admit(engine: Engine, request: Request) -> Sequence:
    """Queue it and run the step that admits it."""
    [sequence] = engine.add(request)
    engine.step()
    engine.check()
    return sequence


# Partial reuse


@pytest.mark.parametrize("num_shared", [1, 3, 4, 5, 11, 12, 18, 29])
def test_a_match_may_end_inside_a_block(make_engine: MakeEngine, make_request: MakeRequest, num_shared: int) -> None:
    engine = make_engine(50)
    engine.add(make_request("first", range(30), max_tokens=3))  # 32 tokens have KV in eight whole blocks
    run(engine)
    before = num_computed(engine)
    prompt = [*range(num_shared), *range(500, 520)]
    [sequence] = engine.add(make_request("second", prompt))
    assert run(engine)["second", 0] == expected_tokens(prompt, 8, seed=0)
    assert sequence.cached == CachedTokens(pool=num_shared)
    assert num_computed(engine) - before == 20 + 7


def test_the_last_token_is_always_computed(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50)
    for turn, num_cached in enumerate([0, 15, 15]):
        sequence = admit(engine, make_request(str(turn), range(16), max_tokens=1))
        assert sequence.cached.total == num_cached
    assert len(engine.cache) == 4
    assert engine.counts().free == 46


def test_tenants_share_no_part_of_a_block(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50)
    for salt in ("red", "blue"):
        sequence = admit(engine, make_request(salt, range(4), salt=salt, max_tokens=1))
        assert sequence.cached.total == 0
    again = admit(engine, make_request("again", [0, 1, 9], salt="blue", max_tokens=1))
    assert again.cached.total == 2


def test_a_chunk_goes_on_from_inside_a_block_to_a_border(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50, max_num_batched_tokens=8)
    admit(engine, make_request("first", range(8), max_tokens=1))
    sequence = admit(engine, make_request("second", [*range(6), *range(100, 120)]))
    assert sequence.num_computed == 12, "six are copied; of a budget of eight, six reach a border"
    assert run(engine)["second", 0] == expected_tokens([*range(6), *range(100, 120)], 8, seed=0)


def test_the_source_stays_pinned_until_the_step_is_applied(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(6)
    admit(engine, make_request("first", range(4), max_tokens=1))
    [sequence] = engine.add(make_request("second", [0, 1, 2, *range(50, 60)]))
    step = engine.schedule()
    assert step is not None
    [copy] = step.batch.copies
    assert copy == BlockCopy(copy.source, sequence.block_ids[0], 3)
    assert engine.pool.state(copy.source) is BlockState.USED
    engine.check()
    engine.cancel("second")
    assert engine.pool.state(copy.source) is BlockState.USED, "the step in flight still reads it"
    engine.apply(step, runner_of(engine).execute(step.batch))
    engine.check()
    assert engine.pool.state(copy.source) is BlockState.CACHED
    assert engine.counts().free == 5


def test_a_copy_waits_with_its_sequence_for_room_in_a_step(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50, max_num_batched_tokens=8, local_prefill_tokens=8)
    admit(engine, make_request("first", range(8), max_tokens=1))
    engine.add(make_request("long", range(100, 120)))
    [waits] = engine.add(make_request("short", [*range(7), 99]), wants_remote=True)  # needs no budget to be admitted
    step = engine.schedule()
    assert step is not None
    assert (waits.status, waits.num_computed, step.batch.copies) == (Status.RUNNING, 7, ())
    engine.apply(step, runner_of(engine).execute(step.batch))
    engine.check()
    step = engine.schedule()
    assert step is not None
    assert [copy.num_tokens for copy in step.batch.copies] == [3]
    engine.apply(step, runner_of(engine).execute(step.batch))
    assert waits.token_ids[8:] == expected_tokens([*range(7), 99], 1, seed=0)
    run(engine)


@IN_ORDER
@pytest.mark.parametrize("fate", ["cancelled", "preempted"])
def test_a_copy_that_is_never_made_pins_nothing(make_engine: MakeEngine, make_request: MakeRequest, fate: str) -> None:
    engine = make_engine(50, max_num_batched_tokens=8, local_prefill_tokens=8)
    admit(engine, make_request("first", range(8), max_tokens=1))
    engine.add(make_request("long", range(100, 120)))
    [waits] = engine.add(make_request("short", [*range(7), 99]), wants_remote=True)
    engine.step()
    assert waits.copy is not None
    if fate == "cancelled":
        engine.cancel("short")
    else:
        engine.scheduler._preempt(waits)
    engine.check()
    assert engine.counts().used == 5, "those of the long one"
    run(engine)


def test_the_source_makes_way_when_the_pool_is_just_large_enough(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(4)
    admit(engine, make_request("first", range(4), max_tokens=1))
    prompt = [0, 1, 2, *range(50, 62)]  # with what follows: all four blocks
    [sequence] = engine.add(make_request("second", prompt, max_tokens=2))
    assert run(engine)["second", 0] == expected_tokens(prompt, 2, seed=0)
    assert sequence.cached.total == 0


def test_a_failed_step_leaves_the_source_as_it_was(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(10)
    admit(engine, make_request("first", range(4), max_tokens=1))
    engine.add(make_request("second", [0, 1, 2, *range(50, 60)]))
    step = engine.schedule()
    assert step is not None
    [output] = engine.apply(step, None)
    assert output.error is not None
    engine.check()
    assert (engine.counts().cached, engine.counts().free) == (1, 9)


def test_a_handover_brings_whole_blocks(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50, local_prefill_tokens=8)
    admit(engine, make_request("first", range(8), max_tokens=1))
    sequence = start_handover(engine, make_request("second", [*range(7), *range(100, 130)]))
    engine.check()
    assert (sequence.num_computed, sequence.copy) == (4, None)
    assert sequence.cached == CachedTokens(pool=4)


def test_what_a_copy_leaves_may_be_little_enough_to_compute_here(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(50, local_prefill_tokens=4)
    admit(engine, make_request("first", range(8), max_tokens=1))
    [sequence] = engine.add(make_request("second", [*range(7), *range(100, 104)]), wants_remote=True)
    engine.step()
    assert sequence.status is Status.RUNNING
    assert sequence.cached == CachedTokens(pool=7)


# Choices of one request


@IN_ORDER
@pytest.mark.parametrize("length", [1, 3, 4, 5, 30, 32])
def test_each_sibling_computes_one_token_of_the_prompt(
    make_engine: MakeEngine, make_request: MakeRequest, length: int
) -> None:
    engine = make_engine(100, max_num_batched_tokens=64)
    leader, *siblings = engine.add(make_request("r", range(length), emitted={0: [], 1: [], 2: [], 3: []}))
    engine.step()
    step = engine.schedule()
    assert step is not None
    assert [len(item.token_ids) for item in step.batch.items] == [1] * 4
    num_shared = (length - 1) // 4
    assert all(sibling.block_ids[:num_shared] == leader.block_ids[:num_shared] for sibling in siblings)
    assert all(engine.pool.num_owners(block_id) == 4 for block_id in leader.block_ids[:num_shared])
    assert len(step.batch.copies) == (3 if (length - 1) % 4 else 0)
    assert {copy.source for copy in step.batch.copies} <= {leader.block_ids[num_shared]}
    assert len({copy.destination for copy in step.batch.copies}) == len(step.batch.copies)
    engine.check()
    first = leader.token_ids[length:]
    engine.apply(step, runner_of(engine).execute(step.batch))
    engine.check()
    assert all(sibling.cached.total == length - 1 for sibling in siblings)
    tokens = run(engine)
    for choice, sequence in enumerate([leader, *siblings]):
        assert sequence.token_ids[length:] == expected_tokens(range(length), 8, seed=0, choice=choice)
    assert len(tokens["r", 0]) == 6
    assert first == expected_tokens(range(length), 1, seed=0)


@IN_ORDER
@pytest.mark.parametrize("fate", ["cancelled", "finished", "preempted"])
def test_without_its_leader_a_sibling_finds_whole_blocks(
    make_engine: MakeEngine, make_request: MakeRequest, fate: str
) -> None:
    engine = make_engine(100)
    stop = tuple(expected_tokens(range(14), 1, seed=0)) if fate == "finished" else ()
    leader, sibling = engine.add(make_request("r", range(14), emitted={0: [], 1: []}, stop_token_ids=stop))
    engine.step()
    if fate == "cancelled":
        engine.cancel("r", 0)
    elif fate == "preempted":
        engine.scheduler._preempt(leader)
    assert sibling.status is Status.WAITING
    engine.step()
    engine.check()
    assert sibling.cached == CachedTokens(pool=12)
    run(engine)
    answer = expected_tokens(range(14), 8, seed=0, choice=1)
    assert sibling.token_ids[14:] == answer[: next((i + 1 for i, t in enumerate(answer) if t in stop), 8)]


@IN_ORDER
def test_a_leader_that_goes_while_its_block_is_copied_leaves_it_behind(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(20)
    _, sibling = engine.add(make_request("r", range(14), emitted={0: [], 1: []}))
    engine.step()
    step = engine.schedule()
    assert step is not None
    engine.cancel("r", 0)
    engine.add(make_request("other", range(50, 90)))  # wants every block that is free
    engine.check()
    engine.apply(step, runner_of(engine).execute(step.batch))
    engine.check()
    run(engine)
    assert sibling.token_ids[14:] == expected_tokens(range(14), 8, seed=0, choice=1)


def test_siblings_with_a_past_of_their_own_share_the_prompt(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    whole = [expected_tokens(range(14), 10, seed=0, choice=choice) for choice in range(3)]
    engine = make_engine(100, max_num_batched_tokens=64)
    emitted = {choice: whole[choice][: 3 * choice] for choice in range(3)}
    _, *siblings = engine.add(make_request("r", range(14), max_tokens=10, emitted=emitted))
    assert run(engine) == {("r", choice): whole[choice][3 * choice :] for choice in range(3)}
    assert [sibling.cached.total for sibling in siblings] == [14, 14]


def test_a_block_that_is_still_to_be_copied_is_not_copied_on(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(20)
    leader, sibling = engine.add(make_request("r", range(14), emitted={0: [], 1: []}))
    engine.step()
    names = engine.scheduler.names
    assert names.find(sibling).source == leader.block_ids[3]
    leader.copy = BlockCopy(19, leader.block_ids[3], 2)
    assert names.find(sibling).source is None


def test_a_sibling_whose_own_past_is_cached_reuses_that(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    whole = expected_tokens(range(14), 12, seed=0, choice=1)
    engine = make_engine(50, max_num_batched_tokens=64)
    engine.add(make_request("before", range(14), max_tokens=12, emitted={1: []}))
    run(engine)
    _, sibling = engine.add(make_request("r", range(14), max_tokens=12, emitted={0: [], 1: whole[:9]}))
    engine.step()
    engine.step()
    assert sibling.num_pool_blocks == 5, "20 of its 23 tokens are whole blocks, of which 14 are the prompt"
    assert run(engine)["r", 1][-1] == whole[-1]
