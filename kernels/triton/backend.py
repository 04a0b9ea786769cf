"""The GPU backend: launchers of this folder behind the interface of `ops.Ops`.

Everything that outlives a step (weights, workspaces) is allocated at load or when a step is planned; with `out` given,
no op allocates or waits for the device. One object serves one stream: its workspaces are shared by all ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tandem.kernels.capture import Captured
from tandem.kernels.ops import PackedLinear, QKNorm, Sampled, SamplingInputs, StepLayout, StepPlan
from tandem.kernels.triton import activation, attention, embedding, linear, norm, rope, sampling
from tandem.kernels.triton.buffers import Buffers
from tandem.kernels.triton.device import architecture_of
from tandem.kernels.triton.graph import GraphRecorder
from tandem.kernels.triton.launch import CountedLaunch, DeviceLaunch, check_index
from tandem.kernels.triton.tuning import Tuning, Workbench, device_key, numerics
from tandem.kernels.tuning import Choices, DeviceKey, Tunable, TuningWorkload

T = TypeVar("T")

_HEAD_DIMS = range(32, 257, 2)


@dataclass(frozen=True, slots=True, eq=False)
class _TritonPlan(StepPlan):
    workspace: attention.SplitWorkspace


class TritonOps:
    """See `ops.Ops` for what each method computes. Raises `ValueError` for layouts that the kernels do not read."""

    name = "triton"

    def __init__(self, launch: CountedLaunch | None = None) -> None:
        self._launch = DeviceLaunch() if launch is None else launch
        self._buffers = Buffers()
        self._tuning = Tuning()
        self._recorder = GraphRecorder()

    def numerics(self) -> str:
        return numerics(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def embedding(self, token_ids: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = table.new_empty(token_ids.shape[0], table.shape[1])
        embedding.embedding(self._launch, token_ids, table, out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        out = torch.empty_like(x) if out is None else out
        norm.rms_norm(self._launch, x, None, weight, eps, out)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor:
        out = torch.empty_like(x) if out is None else out
        norm.rms_norm(self._launch, x, residual, weight, eps, out)
        return out

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        packed = linear.pack_linear(weight, bias)
        linear.workspace_for(packed, self._buffers)  # so that no step has to allocate it
        return packed

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        assert isinstance(packed, linear.TritonLinear)
        out = x.new_empty(x.shape[0], packed.out_features) if out is None else out
        if x.shape[0]:
            candidate = self._tuning.linear(x.shape[0], packed)
            linear.linear(self._launch, x, packed, out, linear.workspace_for(packed, self._buffers), candidate)
        return out

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return activation.pack_gate_up(weight, bias)

    def gate_up_silu(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        assert isinstance(packed, activation.TritonGateUp)
        out = x.new_empty(x.shape[0], packed.out_features) if out is None else out
        if x.shape[0]:
            activation.gate_up_silu(self._launch, x, packed, out, self._tuning.gate_up(x.shape[0], packed))
        return out

    def plan_step(self, layout: StepLayout, kv_cache: Tensor, num_heads: int) -> StepPlan:
        _, num_kv_heads, _, _, block_size, head_dim = kv_cache.shape
        num_seqs = layout.context_lens.shape[0]
        if head_dim not in _HEAD_DIMS or num_heads % num_kv_heads:
            raise ValueError(
                f"head_dim must be even and 32 to 256, and num_kv_heads divide num_heads, "
                f"but they are {head_dim}, {num_kv_heads} and {num_heads}"
            )
        if not kv_cache.is_contiguous() or block_size & (block_size - 1):
            raise ValueError(f"kv_cache must be contiguous, with a power of two as block size, but has {block_size}")
        check_index("positions", layout.positions, (layout.slots.shape[0],))
        check_index("slots", layout.slots, (layout.slots.shape[0],))
        check_index("query_starts", layout.query_starts, (num_seqs + 1,))
        check_index("block_tables", layout.block_tables, (num_seqs, layout.block_tables.shape[1]))
        heads = attention.Heads(num_heads, num_kv_heads, head_dim, kv_cache.dtype)
        return _TritonPlan(layout, attention.workspace_for(layout, heads, block_size, self._buffers))

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
        _, num_kv_heads, _, _, _, head_dim = kv_cache.shape
        if out is None:
            out = qkv.new_empty(qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads, head_dim)
        rope.rope_and_write_kv(self._launch, qkv, cos, sin, qk_norm, kv_cache, layer, plan.layout, out)
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
        assert isinstance(plan, _TritonPlan)
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2]) if out is None else out
        if query.shape[0]:
            candidate = self._tuning.attention(query, kv_cache, plan.layout, window)
            attention.paged_attention(
                *(self._launch, query, kv_cache, layer, plan.layout, scale, window, softcap, out),
                *(plan.workspace, candidate, architecture_of(query.device)),
            )
        return out

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> Sampled:
        scratch = self._buffers.get("sampling logits", logits.numel(), torch.float32, logits.device)
        size = 0 if inputs.penalties is None else logits.numel()
        counts = self._buffers.get("sampling counts", size, torch.int32, logits.device)
        return sampling.sample(self._launch, logits, inputs, scratch, counts)

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> Sampled:
        return sampling.score(self._launch, logits, token_ids, num_top)

    def capture(self, step: Callable[[], T]) -> Captured[T] | None:
        return self._recorder.capture(step, self._launch) if torch.cuda.is_available() else None

    def run(self, step: Callable[[], T]) -> T:
        return step()

    def device_key(self) -> DeviceKey:
        return device_key(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def tunables(self, workload: TuningWorkload) -> Sequence[Tunable]:
        return Workbench(self._launch, self._buffers, workload).tunables()

    def use_choices(self, choices: Choices) -> None:
        self._tuning.use(choices)
