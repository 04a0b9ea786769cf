"""How fast: the memory and matrix limits as measured here, then kernels and whole decode steps beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from op_checks import make_layout, moved
from report import Context
from rows import Row
from torch import Tensor

from tandem.kernels.autotune import TunableOps, tune
from tandem.kernels.ops import StepLayout
from tandem.workers.kv_cache import KVCache
from tandem.workers.model_runner import ModelRunner
from tandem.workers.models.config import ModelConfig, RopeConfig
from tandem.workers.models.weights import LayerWeights, ModelWeights
from tandem.workers.warm_up import tuning_workload

_GRAPH_CALLS = 10


@dataclass(frozen=True, slots=True)
class Shapes:
    """What is timed. The small ones show that this file works."""

    name: str
    device: torch.device
    dtype: torch.dtype
    model: ModelConfig
    max_len: int
    block_size: int
    num_seqs: tuple[int, ...]
    read_bytes: int
    matrix_size: int
    products: tuple[tuple[int, int], ...]
    product_rows: tuple[int, ...]
    heads: tuple[int, int, int]
    """Query heads, KV heads, head_dim."""
    decodes: tuple[tuple[int, int], ...]
    """Sequences, tokens of context."""
    prompt: int
    tuning_s: float

    @classmethod
    def of(cls, context: Context) -> Shapes:
        if context.is_tiny:
            model = ModelConfig("qwen2", 300, 64, 96, 1, 4, 2, 32, 1e-6, 128, True, RopeConfig(10000.0))
            return cls(
                *("tiny shape", context.device, torch.float16, model, 128, 16, (1, 2), 1 << 16, 64),
                *(((64, 96),), (1, 20), (4, 2, 32), ((2, 40),), 20, 0.0),
            )
        model = ModelConfig("qwen2", 151_936, 1536, 8960, 28, 12, 2, 128, 1e-6, 4096, True, RopeConfig(1_000_000.0))
        return cls(
            name="Qwen2.5-1.5B shape",
            device=context.device,
            dtype=torch.bfloat16,
            model=model,
            max_len=512,
            block_size=32,
            num_seqs=(1, 8, 32),
            read_bytes=4 << 30,
            matrix_size=8192,
            products=((4096, 6144), (4096, 4096), (14336, 4096), (4096, 128_256)),
            product_rows=(1, 32, 2048),
            heads=(32, 8, 128),
            decodes=((1, 2048), (1, 8192), (32, 2048), (64, 8192)),
            prompt=2048,
            tuning_s=30.0,
        )

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def random_weights(self) -> ModelWeights:
        config = self.model
        hidden, inner = config.hidden_size, config.intermediate_size
        query_size = config.num_heads * config.head_dim
        qkv_size = query_size + 2 * config.num_kv_heads * config.head_dim
        norm = torch.ones(hidden, dtype=self.dtype, device=self.device)

        def random(*shape: int) -> Tensor:
            return self.random(*shape) * shape[-1] ** -0.5

        layers = tuple(
            LayerWeights(
                *(norm, random(qkv_size, hidden), random(qkv_size), None, None, random(hidden, query_size), None),
                *(norm, random(2 * inner, hidden), None, random(hidden, inner), None),
            )
            for _ in range(config.num_layers)
        )
        embedding = random(config.vocab_size, hidden)
        return ModelWeights(embedding, layers, norm, embedding)


def seconds(device: torch.device, run: Callable[[], object], repeats: int = 20) -> float:
    """The median of one call, in a graph of ten, by the device's clock."""
    run()
    if device.type == "cpu":
        return timed(device, run, 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_GRAPH_CALLS):
            run()
    graph.replay()
    return timed(device, graph.replay, repeats) / _GRAPH_CALLS


class _HostEvent:
    """As much of `torch.cuda.Event` as is used here."""

    def __init__(self, *, enable_timing: bool) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """It has happened."""

    def elapsed_time(self, later: _HostEvent) -> float:
        return 1000 * (later._at - self._at)


