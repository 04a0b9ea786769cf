"""Steps that overlap: the next one is decided while one is computed, and nobody can tell by the tokens."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from engine_play import MakeEngine, MakeRequest, fill, next_token, run, runner_of, start_handover, until

from tandem.workers.batch import Batch
from tandem.workers.block_pool import BlockState
from tandem.workers.engine import Engine
from tandem.workers.fake_runner import expected_tokens
from tandem.workers.steps import STEP_FAILED, Step, StepOutput

pytestmark = pytest.mark.parametrize("overlaps", [True], ids=["overlapping"], indirect=True)


def launch(engine: Engine) -> tuple[Step, Any]:
    step = engine.schedule()
    assert step is not None
    return step, runner_of(engine).launch(step.batch)


def follows(step: Step) -> list[int | None]:
    return [item.follows for item in step.batch.items]


def test_a_step_is_decided_and_launched_before_the_tokens_of_the_one_before_are_known(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(20)
    engine.add(make_request("a", range(5)))
    engine.add(make_request("b", range(40, 47)))
    first, collect_first = launch(engine)
    assert runner_of(engine).batches == [], "the device has not begun"
    second, collect_second = launch(engine)
    assert (follows(first), follows(second)) == ([None, None], [0, 1])
    assert [item.start for item in second.batch.items] == [5, 7]
    engine.check()
    engine.apply(first, collect_first())
    third, collect_third = launch(engine)
    engine.apply(second, collect_second())
    engine.apply(third, collect_third())
    engine.check()
    tokens = run(engine)
    assert tokens["a", 0] == expected_tokens(range(5), 8, seed=0)[3:]
    assert tokens["b", 0] == expected_tokens(range(40, 47), 8, seed=0)[3:]
    assert engine.step_orders["ahead"] >= 6


def test_rows_count_only_those_that_sample(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """The first of the batch reads on, so the tokens of the others are in rows 0 and 1."""
    engine = make_engine(40, max_num_batched_tokens=16)
    for name, prompt in {"a": range(5), "b": range(50, 53)}.items():
        engine.add(make_request(name, prompt, max_tokens=4))
    engine.step()
    engine.add(make_request("long", range(100, 130), max_tokens=4))
    tokens = run(engine)
    assert tokens["a", 0] == expected_tokens(range(5), 4, seed=0)[1:]
    assert tokens["b", 0] == expected_tokens(range(50, 53), 4, seed=0)[1:]
    assert tokens["long", 0] == expected_tokens(range(100, 130), 4, seed=0)


def test_a_prompt_is_read_on_without_waiting_for_its_chunk(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(20, max_num_batched_tokens=8)
    engine.add(make_request("r", range(21), max_tokens=1))
    first, collect_first = launch(engine)
    second, collect_second = launch(engine)
    assert [(step.batch.items[0].start, len(step.batch.items[0].token_ids)) for step in (first, second)] == [
        (0, 8),
        (8, 8),
    ]
    for step, collect in ((first, collect_first), (second, collect_second)):
        engine.apply(step, collect())
        engine.check()
    assert run(engine) == {("r", 0): expected_tokens(range(21), 1, seed=0)}


# Ends


def test_an_end_that_is_known_before_is_not_overrun(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(20)
    engine.add(make_request("r", range(10)))
    assert run(engine) == {("r", 0): expected_tokens(range(10), 8, seed=0)}
    assert len(runner_of(engine).batches) == 8, "a step was computed for nobody"


def test_a_token_behind_the_end_is_thrown_away(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    tokens = expected_tokens(range(5), 9, seed=0)
    engine = make_engine(20)
    [sequence] = engine.add(make_request("r", range(5), max_tokens=20, stop_token_ids=(tokens[7],)))
    outputs: list[StepOutput] = []
    while not engine.is_idle:
        outputs += engine.step()
        engine.check()
    assert [output.token.token_id for output in outputs if output.token] == tokens[:8]
    assert [output.finish_reason for output in outputs] == [None] * 7 + ["stop"]
    assert (len(sequence.token_ids), sequence.num_computed) == (13, 12)
    assert engine.counts().used == 4, "a step still writes behind the end"
    assert engine.step() == []
    engine.check()
    assert len(runner_of(engine).batches) == 9, "with the one that was in vain"
    counts = engine.counts()
    assert (counts.used, counts.cached, counts.free) == (0, 3, 17)
    [again] = engine.add(make_request("s", [*range(5), *tokens[:8], 1], max_tokens=1))
    run(engine)
    assert again.cached.total == 12, "what was computed behind the end is not to be found"


def test_a_slot_of_one_that_has_ended_is_free_a_step_later(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(20, max_num_seqs=1)
    for name in "ab":
        engine.add(make_request(name, range(ord(name), ord(name) + 5), max_tokens=3))
    tokens = run(engine)
    assert tokens == {(name, 0): expected_tokens(range(ord(name), ord(name) + 5), 3, seed=0) for name in "ab"}


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_cancel_frees_the_blocks_when_no_step_uses_them(
    make_engine: MakeEngine, make_request: MakeRequest, num_in_flight: int
) -> None:
    engine = make_engine(20)
    engine.add(make_request("gone", range(8)))
    engine.add(make_request("stays", range(50, 58)))
    flights = [launch(engine) for _ in range(num_in_flight)]
    assert engine.cancel("gone") == []
    engine.check()
    outputs: list[StepOutput] = []
    for step, collect in flights:
        assert engine.counts().used == 2 * (num_in_flight + 1), "a block each to grow, for both"
        outputs += engine.apply(step, collect())
        engine.check()
    assert engine.counts().used == num_in_flight + 1
    assert {output.sequence.request_id for output in outputs} == {"stays"}
    mine = [output.token.token_id for output in outputs if output.token]
    assert mine + run(engine)["stays", 0] == expected_tokens(range(50, 58), 8, seed=0)


# What waits for the host


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        ({"min_tokens": 3, "stop_token_ids": (7,)}, "constraints"),
        ({"bad_token_ids": ((1, 2),)}, "constraints"),
    ],
)
def test_what_needs_the_host_in_between_is_done_in_order(
    make_engine: MakeEngine, make_request: MakeRequest, sampling: dict[str, Any], why: str
) -> None:
    engine = make_engine(20)
    engine.add(make_request("r", range(5), max_tokens=4, **sampling))
    engine.add(make_request("plain", range(20, 25), max_tokens=6))
    first, collect = launch(engine)
    assert engine.schedule() is None
    assert first.host_need == why
    engine.apply(first, collect())
    tokens = run(engine)
    assert tokens["plain", 0] == expected_tokens(range(20, 25), 6, seed=0)[1:]
    assert engine.step_orders == {"first": 1, why: 4, "ahead": 1}, "when it has ended, steps overlap again"


def test_what_a_bias_says_never_changes_so_nobody_waits(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(20)
    engine.add(make_request("r", range(5), max_tokens=4, logit_bias=((3, 1.0),), allowed_token_ids=tuple(range(999))))
    run(engine)
    assert engine.step_orders == {"first": 1, "ahead": 3}


def test_without_a_block_to_grow_the_step_in_flight_ends_first(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    """Preemption must not take blocks that a step writes into."""
    engine = make_engine(12)
    for index in range(3):
        prompt = range(20 * index, 20 * index + 9)
        engine.add(make_request(str(index), prompt, max_tokens=25))
    tokens = run(engine)
    for index in range(3):
        assert tokens[str(index), 0] == expected_tokens(range(20 * index, 20 * index + 9), 25, seed=0)
    assert engine.scheduler.num_preemptions > 0
    assert engine.step_orders["blocks"] >= engine.scheduler.num_preemptions


# Newcomers


def test_a_handover_joins_the_step_after_those_in_flight(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(40, local_prefill_tokens=4)
    coming = start_handover(engine, make_request("coming", range(8), max_tokens=4))
    engine.add(make_request("here", range(50, 55), max_tokens=9))
    flights = [launch(engine), launch(engine)]
    fill(engine, coming, 0, 8)
    output = engine.handover_finished(coming, next_token(engine, coming))
    assert output is not None
    assert output.token is not None
    engine.check()
    step, collect = flights.pop(0)
    engine.apply(step, collect())
    third, collect_third = launch(engine)
    assert [chunk.sequence.request_id for chunk in third.chunks] == ["coming", "here"]
    assert follows(third) == [None, 0]
    for step, collect in (*flights, (third, collect_third)):
        engine.apply(step, collect())
        engine.check()
    run(engine)
    assert coming.token_ids[8:] == expected_tokens(range(8), 4, seed=0)


# Failures


def test_a_step_that_fails_takes_only_its_own_along(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(20)
    engine.add(make_request("bad", range(5)))
    first, _ = launch(engine)
    engine.add(make_request("good", range(50, 60)))
    second, collect_second = launch(engine)
    [failed] = engine.apply(first, None)
    assert (failed.sequence.request_id, failed.error) == ("bad", STEP_FAILED)
    engine.check()
    outputs = engine.apply(second, collect_second())
    engine.check()
    assert [output.sequence.request_id for output in outputs] == ["good"]
    assert outputs[0].token is not None
    assert [outputs[0].token.token_id, *run(engine)["good", 0]] == expected_tokens(range(50, 60), 8, seed=0)
    assert engine.counts().used == 0


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_nothing_follows_a_step_that_could_not_be_launched(
    make_engine: MakeEngine, make_request: MakeRequest, num_before: int
) -> None:
    engine = make_engine(20)
    runner, ordinary = runner_of(engine), runner_of(engine).launch
    launches: list[Batch] = []

    def refuse(batch: Batch) -> Any:
        launches.append(batch)
        if len(launches) == num_before + 1:
            raise RuntimeError("no more streams")
        return ordinary(batch)

    runner.launch = refuse  # type: ignore[method-assign]
    engine.add(make_request("bad", range(5)))
    outputs: list[StepOutput] = []
    while not engine.is_idle:
        outputs += engine.step()
        engine.check()
    assert len(launches) == num_before + 1
    assert [output.error for output in outputs] == [None] * num_before + [STEP_FAILED]
    engine.add(make_request("good", range(50, 60)))
    assert run(engine)["good", 0] == expected_tokens(range(50, 60), 8, seed=0)


# The driver


async def test_the_loop_decides_a_step_while_the_device_computes(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(20)
    runner, go_on = runner_of(engine), threading.Event()
    execute, launch_ = runner.execute, runner.launch
    launched: list[Batch] = []
    outputs: list[StepOutput] = []

    def slow(batch: Batch) -> Any:
        assert go_on.wait(5)
        return execute(batch)

    def watched(batch: Batch) -> Any:
        launched.append(batch)
        return launch_(batch)

    runner.execute, runner.launch = slow, watched  # type: ignore[method-assign]
    engine.on_outputs = outputs.extend
    engine.add(make_request("r", range(5)))
    task = asyncio.create_task(engine.run())
    await until(lambda: len(launched) == 2)
    assert outputs == []
    engine.check()
    engine.close()
    go_on.set()
    await asyncio.wait_for(task, 5)
    tokens = [output.token.token_id for output in outputs if output.token]
    assert tokens == expected_tokens(range(5), 2, seed=0), "both steps in flight end before it does"
    engine.check()


def test_order_can_be_changed_while_it_runs(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(20)
    engine.add(make_request("r", range(5), max_tokens=30))
    tokens: list[int] = []
    for turn in range(40):
        engine.overlaps = turn % 3 != 0
        tokens += [output.token.token_id for output in engine.step() if output.token]
        engine.check()
    assert tokens == expected_tokens(range(5), 30, seed=0)
    assert engine.step_orders["ahead"] > 5


def test_a_block_that_is_replaced_stays_owned_while_a_step_uses_it(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    """Two compute the same; the second owns the first one's blocks from then on, but a step was told of its own."""
    engine = make_engine(20)
    for name in "ab":
        [sequence] = engine.add(make_request(name, range(8), seed=ord(name)))
    first, collect_first = launch(engine)
    mine = sequence.block_ids[:2]
    second, collect_second = launch(engine)
    engine.apply(first, collect_first())
    engine.check()
    assert sequence.block_ids[:2] != mine
    assert sequence.replaced == mine
    assert [engine.pool.state(block) for block in mine] == [BlockState.USED] * 2
    engine.apply(second, collect_second())
    engine.check()
    assert [engine.pool.state(block) for block in mine] == [BlockState.FREE] * 2
    tokens = run(engine)
    for name in "ab":
        assert tokens[name, 0] == expected_tokens(range(8), 8, seed=ord(name))[2:]
