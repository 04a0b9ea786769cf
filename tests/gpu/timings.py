"""How fast: the memory and matrix limits as measured here, then kernels and whole decode steps beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from op_checks import make_layout, moved
from report import Context, Row
from torch import Tensor

from tandem.kernels.autotune import TunableOps, tune
from tandem.workers.kv_cache import KVCache
from tandem.workers.model_runner import ModelRunner
from tandem.workers.models.config import ModelConfig, RopeConfig
from tandem.workers.models.weights import LayerWeights, ModelWeights
from tandem.workers.warm_up import tuning_workload

_DTYPE = torch.bfloat16


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """The median of one call, in a graph of ten, by the device's clock."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    graph.replay()
    times = []
    for _ in range(repeats):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 10_000)
    return sorted(times)[len(times) // 2]


def read_limit() -> float:
    """Bytes per second of reading: a sum over 4 GiB."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    out = torch.empty((), device="cuda")
    return data.numel() * 4 / seconds(lambda: torch.sum(data, 0, out=out), 5)


def matrix_limit() -> float:
    """Floating-point operations per second of the library's product of 8,192 x 8,192 in bfloat16."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=_DTYPE) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.matmul(a, b, out=out), 5)


def timings(context: Context) -> Iterator[Row]:
    if context.device.type != "cuda":
        yield Row("timing", "all", "skipped", "no GPU")
        return
    read, matrix = read_limit(), matrix_limit()
    yield Row("limit", "memory read", "measured", f"{read / 1e9:.0f} GB/s")
    yield Row("limit", "bfloat16 product", "measured", f"{matrix / 1e12:.0f} TFLOP/s")
    yield from _products(context, read, matrix)
    yield from _attention(context, read, matrix)
    yield from _steps(context, read)


def _products(context: Context, read: float, matrix: float) -> Iterator[Row]:
    ops = context.ops
    for in_features, out_features in ((4096, 6144), (4096, 4096), (14336, 4096), (4096, 128_256)):
        # several copies, so that weights come from memory and not from the cache
        copies = max(1, (1 << 28) // (in_features * out_features))
        weights = [torch.randn(out_features, in_features, device="cuda", dtype=_DTYPE) for _ in range(copies)]
        packed = [ops.pack_linear(weight, None) for weight in weights]
        for num_rows in (1, 32, 2048):
            x = torch.randn(num_rows, in_features, device="cuda", dtype=_DTYPE)
            out = torch.empty(num_rows, out_features, device="cuda", dtype=_DTYPE)
            turn = iter(range(1 << 30))
            taken = seconds(lambda: ops.linear(x, packed[next(turn) % copies], out=out))  # noqa: B023 (called here)
            yield _share(f"linear {in_features}x{out_features}, {num_rows} rows", taken, read, matrix,
                         2.0 * in_features * out_features, 2.0 * num_rows * in_features * out_features)  # fmt: skip


def _share(case: str, taken: float, read: float, matrix: float, num_bytes: float, num_operations: float) -> Row:
    """Beside whichever limit is the nearer."""
    by_memory, by_matrix = num_bytes / read, num_operations / matrix
    limit, name = max((by_memory, "memory"), (by_matrix, "matrix"))
    return Row("timing", case, "measured", f"{taken * 1e6:.1f} us, {100 * limit / taken:.0f} % of the {name} limit")


def _attention(context: Context, read: float, matrix: float) -> Iterator[Row]:
    ops, num_heads, num_kv_heads, head_dim, block_size = context.ops, 32, 8, 128, 32
    for num_seqs, total in ((1, 2048), (1, 8192), (32, 2048), (64, 8192)):
        layout = moved(make_layout([(1, total)] * num_seqs, block_size), context.device)
        yield _attention_row(ops, layout, num_heads, num_kv_heads, head_dim, read, matrix,
                             f"decode, {num_seqs} x {total}", num_seqs * total, num_seqs * total)  # fmt: skip
    layout = moved(make_layout([(2048, 2048)], block_size), context.device)
    yield _attention_row(ops, layout, num_heads, num_kv_heads, head_dim, read, matrix,
                         "prefill of 2048", 2048, 2048 * 2049 / 2)  # fmt: skip


def _attention_row(ops, layout, num_heads, num_kv_heads, head_dim, read, matrix, case, num_read, num_pairs):  # type: ignore[no-untyped-def]
    num_tokens = layout.slots.shape[0]
    shape = (layout.block_tables.numel(), num_kv_heads, 1, 2, 32, head_dim)
    cache = torch.randn(shape, device="cuda", dtype=_DTYPE)
    query = torch.randn(num_tokens, num_heads, head_dim, device="cuda", dtype=_DTYPE)
    out = torch.empty(num_tokens, num_heads * head_dim, device="cuda", dtype=_DTYPE)
    plan = ops.plan_step(layout, cache, num_heads)
    taken = seconds(lambda: ops.paged_attention(query, cache, 0, plan, head_dim**-0.5, out=out))
    num_bytes, num_operations = 4.0 * num_read * num_kv_heads * head_dim, 4.0 * num_pairs * num_heads * head_dim
    return _share(f"attention {case}", taken, read, matrix, num_bytes, num_operations)


def qwen_config() -> ModelConfig:
    """The shape of Qwen2.5-1.5B."""
    return ModelConfig("qwen2", 151_936, 1536, 8960, 28, 12, 2, 128, 1e-6, 4096, True, RopeConfig(1_000_000.0))


def _steps(context: Context, read: float) -> Iterator[Row]:
    """Recorded decode steps of a random model, sampling included, before and after tuning."""
    config = qwen_config()
    weights = random_weights(config)
    max_seqs, max_len = 32, 1024
    num_bytes = 2 * (
        sum(one.numel() for layer in weights.layers for one in _tensors(layer)) + weights.embedding.numel()
    )
    cache = KVCache(config, max_seqs * max_len // 32, 32, _DTYPE, "cuda")
    cache.tensor.zero_()
    runner = ModelRunner(config, weights, cache, max_num_seqs=max_seqs, max_model_len=max_len, ops=context.ops)
    for tuned in (False, True):
        if tuned:
            assert isinstance(context.ops, TunableOps)
            workload = tuning_workload(
                config, runner.decoder.linears, dtype="bfloat16", block_size=32,
                max_num_batched_tokens=max_seqs, max_num_seqs=max_seqs, max_model_len=max_len,
            )  # fmt: skip
            device_key = context.ops.device_key()
            report = tune(context.ops.tunables(workload), device_key, None, deadline_s=60.0, progress=lambda *_: None)
            context.ops.use_choices(report.choices)
            yield Row("tuning", "Qwen2.5-1.5B shape, 60 s", "measured", f"{report.count('measured')} measured")
        runner.record()
        for num_seqs in (1, 8, 32):
            taken = replay_seconds(runner, num_seqs)
            share = 100 * num_bytes / read / taken
            case = f"decode step, {num_seqs} sequences, {'tuned' if tuned else 'defaults'}"
            detail = f"{taken * 1e3:.2f} ms, {num_seqs / taken:.0f} tokens/s, weights alone {share:.0f} % of it"
            yield Row("timing", case, "measured", detail)
    yield Row("model", "Qwen2.5-1.5B shape, kernels per step", "measured",
              f"{runner.num_ops_per_decode_step}; 9 x 28 + 6 = {9 * 28 + 6}")  # fmt: skip


def replay_seconds(runner: ModelRunner, num_seqs: int) -> float:
    """One replay at short contexts, by the device's clock."""
    decode = runner._decode
    assert decode is not None
    bucket = next(one for one in decode._buckets if one >= num_seqs)
    decode._device.query_starts[: bucket + 1].copy_(torch.arange(bucket + 1).clamp(max=num_seqs))
    decode._device.context_lens[:bucket].fill_(1)
    replay = decode._recorded[bucket].whole.replay
    times = []
    for _ in range(20):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1000)
    return sorted(times)[10]


def _tensors(layer: LayerWeights) -> tuple[Tensor, ...]:
    return (layer.qkv, layer.output, layer.gate_up, layer.down)


def random_weights(config: ModelConfig) -> ModelWeights:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=_DTYPE) * shape[-1] ** -0.5

    hidden, inner = config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    qkv_size = query_size + 2 * config.num_kv_heads * config.head_dim
    norm = torch.ones(hidden, dtype=_DTYPE, device="cuda")
    layers = tuple(
        LayerWeights(
            *(norm, random(qkv_size, hidden), random(qkv_size), None, None, random(hidden, query_size), None),
            *(norm, random(2 * inner, hidden), None, random(hidden, inner), None),
        )
        for _ in range(config.num_layers)
    )
    embedding = random(config.vocab_size, hidden)
    return ModelWeights(embedding, layers, norm, embedding)
