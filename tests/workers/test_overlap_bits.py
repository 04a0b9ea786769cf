"""Steps that overlap, with a real model on a device that lags: the bits of steps one after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lagging_queue import LaggingQueue
from tiny_model import CONFIG, random_weights

from tandem.kernels.ops import load_ops
from tandem.kernels.queue import HostQueue, Queue
from tandem.workers.batch import Batch, BatchItem, SampledToken, SampleSpec
from tandem.workers.config import WorkerConfig
from tandem.workers.decode_step import DecodeSteps
from tandem.workers.engine import Engine
from tandem.workers.kv_cache import KVCache
from tandem.workers.model_runner import ModelRunner
from tandem.workers.types import Choice, ModelIdentity, Request, SamplingParams, TokenLogprobs

BLOCK_SIZE = 16
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.2, "stop_token_ids": tuple(range(0, 499, 9))},
    {"temperature": 0.7, "top_k": 30},
]
VARIED: list[dict[str, Any]] = [
    *PLAIN,
    {"temperature": 0.0, "repetition_penalty": 1.4, "num_logprobs": 2},
    {"temperature": 0.8, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 1.0, "num_logprobs": 5},
    {"temperature": 0.9, "logit_bias": ((7, 4.0), (11, -100.0)), "frequency_penalty": 1.5},
    {"temperature": 1.0, "min_tokens": 4, "stop_token_ids": tuple(range(0, 499, 5))},
    {"temperature": 0.0, "bad_token_ids": tuple((token, other) for token in range(9) for other in range(9))},
    {"temperature": 0.5, "num_prompt_logprobs": 1},
    {"beam_width": 3, "num_logprobs": 0, "max_tokens": 30},
]
Tokens = dict[tuple[str, int], list[SampledToken]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_model_engine(make_config: Callable[..., WorkerConfig]) -> Callable[..., Engine]:
    def make(queue: Queue, *, backend: str = "cpu", dtype: str = "bfloat16", num_blocks: int = 60) -> Engine:
        weights = random_weights(getattr(torch, dtype))
        cache = KVCache(CONFIG, num_blocks, BLOCK_SIZE, weights.embedding.dtype, "cpu")
        cache.tensor.fill_(float("nan"))
        runner = ModelRunner(
            *(CONFIG, weights, cache), max_num_seqs=8, max_model_len=256, ops=load_ops(backend), queue=queue
        )
        assert runner.record() == (backend == "cpu")
        config = make_config(block_size=BLOCK_SIZE, max_num_batched_tokens=48, max_num_seqs=8)
        identity = ModelIdentity(
            protocol_version=1,
            model="tiny",
            revision="0",
            dtype=dtype,
            numerics="any",
            layout_version=1,
            block_size=BLOCK_SIZE,
            block_bytes=cache.block_bytes,
            max_model_len=256,
        )
        return Engine(
            *(runner, config, num_blocks, identity), vocab_size=CONFIG.vocab_size, overlaps=runner.can_overlap
        )

    return make


def make_requests(ways: list[dict[str, Any]], num: int, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for index in range(num):
        way = ways[index % len(ways)]
        choices = range(way.get("beam_width") or rng.choice([1, 1, 2]))
        prompt = rng.choices(range(CONFIG.vocab_size), k=rng.randrange(1, 90))
        limits = {"max_tokens": rng.randrange(way.get("min_tokens", 1), 24), "seed": index}
        params = SamplingParams(**(limits | way))
        requests.append(
            Request(
                request_id=str(index),
                prompt_token_ids=tuple(prompt),
                sampling=params,
                choices=tuple(Choice(index=choice) for choice in choices),
            )
        )
    return requests


def serve(engine: Engine, requests: list[Request]) -> tuple[Tokens, dict[str, Any], dict[str, list[TokenLogprobs]]]:
    """A newcomer every other step. Tokens with their logprobs, beams' answers, prompts' logprobs."""
    tokens, answers, scores = Tokens(), {}, {}
    coming = list(requests)
    turn = 0
    while coming or not engine.is_idle:
        if coming and turn % 2 == 0:
            for sequence in engine.add(coming.pop(0)):
                scores[sequence.request_id] = sequence.prompt_logprobs
        turn += 1
        for output in engine.step():
            assert output.error is None
            if output.token is not None:
                tokens.setdefault((output.sequence.request_id, output.sequence.choice), []).append(output.token)
            if output.answers:
                answers[output.sequence.request_id] = output.answers
        engine.check()
    assert engine.step() == []
    assert engine.counts().used == 0
    return tokens, answers, scores


@pytest.mark.parametrize(("dtype", "backend"), [("bfloat16", "cpu"), ("float32", "reference")])
@pytest.mark.parametrize("ways", [PLAIN, VARIED], ids=["plain", "varied"])
def test_overlapping_steps_give_the_same_bits(
    make_model_engine: Callable[..., Engine], ways: list[dict[str, Any]], dtype: str, backend: str
) -> None:
    requests = make_requests(ways, 24 if backend == "cpu" else 12)
    in_order = make_model_engine(HostQueue(), dtype=dtype, backend=backend)
    expected = serve(in_order, requests)
    assert not in_order.step_orders
    queue = LaggingQueue()
    engine = make_model_engine(queue, dtype=dtype, backend=backend)
    assert serve(engine, requests) == expected
    assert engine.step_orders["ahead"] > 10
    assert {"constraints", "beams"} <= set(engine.step_orders) or ways is PLAIN, engine.step_orders
    assert backend != "cpu" or queue.num_late > 10, "the device was never late: this shows nothing"


def test_a_small_pool_under_overlapping_steps(make_model_engine: Callable[..., Engine]) -> None:
    """Preemption, eviction, copies of parts of blocks."""
    requests = make_requests([way | {"max_tokens": 60} for way in PLAIN[:2]], 12, seed=3)
    expected = serve(make_model_engine(HostQueue()), requests)
    engine = make_model_engine(LaggingQueue(seed=1), num_blocks=16)
    assert serve(engine, requests) == expected
    assert engine.scheduler.num_preemptions > 0, engine.step_orders
    assert engine.step_orders["ahead"] > 10


def test_inputs_that_may_still_be_read_are_not_overwritten(
    make_model_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other tests would see if a step were filled into the buffers of the step before."""
    requests = make_requests(PLAIN, 8)
    expected = serve(make_model_engine(HostQueue()), requests)
    queue = LaggingQueue(haste=0.0)
    engine = make_model_engine(queue)
    launch, waits = engine.runner.launch, []

    def watched(batch: Batch) -> Any:
        before = queue.num_late
        collect = launch(batch)
        waits.append(queue.num_late - before)
        return collect

    engine.runner.launch = watched  # type: ignore[method-assign]
    assert serve(engine, requests) == expected
    assert not any(waits), "launching waited for the device"
    monkeypatch.setattr(DecodeSteps, "_next_host", lambda self: self._hosts[0])
    with pytest.raises(AssertionError):
        assert serve(make_model_engine(LaggingQueue(haste=0.0)), requests) == expected


