"""Steps that overlap: the same bits as one after the other, nobody waits while launching, and how much is hidden."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from model_checks import Scale, make_runner
from report import Context, short
from rows import Row
from timings import Shapes, replay_seconds

from tandem.workers.batch import Batch, SampledToken, StepResult
from tandem.workers.config import WorkerConfig
from tandem.workers.engine import Engine
from tandem.workers.kv_cache import KVCache
from tandem.workers.model_runner import ModelRunner
from tandem.workers.steps import Collect
from tandem.workers.types import ModelIdentity, Request, SamplingParams

Tokens = dict[str, list[SampledToken]]


def ways(vocab_size: int) -> tuple[dict[str, Any], ...]:
    """To sample."""
    return (
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.0, "stop_token_ids": tuple(range(0, vocab_size, 9))},
        {"temperature": 0.0, "repetition_penalty": 1.3, "num_logprobs": 3},
        {"temperature": 0.8, "frequency_penalty": 0.7},
        {"temperature": 0.7, "logit_bias": ((7, 3.0),)},
    )


class NoWaiting:
    """A runner that fails when launching a step waits for the device."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def execute(self, batch: Batch) -> Sequence[StepResult]:
        return self.runner.execute(batch)

    def launch(self, batch: Batch) -> Collect:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self.runner.launch(batch)
        finally:
            torch.cuda.set_sync_debug_mode(before)


def make_engine(runner: Any, num_blocks: int, block_size: int, max_model_len: int, max_seqs: int) -> Engine:
    config = WorkerConfig(
        model_path=Path("model"),
        model_name="random",
        role="aggregated",
        worker_id="w",
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=8 * block_size,
    )
    identity = ModelIdentity(
        protocol_version=1,
        model="random",
        revision="0",
        dtype="any",
        numerics="any",
        layout_version=1,
        block_size=block_size,
        block_bytes=1,
        max_model_len=max_model_len,
    )
    return Engine(runner, config, num_blocks, identity)


def serve(engine: Engine, requests: list[Request]) -> Tokens:
    """A newcomer every other step."""
    tokens, coming, turn = Tokens(), list(requests), 0
    while coming or not engine.is_idle:
        if coming and turn % 2 == 0:
            engine.add(coming.pop(0))
        turn += 1
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.token is not None:
                tokens.setdefault(output.sequence.request_id, []).append(output.token)
        engine.check()
    engine.step()  # what was launched behind the last token
    return tokens


def overlap(context: Context) -> Iterator[Row]:
    scale, is_gpu = Scale.of(context), context.device.type == "cuda"
    num, num_tokens = (2, 2) if context.is_tiny else (18, 24)
    kinds = ways(scale.config.vocab_size)
    requests = [
        Request(
            request_id=str(index),
            prompt_token_ids=tuple(scale.prompt_of(index)),
            sampling=SamplingParams(max_tokens=num_tokens, seed=index, **kinds[index % len(kinds)]),
        )
        for index in range(num)
    ]
    sizes = (scale.num_seqs * scale.blocks_per_seq, scale.block_size, scale.max_model_len, scale.num_seqs)
    for dtype in context.dtypes:
        runner = make_runner(scale, context.ops, dtype, context.device)
        runner.record()
        in_order, ahead = (make_engine(one, *sizes) for one in (runner, NoWaiting(runner) if is_gpu else runner))
        expected = serve(in_order, requests)
        ahead.overlaps = True
        wrong = sum(tokens != expected[name] for name, tokens in serve(ahead, requests).items())
        detail = f"{wrong} of {len(expected)} sequences differ" if wrong else "equal bits, nobody waited"
        yield Row("overlap", f"{short(dtype)} ahead = in order", "FAILED" if wrong else "ok", detail)
        yield Row("overlap", f"{short(dtype)} steps", "measured", _orders(ahead))


def _orders(engine: Engine) -> str:
    return ", ".join(f"{order} {num}" for order, num in sorted(engine.step_orders.items()))


def hidden(context: Context) -> Iterator[Row]:
    """Of a step of the Qwen2.5-1.5B shape: what the host takes when it is done in between, and how much of it is left
    when it is done meanwhile."""
    shapes = Shapes.of(context)
    config, max_len, weights = shapes.model, shapes.max_len, shapes.random_weights()
    num_steps = 2 if context.is_tiny else 150
    for num_seqs in shapes.num_seqs[1:]:
        num_blocks = (num_seqs + 8) * max_len // shapes.block_size
        cache = KVCache(config, num_blocks, shapes.block_size, shapes.dtype, context.device)
        cache.tensor.zero_()
        runner = ModelRunner(config, weights, cache, max_num_seqs=num_seqs, max_model_len=max_len, ops=context.ops)
        runner.record()
        device_s = replay_seconds(runner, num_seqs)
        took: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 if context.is_tiny else 6):  # alternating sides
            engine = make_engine(runner, num_blocks, shapes.block_size, max_len, num_seqs)
            engine.overlaps = turn % 2 == 1
            took[engine.overlaps].append(_seconds_per_step(engine, num_seqs, num_steps))
        apart, together = min(took[False]), min(took[True])
        host = apart - device_s
        share = (apart - together) / host if host > 0 else 0.0
        detail = (
            f"{apart * 1e3:.2f} ms in order, {together * 1e3:.2f} ms ahead, {device_s * 1e3:.2f} ms on the device "
            f"alone: {100 * share:.0f} % of {host * 1e6:.0f} us hidden"
        )
        yield Row("overlap", f"{shapes.name}, {num_seqs} sequences", "measured", detail)


def _seconds_per_step(engine: Engine, num_seqs: int, num_steps: int) -> float:
    num_first = min(20, num_steps)
    for index in range(num_seqs):
        prompt = tuple((index + 7 * place) % 200 for place in range(16))
        params = SamplingParams(max_tokens=num_steps + num_first + 80, seed=index, temperature=0.8)
        engine.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=params))
    while any(sequence.num_generated < num_first for sequence in engine.scheduler.running) or engine.num_waiting:
        engine.step()
    began = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    taken = (time.perf_counter() - began) / num_steps
    for index in range(num_seqs):
        engine.cancel(str(index))
    while engine.step():
        pass
    return taken
