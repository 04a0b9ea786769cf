"""Tandem's side of a comparison: the model runner alone, and the whole engine loop. An adapter of `side_process`.

The KV of a decode step's contexts is random numbers, put there once: what they are changes nothing about the time.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from tandem.cluster.actors import worker_environment
from tandem.cluster.model_cache import cache_folder
from tandem.kernels.capture import Captured
from tandem.kernels.ops import StepLayout, StepPlan
from tandem.kernels.reference import ReferenceOps
from tandem.kernels.tuning_cache import TUNING_FILE
from tandem.workers.batch import Batch, BatchItem, SampledToken, SampleSpec, StepResult
from tandem.workers.config import WorkerConfig
from tandem.workers.engine import Engine
from tandem.workers.kv_cache import KVCache
from tandem.workers.load import identity_of, load_runner
from tandem.workers.model_runner import ModelRunner
from tandem.workers.models.checkpoint import check_model
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.weights import LayerWeights, ModelWeights
from tandem.workers.steps import StepOutput, StepTimes
from tandem.workers.transfer.base import NUM_PROBE_BLOCKS
from tandem.workers.types import Request, SamplingParams

GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
_LOWEST_TOKEN = 3

T = TypeVar("T")


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Exactly a worker's."""
    return worker_environment(len(options.cores))


def load(options: argparse.Namespace) -> Callable[[dict[str, Any]], dict[str, Any]]:
    torch.set_num_threads(len(options.cores))
    side = TandemSide(_config(options))
    measures: dict[str, Callable[..., dict[str, Any]]] = {}
    measures |= {"decode": side.decode, "prefill": side.prefill, "loop": side.loop}

    def measure(command: dict[str, Any]) -> dict[str, Any]:
        return measures[command.pop("measure")](**command)

    return measure


def _config(options: argparse.Namespace) -> WorkerConfig:
    model = check_model(options.model)
    block_size = 32
    blocks = options.max_seqs * -(-options.max_len // block_size) + NUM_PROBE_BLOCKS
    return WorkerConfig(
        model_path=options.model,
        model_name="bench",
        role="aggregated",
        worker_id="bench",
        dtype="bfloat16",
        block_size=block_size,
        max_model_len=options.max_len,
        max_num_seqs=options.max_seqs,
        max_num_batched_tokens=options.chunk,
        kv_cache_memory_bytes=blocks * block_size * model.kv_elements_per_token * torch.bfloat16.itemsize,
        num_threads=len(options.cores),
        tuning_file=cache_folder() / TUNING_FILE,
        tuning_deadline_s=60.0,
    )


class TandemSide:
    """One runner, loaded as a worker loads it, and what can be measured of it. Seconds throughout."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        loaded: tuple[ModelConfig, KVCache, ModelRunner] = load_runner(config)
        self._model, self._kv_cache, self._runner = loaded
        with torch.inference_mode():
            self._kv_cache.tensor.normal_()
        self._blocks_per_seq = -(-config.max_model_len // config.block_size)

    def decode(self, streams: int, context: int, steps: int, warm_up: int, seed: int) -> dict[str, Any]:
        """Steps of `streams` sequences, each with a context of its own. The sampled token is the next one's input."""
        sequences = [_tokens(self._model, context + 1, seed + index) for index in range(streams)]
        seconds, replayed = [], self._runner.counts.replayed
        for _ in range(warm_up + steps):
            started = time.perf_counter()
            results = self._runner.execute(Batch(tuple(map(self._next_item, range(streams), sequences))))
            for sequence, result in zip(sequences, results, strict=True):
                sequence.append(_sampled(result).token_id)
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds[warm_up:], "replayed": self._runner.counts.replayed - replayed}

    def prefill(self, tokens: int, seed: int) -> dict[str, Any]:
        """One prompt in chunks, up to its first token. The runner knows of no cache, so every prompt is new to it."""
        prompt = _tokens(self._model, tokens, seed)
        started = time.perf_counter()
        for start in range(0, tokens, self._config.max_num_batched_tokens):
            end = min(tokens, start + self._config.max_num_batched_tokens)
            sample = SampleSpec(GREEDY, 0, tokens, prompt, tokens) if end == tokens else None
            self._runner.execute(Batch((BatchItem(prompt[start:end], start, self._block_ids(0), sample),)))
        return {"seconds": [time.perf_counter() - started]}

    def loop(self, streams: int, context: int, steps: int, warm_up: int, seed: int) -> dict[str, Any]:
        """The whole engine as a server runs it: scheduler, executor thread, event loop, accounting."""
        engine = _engine(self._config, self._model, self._kv_cache, self._runner)
        times, moments = asyncio.run(_run_engine(engine, self._model, streams, context, warm_up + steps, seed))
        kept = slice(warm_up, warm_up + steps)
        gaps = [after - before for before, after in itertools.pairwise(moments)]
        return {
            "step": statistics.median(gaps[kept]),
            "schedule": statistics.median(one.schedule_s for one in times[kept]),
            "execute": statistics.median(one.execute_s for one in times[kept]),
            "apply": statistics.median(one.apply_s for one in times[kept]),
            "host": self._host_s(streams, context, seed),
        }

    def _host_s(self, streams: int, context: int, seed: int) -> float:
        """Median time of all that the runner does in Python for a step: it runs on ops that compute nothing."""
        runner = _runner_without_model(self._config, self._model, self._kv_cache)
        sequences = [_tokens(self._model, context + 1, seed + index) for index in range(streams)]
        batch = Batch(tuple(map(self._next_item, range(streams), sequences)))
        seconds = []
        for _ in range(50):
            started = time.perf_counter()
            runner.execute(batch)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    def _next_item(self, index: int, sequence: list[int]) -> BatchItem:
        """The step that computes a sequence's last token and samples the one behind it."""
        start = len(sequence) - 1
        sample = SampleSpec(GREEDY, 0, start + 1, sequence, start)
        return BatchItem(sequence[start:], start, self._block_ids(index), sample)

    def _block_ids(self, index: int) -> Sequence[int]:
        return range(index * self._blocks_per_seq, (index + 1) * self._blocks_per_seq)