def test_a_deeper_queue_waits_for_its_buffers(make_model_engine: Callable[..., Engine]) -> None:
    """Three steps of two sequences in a row, of which nobody waits for one."""
    tokens: list[list[list[SampledToken | Any]]] = []
    for queue in (HostQueue(), LaggingQueue(haste=0.0)):
        runner = make_model_engine(queue).runner
        steps = []
        for place in range(3):
            items = []
            for row in range(2):
                sample = SampleSpec(SamplingParams(max_tokens=9, seed=row), 0, place + 1, [row + 5] * (place + 1), 1)
                items.append(BatchItem((row + 7 * place,), place, [row], sample))
            steps.append(runner.launch(Batch(tuple(items))))
        tokens.append([list(collect()) for collect in steps])
    assert tokens[0] == tokens[1]


def test_a_prompt_that_is_scored_is_read_in_order(make_model_engine: Callable[..., Engine]) -> None:
    """Which tokens to score is said of those that were."""
    way = {"num_prompt_logprobs": 1, "temperature": 0.5}
    requests = make_requests([way, PLAIN[0]], 6, seed=5)
    assert max(len(request.prompt_token_ids) for request in requests[::2]) > 48
    expected = serve(make_model_engine(HostQueue()), requests)
    engine = make_model_engine(LaggingQueue())
    assert serve(engine, requests) == expected
    assert engine.step_orders["prompt_logprobs"] > 0


def test_a_step_that_follows_nothing_is_refused(make_model_engine: Callable[..., Engine]) -> None:
    runner = make_model_engine(LaggingQueue()).runner
    sample = SampleSpec(SamplingParams(max_tokens=2, seed=0), 0, 2, [5], 1)
    with pytest.raises(AssertionError, match="follows none"):
        runner.launch(Batch((BatchItem((0,), 1, [0], sample, follows=0),)))
