"""`tandem bench ops`: operations per decoded token, ours and Hugging Face's, counted for one architecture.

Counts do not depend on widths, so the model is as narrow as its heads allow; layers and heads are the real ones.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tandem.cluster.bench.count_ops import count_transformers, count_while
from tandem.cluster.bench.random_models import Shape, shape_of
from tandem.kernels.capture import Captured
from tandem.kernels.ops import Ops
from tandem.workers.batch import Batch, BatchItem, SampleSpec
from tandem.workers.kv_cache import KVCache
from tandem.workers.model_runner import ModelRunner
from tandem.workers.models.config import ModelConfig, RopeConfig
from tandem.workers.models.weights import LayerWeights, ModelWeights
from tandem.workers.types import SamplingParams

T = TypeVar("T")

OPS_PER_LAYER, OTHER_OPS = 9, 6
_WIDTH = 64
_BLOCK_SIZE = 32
_CONTEXT = 8


@dataclass(frozen=True, slots=True)
class OpCount:
    """What one more token costs. `host_calls`: from Python into native code, replays and torch ops (views excluded)."""

    what: str
    ops: int
    host_calls: int


@dataclass(frozen=True, slots=True)
class OpsReport:
    """One architecture: ours beside the others."""

    shape: str
    num_layers: int
    ours: OpCount
    by_name: dict[str, int]
    """Ours, by the name of the op."""
    theirs: tuple[OpCount, ...]

    @property
    def limit(self) -> int:
        """Nine ops a layer, and six around them."""
        return OPS_PER_LAYER * self.num_layers + OTHER_OPS

    @property
    def is_within(self) -> bool:
        return self.ours.ops <= self.limit and self.ours.host_calls <= 1


def bench_ops(shape_name: str, ops: Ops, progress: Callable[[str], None]) -> OpsReport:
    """Count a decode step of `ops`, and Hugging Face's for the same shape. Raises `UserError` for an unknown shape."""
    shape = narrow(shape_of(shape_name))
    progress(f"tandem, {ops.name}")
    ours, by_name = count_ours(shape, ops)
    theirs = []
    for attention in ("eager", "sdpa"):
        for dtype, fused in itertools.product((torch.float32, torch.bfloat16), (False, True)):
            what = f"transformers, {attention}, {str(dtype).removeprefix('torch.')}"
            what += ", RMSNorm and SwiGLU fused" if fused else ""
            progress(what)
            count = count_transformers(shape, attention=attention, dtype=dtype, fused=fused)
            theirs.append(OpCount(what, count, count))
    return OpsReport(shape_name, shape.layers, ours, by_name, tuple(theirs))


def narrow(shape: Shape) -> Shape:
    """The same layers and heads with little behind them."""
    return replace(shape, hidden=_WIDTH * shape.heads, intermediate=_WIDTH, vocab=_WIDTH)


class _CountingOps:
    """Passes everything on to `ops`, and counts: ops by name since the last recording began, replays since ever."""

    COUNTED = (
        "embedding",
        "rms_norm",
        "add_rms_norm",
        "linear",
        "silu_mul",
        "gate_up_silu",
        "rope_and_write_kv",
        "paged_attention",
        "sample",
    )

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.calls: Counter[str] = Counter()
        self.replays = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._ops, name)
        if name not in self.COUNTED:
            return attribute

        def counted(*arguments: Any, **named: Any) -> Any:
            self.calls[name] += 1
            return attribute(*arguments, **named)

        return counted

    def capture(self, step: Callable[[], T]) -> Captured[T] | None:
        self.calls.clear()
        captured = self._ops.capture(step)
        if captured is None:
            return None

        def replay() -> None:
            self.replays += 1
            captured.replay()

        return Captured(captured.result, replay, captured.num_ops)