def timed(device: torch.device, run: Callable[[], object], repeats: int) -> float:
    """The median of some calls."""
    clock: Any = torch.cuda.Event if device.type == "cuda" else _HostEvent
    times = []
    for _ in range(repeats):
        began, ended = clock(enable_timing=True), clock(enable_timing=True)
        began.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1000)
    return sorted(times)[len(times) // 2]


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the device, as measured."""

    read: float  # bytes per second
    matrix: float  # floating-point operations per second, in 16 bits

    @classmethod
    def measure(cls, shapes: Shapes) -> Limits:
        """By a sum over much memory, and the library's product of two large matrices."""
        data = torch.ones(shapes.read_bytes // 4, dtype=torch.float32, device=shapes.device)
        total = torch.empty((), device=shapes.device)
        read_s = seconds(shapes.device, lambda: torch.sum(data, 0, out=total), 5)
        size = shapes.matrix_size
        a, b = shapes.random(size, size), shapes.random(size, size)
        out = torch.empty_like(a)
        matrix_s = seconds(shapes.device, lambda: torch.matmul(a, b, out=out), 5)
        return cls(shapes.read_bytes / read_s, 2 * size**3 / matrix_s)

    def row(self, case: str, taken: float, num_bytes: float, num_operations: float) -> Row:
        """Beside whichever limit is the nearer."""
        limit, name = max((num_bytes / self.read, "memory"), (num_operations / self.matrix, "matrix"))
        return Row("timing", case, "measured", f"{taken * 1e6:.1f} us, {100 * limit / taken:.0f} % of the {name} limit")


@torch.inference_mode()
def timings(context: Context) -> Iterator[Row]:
    shapes = Shapes.of(context)
    limits = Limits.measure(shapes)
    yield Row("limit", "memory read", "measured", f"{limits.read / 1e9:.0f} GB/s")
    yield Row("limit", "16-bit product", "measured", f"{limits.matrix / 1e12:.0f} TFLOP/s")
    yield from _steps(context, shapes, limits)  # first: what matters most, should time run out
    yield from _products(context, shapes, limits)
    yield from _attention(context, shapes, limits)


def _products(context: Context, shapes: Shapes, limits: Limits) -> Iterator[Row]:
    ops = context.ops
    for in_features, out_features in shapes.products:
        # several copies, so that weights come from memory and not from the cache
        copies = max(1, (1 << 28) // (in_features * out_features)) if shapes.device.type == "cuda" else 1
        weights = [shapes.random(out_features, in_features) for _ in range(copies)]
        packed = [ops.pack_linear(weight, None) for weight in weights]
        for num_rows in shapes.product_rows:
            x = shapes.random(num_rows, in_features)
            out = x.new_empty(num_rows, out_features)
            turn = iter(range(1 << 30))
            taken = seconds(shapes.device, lambda: ops.linear(x, packed[next(turn) % copies], out=out))  # noqa: B023 (called here)
            size = in_features * out_features
            case = f"linear {in_features}x{out_features}, {num_rows} rows"
            yield limits.row(case, taken, 2.0 * size, 2.0 * num_rows * size)


def _attention(context: Context, shapes: Shapes, limits: Limits) -> Iterator[Row]:
    block_size, prompt = shapes.block_size, shapes.prompt
    for num_seqs, total in shapes.decodes:
        layout = moved(make_layout([(1, total)] * num_seqs, block_size), context.device)
        case, num = f"decode, {num_seqs} x {total}", num_seqs * total
        yield _attention_row(context, shapes, limits, layout, case, num, num)
    layout = moved(make_layout([(prompt, prompt)], block_size), context.device)
    yield _attention_row(context, shapes, limits, layout, f"prefill of {prompt}", prompt, prompt * (prompt + 1) / 2)


def _attention_row(
    context: Context, shapes: Shapes, limits: Limits, layout: StepLayout, case: str, num_read: float, num_pairs: float
) -> Row:
    ops, (num_heads, num_kv_heads, head_dim) = context.ops, shapes.heads
    num_tokens = layout.slots.shape[0]
    cache = shapes.random(layout.block_tables.numel(), num_kv_heads, 1, 2, shapes.block_size, head_dim)
    query = shapes.random(num_tokens, num_heads, head_dim)
    out = query.new_empty(num_tokens, num_heads * head_dim)
    plan = ops.plan_step(layout, cache, num_heads)
    taken = seconds(shapes.device, lambda: ops.paged_attention(query, cache, 0, plan, head_dim**-0.5, out=out))
    num_bytes, num_operations = 4.0 * num_read * num_kv_heads * head_dim, 4.0 * num_pairs * num_heads * head_dim
    return limits.row(f"attention {case}", taken, num_bytes, num_operations)


def _steps(context: Context, shapes: Shapes, limits: Limits) -> Iterator[Row]:
    """Recorded decode steps of a random model, sampling included, before and after tuning."""
    config, max_seqs, max_len = shapes.model, shapes.num_seqs[-1], shapes.max_len
    weights = shapes.random_weights()
    num_bytes = 2 * (
        sum(one.numel() for layer in weights.layers for one in _products_of(layer)) + weights.embedding.numel()
    )
    cache = KVCache(config, max_seqs * max_len // shapes.block_size, shapes.block_size, shapes.dtype, shapes.device)
    cache.tensor.zero_()
    runner = ModelRunner(config, weights, cache, max_num_seqs=max_seqs, max_model_len=max_len, ops=context.ops)
    for tuned in (False, True):
        if tuned:
            yield _tune(context, shapes, runner)
        runner.record()
        for num_seqs in shapes.num_seqs:
            taken = replay_seconds(runner, num_seqs)
            share = 100 * num_bytes / limits.read / taken
            case = f"decode step, {num_seqs} sequences, {'tuned' if tuned else 'defaults'}"
            detail = f"{taken * 1e3:.2f} ms, {num_seqs / taken:.0f} tokens/s, weights alone {share:.0f} % of it"
            yield Row("timing", case, "measured", detail)
    detail = f"{runner.num_ops_per_decode_step}; 8 x {config.num_layers} + 6 = {8 * config.num_layers + 6}"
    yield Row("model", f"{shapes.name}, kernels per step", "measured", detail)


def _tune(context: Context, shapes: Shapes, runner: ModelRunner) -> Row:
    assert isinstance(context.ops, TunableOps)
    max_seqs = shapes.num_seqs[-1]
    workload = tuning_workload(
        shapes.model,
        runner.decoder.linears,
        dtype=str(shapes.dtype).removeprefix("torch."),
        block_size=shapes.block_size,
        max_num_batched_tokens=max_seqs,
        max_num_seqs=max_seqs,
        max_model_len=shapes.max_len,
    )
    tunables = context.ops.tunables(workload)
    key = context.ops.device_key()
    report = tune(tunables, key, None, deadline_s=shapes.tuning_s, progress=lambda *_: None)
    context.ops.use_choices(report.choices)
    detail = f"{report.count('measured')} of {len(tunables)} measured"
    return Row("tuning", f"{shapes.name}, {shapes.tuning_s:.0f} s", "measured", detail)


@torch.inference_mode()
def replay_seconds(runner: ModelRunner, num_seqs: int) -> float:
    """One replay at short contexts, by the device's clock."""
    decode = runner._decode
    assert decode is not None
    bucket = next(one for one in decode._buckets if one >= num_seqs)
    decode._device.query_starts[: bucket + 1].copy_(torch.arange(bucket + 1).clamp(max=num_seqs))
    decode._device.context_lens[:bucket].fill_(1)
    device = decode._device.packed.device
    return timed(device, decode._recorded[bucket].whole.replay, 20 if device.type == "cuda" else 1)


def _products_of(layer: LayerWeights) -> tuple[Tensor, ...]:
    return (layer.qkv, layer.output, layer.gate_up, layer.down)