class _NoOps(ReferenceOps):
    """Records whatever step, and computes nothing when it is replayed."""

    def capture(self, step: Callable[[], T]) -> Captured[T]:
        return Captured(step(), lambda: None, 0)

    def plan_step(self, layout: StepLayout, kv_cache: Tensor, num_heads: int) -> StepPlan:
        return StepPlan(layout)

    def rope_and_write_kv(self, *arguments: Any, out: Tensor | None = None) -> Tensor:
        assert out is not None
        return out

    def paged_attention(self, *arguments: Any, out: Tensor | None = None, **more: Any) -> Tensor:
        assert out is not None
        return out


def _runner_without_model(config: WorkerConfig, model: ModelConfig, kv_cache: KVCache) -> ModelRunner:
    """A runner whose recorded steps are empty, over a model of next to nothing that fits the cache."""
    small = dataclasses.replace(
        model, num_layers=1, vocab_size=1, hidden_size=1, intermediate_size=1, sliding_window=(), qk_norm=False
    )
    query_size = model.num_heads * model.head_dim
    qkv_size = query_size + 2 * model.num_kv_heads * model.head_dim

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=kv_cache.tensor.dtype)

    layer = LayerWeights(
        input_norm=zeros(1),
        qkv=zeros(qkv_size, 1),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        output=zeros(1, query_size),
        output_bias=None,
        post_norm=zeros(1),
        gate_up=zeros(2, 1),
        gate_up_bias=None,
        down=zeros(1, 1),
        down_bias=None,
    )
    weights = ModelWeights(embedding=zeros(1, 1), layers=(layer,), final_norm=zeros(1), lm_head=zeros(1, 1))
    max_num_seqs, max_model_len = config.max_num_seqs, config.max_model_len
    runner = ModelRunner(
        *(small, weights, kv_cache), max_num_seqs=max_num_seqs, max_model_len=max_model_len, ops=_NoOps()
    )
    runner.record()
    return runner


def _engine(config: WorkerConfig, model: ModelConfig, kv_cache: KVCache, runner: ModelRunner) -> Engine:
    identity = identity_of(config, runner.ops, kv_cache)
    return Engine(runner, config, kv_cache.num_blocks, identity, vocab_size=model.vocab_size)


async def _run_engine(
    engine: Engine, model: ModelConfig, streams: int, context: int, steps: int, seed: int
) -> tuple[list[StepTimes], list[float]]:
    """`steps` decode steps of the running engine, and the moments of their outputs and of the one before."""
    times: list[StepTimes] = []
    moments: list[float] = []
    enough = asyncio.Event()

    def on_step(one: StepTimes) -> None:
        if one.num_sequences == one.num_tokens == streams:
            times.append(one)

    def on_outputs(outputs: list[StepOutput]) -> None:
        if times:
            moments.append(time.perf_counter())
        if len(times) > steps:
            enough.set()

    engine.on_step, engine.on_outputs = on_step, on_outputs
    sampling = msgspec.structs.replace(GREEDY, max_tokens=engine.config.max_model_len - context)
    for index in range(streams):
        prompt = tuple(_tokens(model, context, seed + index))
        engine.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    running = asyncio.create_task(engine.run())
    await enough.wait()
    engine.close()
    await running
    return times[1:], moments


def _tokens(model: ModelConfig, count: int, seed: int) -> list[int]:
    """Random token ids."""
    return random.Random(seed).choices(range(_LOWEST_TOKEN, model.vocab_size), k=count)


def _sampled(result: StepResult) -> SampledToken:
    assert isinstance(result, SampledToken)
    return result