def count_ours(shape: Shape, ops: Ops) -> tuple[OpCount, dict[str, int]]:
    """A decode step of one stream, as a worker runs it: what was recorded, and what running it once more calls.

    A backend that records nothing is counted as it computes, op by op.
    """
    counting = _CountingOps(ops)
    runner = _runner(shape, cast(Ops, counting))
    is_recorded = runner.record()
    by_name = dict(counting.calls)  # of what was recorded last: the whole step
    batch = _decode_batch()
    runner.execute(batch)  # the first of its kind may do more
    counting.calls.clear()
    counting.replays = 0
    torch_ops = count_while(lambda: runner.execute(batch)).total()
    if is_recorded:
        host_calls = counting.replays + torch_ops
        return OpCount(f"tandem, {ops.name}, recorded", runner.num_ops_per_decode_step, host_calls), by_name
    return OpCount(f"tandem, {ops.name}, not recorded", torch_ops, torch_ops), dict(counting.calls)


def _decode_batch() -> Batch:
    tokens = list(range(_CONTEXT + 1))
    sample = SampleSpec(SamplingParams(max_tokens=8, seed=0, temperature=0.0), 0, _CONTEXT + 1, tokens, _CONTEXT)
    return Batch((BatchItem(tokens[_CONTEXT:], _CONTEXT, (0,), sample),))


def _runner(shape: Shape, ops: Ops) -> ModelRunner:
    head_dim = shape.hidden // shape.heads
    config = ModelConfig(
        architecture="qwen2",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        max_position_embeddings=_BLOCK_SIZE,
        tie_word_embeddings=True,
        rope=RopeConfig(theta=1e6),
        attention_bias=True,
    )
    kv_cache = KVCache(config, 1, _BLOCK_SIZE, torch.bfloat16, "cpu")
    kv_cache.tensor.zero_()
    return ModelRunner(config, _weights(config), kv_cache, max_num_seqs=1, max_model_len=_BLOCK_SIZE, ops=ops)


def _weights(config: ModelConfig) -> ModelWeights:
    def weight(*size: int) -> Tensor:
        return torch.full(size, 0.01, dtype=torch.bfloat16)

    hidden, inner, query = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    qkv = query + 2 * config.num_kv_heads * config.head_dim
    layer = LayerWeights(
        input_norm=weight(hidden),
        qkv=weight(qkv, hidden),
        qkv_bias=weight(qkv),
        q_norm=None,
        k_norm=None,
        output=weight(hidden, query),
        output_bias=None,
        post_norm=weight(hidden),
        gate_up=weight(2 * inner, hidden),
        gate_up_bias=None,
        down=weight(hidden, inner),
        down_bias=None,
    )
    embedding = weight(config.vocab_size, hidden)
    return ModelWeights(embedding, (layer,) * config.num_layers, weight(hidden), embedding)


def print_ops_report(report: OpsReport, console: Console) -> None:
    table = Table(title=f"Operations per decoded token, {report.shape}, views excluded", title_justify="left")
    table.add_column("engine")
    for heading in ("operations", "host calls", "of the first"):
        table.add_column(heading, justify="right")
    for count in (report.ours, *report.theirs):
        times = f"{count.ops / report.ours.ops:.1f}x"
        table.add_row(count.what, f"{count.ops:,}", f"{count.host_calls:,}", times)
    console.print(table)
    listed = ", ".join(f"{name} {count}" for name, count in report.by_name.items())
    verdict = "within" if report.is_within else "NOT within"
    rule = f"{OPS_PER_LAYER} x {report.num_layers} + {OTHER_OPS} = {report.limit} operations and 1 host call"
    console.print(f"Ours: {listed}; {verdict} {rule}.", highlight=False, soft_wrap=True)


def to_markdown(report: OpsReport) -> str:
    rows: Sequence[OpCount] = (report.ours, *report.theirs)
    lines = ["| engine | operations | host calls |", "| --- | ---: | ---: |"]
    lines += [f"| {count.what} | {count.ops:,} | {count.host_calls:,} |" for count in rows]
    return "\n".join(lines) + "\n"
