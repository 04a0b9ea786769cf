"""The CPU backend: native ops, run one by one or recorded and replayed as one list.

Every method describes its op as a record and submits it. Outside a recording that runs it at once; inside, it joins the
list that `Captured.replay` runs in one native call.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from tandem.kernels.capture import Captured
from tandem.kernels.cpu import records
from tandem.kernels.cpu.build import X86, build_key, code_version, level_of_this_machine, load_library
from tandem.kernels.cpu.memory import WeightArena
from tandem.kernels.cpu.packing import CpuLinear, pack, pack_gated
from tandem.kernels.cpu.records import OpList
from tandem.kernels.cpu.tunables import attention_tunables, cpu_name, linear_tunables
from tandem.kernels.ops import (
    Constraints,
    PackedLinear,
    Penalties,
    QKNorm,
    Sampled,
    SamplingInputs,
    StepLayout,
    StepPlan,
)
from tandem.kernels.tuning import Candidate, Choices, DeviceKey, Tunable, TuningKey, TuningWorkload, bucket_of

T = TypeVar("T")

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

DEFAULT_LINEAR = Candidate.of(prefetch=4096, row_block=512)
"""Bytes of weight fetched ahead; rows that pass through several panels together."""
DEFAULT_ATTENTION = Candidate.of(query_block=128)
"""Query positions that one thread computes together."""


class CpuOps:
    """See `ops.Ops` for what each method computes. Uses `torch.get_num_threads()` threads."""

    name = "cpu"

    def __init__(self, level: str | None = None) -> None:
        """`level`: one of `build.LEVELS`; None: the best of this machine. Raises `build.BuildError`."""
        self.level = level or level_of_this_machine()
        self._library = load_library(self.level)
        self._arena = WeightArena()
        self._choices = Choices({})
        self._recording: OpList | None = None

    def numerics(self) -> str:
        machine = platform.machine()
        return f"cpu{'' if machine in X86 else f'-{machine}'}/{self.level}/{code_version()}"

    # Tuning

    def device_key(self) -> DeviceKey:
        """Times depend on the CPU, the instruction set, the threads, and on all that made the code."""
        versions = {"torch": str(torch.__version__), "native ops": build_key(self.level)}
        return DeviceKey(f"{cpu_name()} {self.level}", torch.get_num_threads(), versions)

    def tunables(self, workload: TuningWorkload) -> Sequence[Tunable]:
        """Linears first: they are most of every step."""
        return [*linear_tunables(self, workload), *attention_tunables(self, workload)]

    def use_choices(self, choices: Choices) -> None:
        """From now on run each op as chosen; what is recorded already stays as it is."""
        self._choices = choices

    # Recording

    def capture(self, step: Callable[[], T]) -> Captured[T]:
        """Record the ops of `step` without running them. The number of threads is fixed here."""
        assert self._recording is None, "captures do not nest"
        recording = OpList()
        num_threads = torch.get_num_threads()
        self._recording = recording
        try:
            result = step()
        finally:
            self._recording = None
        return Captured(result, lambda: recording.run(self._library, num_threads), len(recording))

    def run(self, step: Callable[[], T]) -> T:
        """All ops of `step` in one native call."""
        captured = self.capture(step)
        captured.replay()
        return captured.result

    def _submit(
        self, code: int, operands: Sequence[Tensor | None], sizes: Sequence[int], numbers: Sequence[float] = ()
    ) -> None:
        if self._recording is not None:
            self._recording.append(code, operands, sizes, numbers)
            return
        single = OpList()
        single.append(code, operands, sizes, numbers)
        single.run(self._library, torch.get_num_threads())

    # Ops

    def embedding(self, token_ids: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = table.new_empty(token_ids.shape[0], table.shape[1])
        row_bytes = table.shape[1] * table.element_size()
        self._submit(records.EMBEDDING, (token_ids, table, out), (token_ids.shape[0], row_bytes, table.shape[0]))
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        return self._norm(x, None, weight, eps, out)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor:
        return self._norm(x, residual, weight, eps, out)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
        if out is None:
            out = torch.empty_like(x)
        rows, width = x.shape
        sizes = (rows, width, _DTYPES[x.dtype], x.stride(0), out.stride(0))
        self._submit(records.RMS_NORM, (x, residual, weight, out), sizes, (eps,))
        return out

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return pack(weight, bias, self._arena)

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return pack_gated(weight, bias, self._arena)

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        assert isinstance(packed, CpuLinear)
        if out is None:
            out = x.new_empty(x.shape[0], packed.out_features)
        chosen = self._choice(packed.op, packed.shape, x.shape[0], x.dtype, DEFAULT_LINEAR)
        self.submit_linear(x, packed, out, chosen)
        return out

    def gate_up_silu(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        return self.linear(x, packed, out)

    def submit_linear(self, x: Tensor, packed: CpuLinear, out: Tensor, chosen: Candidate) -> None:
        """`linear` or `gate_up_silu`, run as chosen."""
        strides = (x.stride(0), out.stride(0))
        how = (chosen["prefetch"], chosen["row_block"])
        sizes = (x.shape[0], packed.in_features, packed.out_features, *strides, _DTYPES[x.dtype], *how, packed.is_gated)
        self._submit(records.LINEAR, (x, packed.weight, packed.bias, out), sizes)

    def _choice(self, op: str, shape: str, rows: int, dtype: torch.dtype, default: Candidate) -> Candidate:
        key = TuningKey(op, shape, bucket_of(max(rows, 1)), str(dtype).removeprefix("torch."))
        return self._choices.get(key) or default

    def plan_step(self, layout: StepLayout, kv_cache: Tensor, num_heads: int) -> StepPlan:
        num_kv_heads, block_size = kv_cache.shape[1], kv_cache.shape[4]
        if block_size & (block_size - 1):  # kernels find a position's place by shifting
            raise ValueError(f"kv_cache must have a power of two as block size, but has {block_size}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, but they are {num_kv_heads} and {num_heads}")
        return StepPlan(layout)

    def rope_and_write_kv(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        qk_norm: QKNorm | None,
        kv_cache: Tensor,
        layer: int,
        plan: StepPlan,
        out: Tensor | None = None,
    ) -> Tensor:
        _, num_kv_heads, _, _, block_size, head_dim = kv_cache.shape
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        if out is None:
            out = qkv.new_empty(qkv.shape[0], num_heads, head_dim)
        layout = plan.layout
        weights = (None, None) if qk_norm is None else (qk_norm.q_weight, qk_norm.k_weight)
        operands = (qkv, cos, sin, *weights, kv_cache, layout.slots, layout.query_starts, out)
        shape = (qkv.shape[0], layout.query_starts.shape[0] - 1, num_heads, num_kv_heads, head_dim, block_size)
        sizes = (*shape, *_cache_offsets(kv_cache, layer), _DTYPES[qkv.dtype])
        self._submit(records.ROPE_AND_WRITE_KV, operands, sizes, (0.0 if qk_norm is None else qk_norm.eps,))
        return out

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        layer: int,
        plan: StepPlan,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        rows, num_heads, head_dim = query.shape
        if out is None:
            out = query.new_empty(rows, num_heads * head_dim)
        shape = _attention_shape(query, kv_cache)
        chosen = self._choice("paged_attention", shape, rows, query.dtype, DEFAULT_ATTENTION)
        self.submit_attention(query, kv_cache, layer, plan, scale, window, softcap, out, chosen)
        return out

    def submit_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        layer: int,
        plan: StepPlan,
        scale: float,
        window: int | None,
        softcap: float | None,
        out: Tensor,
        chosen: Candidate,
    ) -> None:
        """`paged_attention`, run as chosen."""
        _, num_kv_heads, _, _, block_size, head_dim = kv_cache.shape
        rows, num_heads, _ = query.shape
        layout = plan.layout
        operands = (query, kv_cache, layout.query_starts, layout.context_lens, layout.block_tables, out)
        shape = (rows, layout.context_lens.shape[0], num_heads, num_kv_heads, head_dim, block_size)
        rest = (_DTYPES[query.dtype], layout.block_tables.stride(0), window or 0, chosen["query_block"])
        sizes = (*shape, *_cache_offsets(kv_cache, layer), *rest)
        self._submit(records.PAGED_ATTENTION, operands, sizes, (scale, softcap or 0.0))

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> Sampled:
        token_ids = torch.empty(logits.shape[0], dtype=torch.int64)
        sampled = _empty_sampled(token_ids, min(inputs.num_top_logprobs, logits.shape[1]), inputs.logprob_rows)
        how = (inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed, inputs.choice)
        self._submit_sampling(
            logits, sampled, inputs.logprob_rows, (*how, inputs.position), inputs.penalties, inputs.constraints
        )
        return sampled

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> Sampled:
        every_row = torch.arange(logits.shape[0])
        sampled = _empty_sampled(token_ids, min(num_top, logits.shape[1]), every_row)
        self._submit_sampling(logits, sampled, every_row)
        return sampled

    def _submit_sampling(
        self,
        logits: Tensor,
        sampled: Sampled,
        logprob_rows: Tensor | None,
        how: tuple[Tensor, ...] | None = None,
        penalties: Penalties | None = None,
        constraints: Constraints | None = None,
    ) -> None:
        """The record of sampling.cpp. `how`: its operands from temperature to position; None: the tokens are given."""
        outputs = (sampled.token_ids, sampled.logprobs, sampled.top_token_ids, sampled.top_logprobs)
        operands = (*(how or (None,) * 7), *_penalty_operands(penalties), logprob_rows, *outputs)
        counts = (
            0 if sampled.logprobs is None else sampled.logprobs.shape[0],
            0 if sampled.top_token_ids is None else sampled.top_token_ids.shape[1],
        )
        strides = (
            0 if penalties is None else penalties.token_ids.stride(0),
            0 if constraints is None else constraints.bias_token_ids.stride(0),
            0 if constraints is None else constraints.masks.stride(0),
        )
        sizes = (*logits.shape, _DTYPES[logits.dtype], logits.stride(0), *counts, *strides, how is None)
        self._submit(records.SAMPLE, (logits, *operands, *_constraint_operands(constraints)), sizes)


def _penalty_operands(penalties: Penalties | None) -> tuple[Tensor | None, ...]:
    if penalties is None:
        return (None,) * 6
    histories = (penalties.token_ids, penalties.prompt_lens, penalties.lens)
    return (*histories, penalties.presence, penalties.frequency, penalties.repetition)


def _constraint_operands(constraints: Constraints | None) -> tuple[Tensor | None, ...]:
    if constraints is None:
        return (None,) * 5
    biases = (constraints.bias_token_ids, constraints.biases, constraints.bias_lens)
    return (*biases, constraints.mask_rows, constraints.masks)


def _attention_shape(query: Tensor, kv_cache: Tensor) -> str:
    return f"{query.shape[1]}:{kv_cache.shape[1]}x{kv_cache.shape[5]}"


def _cache_offsets(kv_cache: Tensor, layer: int) -> tuple[int, int, int, int]:
    """Bytes: of a block, of a KV head in it, from there to the layer's K, and to its V."""
    size = kv_cache.element_size()
    block, head, one_layer, half = (kv_cache.stride(dim) * size for dim in range(4))
    return block, head, layer * one_layer, layer * one_layer + half


def _empty_sampled(token_ids: Tensor, num_top: int, logprob_rows: Tensor | None) -> Sampled:
    if logprob_rows is None:
        return Sampled(token_ids, None, None, None)
    count = logprob_rows.shape[0]
    top_token_ids = torch.empty(count, num_top, dtype=torch.int64)
    return Sampled(token_ids, torch.empty(count), top_token_ids, torch.empty(count, num_top))
