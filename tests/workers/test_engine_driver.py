"""The engine's driver, what it refuses, what it tells, and what it costs."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from functools import partial
from typing import Any

import pytest
from engine_play import MakeEngine, MakeRequest, run, runner_of, start_handover, until

from tandem.workers.batch import Batch, SampledToken
from tandem.workers.errors import DeviceLost, RequestError
from tandem.workers.fake_runner import expected_tokens
from tandem.workers.steps import STEP_FAILED, StepOutput, StepTimes

# What is refused


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 1000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"emitted": {0: [1000]}}, "prompt"),
        ({"emitted": {0: [1] * 8}}, "max_tokens"),
        ({"emitted": {-1: []}}, "n"),
        ({"prompt": range(60), "max_tokens": 5}, "max_tokens"),
        ({"prompt": range(40), "max_tokens": 2}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"num_logprobs": -1}, "num_logprobs"),
    ],
)
def test_what_can_never_be_served_is_refused(
    make_engine: MakeEngine, make_request: MakeRequest, changes: dict[str, Any], param: str
) -> None:
    engine = make_engine(10, max_model_len=64)
    request = make_request(**({"request_id": "r", "prompt": range(4)} | changes))
    with pytest.raises(RequestError) as caught:
        engine.add(request)
    assert caught.value.param == param
    assert engine.is_idle


def test_the_largest_request_that_fits_is_served(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(10, max_model_len=64)
    engine.add(make_request("r", range(33)))
    assert len(run(engine)["r", 0]) == 8
    engine.add(make_request("held", range(100, 140), max_tokens=24), hold=True)
    assert [engine.step()[0].num_computed for _ in range(3)] == [16, 32, 40]


def test_request_id_in_use_is_refused(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(10)
    engine.add(make_request("r", range(4)))
    with pytest.raises(RequestError, match="in use"):
        engine.add(make_request("r", range(4)))


# Driver, events, numbers


async def test_run_serves_sleeps_and_closes(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50)
    outputs: list[StepOutput] = []
    engine.on_outputs = outputs.extend
    task = asyncio.create_task(engine.run())
    for turn in range(2):
        await asyncio.sleep(0.01)  # asleep by now
        engine.add(make_request(str(turn), range(10), seed=turn))
        await until(lambda: engine.is_idle)
        tokens = [output.token.token_id for output in outputs if output.token is not None]
        assert tokens == expected_tokens(range(10), 8, seed=turn)
        outputs.clear()
    engine.close()
    await asyncio.wait_for(task, 5)


async def test_loop_stays_free_and_open_to_calls_while_a_step_runs(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(50)
    runner, started, go_on = runner_of(engine), threading.Event(), threading.Event()
    execute = runner.execute

    def slow(batch: Batch) -> list[SampledToken | None]:
        started.set()
        assert go_on.wait(5)
        return execute(batch)

    runner.execute = slow  # type: ignore[method-assign]
    outputs: list[StepOutput] = []
    engine.on_outputs = outputs.extend
    task = asyncio.create_task(engine.run())
    engine.add(make_request("gone", range(10)))
    await until(started.is_set)
    engine.cancel("gone")
    engine.add(make_request("late", range(10), max_tokens=1))
    engine.check()
    assert engine.counts().used == 3
    go_on.set()
    await until(lambda: engine.is_idle)
    assert [output.sequence.request_id for output in outputs] == ["late"]
    engine.close()
    await asyncio.wait_for(task, 5)


async def test_run_survives_failing_steps(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50)
    runner = runner_of(engine)
    execute, outputs = runner.execute, list[StepOutput]()

    def once(batch: Batch) -> list[SampledToken | None]:
        runner.execute = execute  # type: ignore[method-assign]
        raise ValueError("once")

    runner.execute = once  # type: ignore[method-assign]
    engine.on_outputs = outputs.extend
    engine.add(make_request("bad", range(10)))
    task = asyncio.create_task(engine.run())
    await until(lambda: engine.is_idle)
    engine.add(make_request("good", range(10), max_tokens=1))
    await until(lambda: engine.is_idle)
    assert [(output.sequence.request_id, output.error) for output in outputs] == [("bad", STEP_FAILED), ("good", None)]
    engine.close()
    await asyncio.wait_for(task, 5)


async def test_a_lost_device_ends_the_run(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """Every later step would fail, too: the worker must make room for its next incarnation."""
    engine = make_engine(50)
    runner = runner_of(engine)

    def fail(batch: Batch) -> list[SampledToken | None]:
        raise DeviceLost("gone")

    runner.execute = fail  # type: ignore[method-assign]
    engine.add(make_request("r", range(10)))
    with pytest.raises(DeviceLost):
        await asyncio.wait_for(engine.run(), 5)


def test_cache_events_tell_what_the_cache_holds(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    published: set[bytes] = set()

    def on_event(kind: str, key: bytes) -> None:
        assert (key in published) == (kind == "removed")
        published.symmetric_difference_update({key})

    engine = make_engine(12, on_event)
    for i in range(6):
        engine.add(make_request(str(i), range(i, 25 + i)))
    run(engine)
    assert published == set(engine.cache.keys())
    assert published


def test_numbers_of_a_snapshot(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(14, max_num_batched_tokens=8)
    times: list[StepTimes] = []
    engine.on_step = times.append
    engine.add(make_request("a", range(4)))
    engine.add(make_request("b", range(20, 50)))
    engine.add(make_request("c", range(60, 70), emitted={0: [], 1: []}))
    engine.step()
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 2)
    assert engine.num_waiting_tokens == 30 - 4 - 4 + 10
    assert [(t.num_sequences, t.num_tokens) for t in times] == [(2, 8), (2, 5)]
    assert [(t.num_decodes, t.num_attended) for t in times] == [(0, 2 * (1 + 2 + 3 + 4)), (1, 5 + 6 + 7 + 8)]


def test_edges_of_a_life_are_stamped_in_order(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(20, local_prefill_tokens=8)
    sequence = start_handover(engine, make_request("r", range(30)))
    engine.handover_finished(sequence, SampledToken(1, None))
    run(engine)
    edges = [sequence.queued_at, sequence.admitted_at, sequence.joined_at, sequence.first_token_at]
    stamps = [edge for edge in (*edges, sequence.finished_at) if edge is not None]
    assert len(stamps) == 5
    assert stamps == sorted(stamps)


def test_a_step_of_64_sequences_costs_little(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """Processor time of the accounting alone: 0.4 ms where this was written, well below any forward pass."""
    engine = make_engine(64 * 20, block_size=32, max_model_len=2048, max_num_batched_tokens=512)
    runner = runner_of(engine)
    runner.execute = lambda batch: [SampledToken(5, None)] * len(batch.items)  # type: ignore[method-assign]
    runner.launch = lambda batch: partial(runner.execute, batch)  # type: ignore[method-assign]
    for i in range(64):
        engine.add(make_request(str(i), [i, *range(200)], max_tokens=400))
    while engine.num_waiting or engine.num_waiting_tokens:
        engine.step()
    costs: list[float] = []
    for _ in range(200):
        started = time.thread_time()
        engine.step()
        costs.append(time.thread_time() - started)
    assert engine.num_running == 64
    assert statistics.median(costs) < 0.002
