"""The reference backend: plain torch, and the definition of right that the other backends are tested against.

Torch does not promise batch invariance, so every op keeps to calls whose rows were measured not to depend on each
other (README.md; the tests compare bits):

* GEMMs run in row tiles of one fixed shape; a row's bits then depend neither on its place in the tile nor on its
  neighbours. With the number of rows as it comes, they do.
* Element-wise work uses operations that IEEE 754 defines to the last bit (+, -, *, /, sqrt, conversions), and `exp`.
  Never silu, sigmoid, addcmul or `add(alpha=)`: their vector and scalar forms differ, and which elements get the
  scalar form depends on the number of elements.
* Sums over the last dimension have a fixed order up to 32,767 elements; longer ones go through `cumsum`, which is
  sequential, because with several threads torch would split them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.capture import Captured
from tandem.kernels.compiler import fingerprint
from tandem.kernels.cpu.tunables import cpu_name
from tandem.kernels.ops import PackedLinear, QKNorm, Sampled, SamplingInputs, StepLayout, StepPlan
from tandem.kernels.reference_attention import AttentionPlan, attend, plan_attention
from tandem.kernels.reference_sampling import sample, score

T = TypeVar("T")

_ROW_TILE = {torch.bfloat16: 64, torch.float16: 32, torch.float32: 32}
"""Rows of one GEMM call. bfloat16 has matrix units, where 64 rows cost about what 4 do."""
_IN_FEATURES_STEP = 32
"""oneDNN reads a shorter last step of bfloat16 on into the next row, times zero: a NaN there would spoil this row."""
_ROWS_IN_CACHE = 64
"""Rows of one element-wise pass: temporaries as long as a whole chunk cost more in page faults than in maths."""


@dataclass(frozen=True, slots=True, eq=False)
class _ReferenceLinear(PackedLinear):
    weight: Tensor  # [out_features, in_features], or what oneDNN made of it
    bias: Tensor | None
    is_prepacked: bool
    num_rows: int  # of the weight: twice the out_features where gate and up are stacked

    def tile(self, rows: Tensor) -> Tensor:
        """One GEMM of the fixed shape."""
        if self.is_prepacked:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
            return result
        return F.linear(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class _ReferencePlan(StepPlan):
    write_rows: Tensor  # [num_tokens, num_kv_heads, 2]: rows of the cache as [rows, head_dim], for layer 0
    attention: AttentionPlan


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def _normalise(x: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def _as_words(tensor: Tensor) -> Tensor:
    """The same memory as int32, for copies: torch moves 2-byte elements several times slower."""
    return tensor.view(torch.int32)


class ReferenceOps:
    """See `ops.Ops` for what each method computes."""

    name = "reference"

    def numerics(self) -> str:
        """The libraries behind torch choose their code by the CPU."""
        capability = torch.backends.cpu.get_cpu_capability()
        words = [torch.__version__, capability, cpu_name()]
        return f"reference/{capability}/{fingerprint(words, sorted(Path(__file__).parent.glob('reference*.py')))}"

    def embedding(self, token_ids: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.index_select(table, 0, token_ids, out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        return _deliver(_normalise(x, eps).to(x.dtype) * weight, out)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps, out)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        out_features, in_features = weight.shape
        weight = F.pad(weight, (0, -in_features % _IN_FEATURES_STEP)).contiguous()
        can_prepack = weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        if can_prepack:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROW_TILE[weight.dtype])
        return _ReferenceLinear(in_features, out_features, weight, bias, can_prepack, out_features)

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        assert isinstance(packed, _ReferenceLinear)
        num_rows, tile = x.shape[0], _ROW_TILE[x.dtype]
        if out is None:
            out = x.new_empty(num_rows, packed.num_rows)
        for start in range(0, num_rows, tile):
            rows = x[start : start + tile]
            missing = tile - rows.shape[0]
            narrow = -packed.in_features % _IN_FEATURES_STEP
            if missing or narrow:
                rows = F.pad(rows, (0, narrow, 0, missing))
            out[start : start + tile] = packed.tile(rows)[: tile - missing]
        return out

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        packed = self.pack_linear(weight, bias)
        assert isinstance(packed, _ReferenceLinear)
        return replace(packed, out_features=weight.shape[0] // 2, num_rows=weight.shape[0])

    def gate_up_silu(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        return _silu_mul(self.linear(x, packed), out)

    def plan_step(self, layout: StepLayout, kv_cache: Tensor, num_heads: int) -> StepPlan:
        _, num_kv_heads, num_layers, _, block_size, _ = kv_cache.shape
        block, offset = layout.slots // block_size, layout.slots % block_size
        head = torch.arange(num_kv_heads).view(1, -1, 1)
        k_or_v = torch.arange(2).view(1, 1, -1)
        first_row = (block.view(-1, 1, 1) * num_kv_heads + head) * (num_layers * 2 * block_size)
        write_rows = first_row + k_or_v * block_size + offset.view(-1, 1, 1)
        return _ReferencePlan(layout, write_rows, plan_attention(layout, kv_cache, num_heads))

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
        assert isinstance(plan, _ReferencePlan)
        _, num_kv_heads, _, _, block_size, head_dim = kv_cache.shape
        heads = qkv.view(qkv.shape[0], -1, head_dim)  # [T, H + 2 * KVH, D]
        num_heads = heads.shape[1] - 2 * num_kv_heads
        query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if qk_norm is not None:
            query = self.rms_norm(query, qk_norm.q_weight, qk_norm.eps)
            key = self.rms_norm(key, qk_norm.k_weight, qk_norm.eps)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        stored = torch.stack((_rotate(key, cos, sin).to(kv_cache.dtype), value.to(kv_cache.dtype)), dim=2)
        rows = (plan.write_rows + layer * 2 * block_size).flatten()
        _as_words(kv_cache).view(-1, _words(kv_cache)).index_copy_(0, rows, _as_words(stored).view(-1, _words(stored)))
        return _deliver(_rotate(query, cos, sin).to(qkv.dtype), out)

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
        assert isinstance(plan, _ReferencePlan)
        if out is None:
            out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        attend(query, kv_cache, layer, plan.attention, scale, window, softcap, out)
        return out

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> Sampled:
        return sample(logits, inputs)

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> Sampled:
        return score(logits, token_ids, num_top)

    def capture(self, step: Callable[[], T]) -> Captured[T] | None:
        return None

    def run(self, step: Callable[[], T]) -> T:
        return step()


def _silu_mul(gate_up: Tensor, out: Tensor | None) -> Tensor:
    """gate / (1 + exp(-gate)) * up. gate_up [T, 2 * intermediate] -> [T, intermediate]."""
    num_rows, width = gate_up.shape
    if out is None:
        out = gate_up.new_empty(num_rows, width // 2)
    for start in range(0, num_rows, _ROWS_IN_CACHE):
        gate, up = gate_up[start : start + _ROWS_IN_CACHE].float().chunk(2, dim=-1)
        out[start : start + _ROWS_IN_CACHE] = (gate / torch.exp(-gate).add_(1.0)).mul_(up)
    return out


def _words(tensor: Tensor) -> int:
    """int32 words in one head vector."""
    return tensor.shape[-1] * tensor.element_size() // 4


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head. x [T, heads, D], cos and sin [T, 1, D / 2] -> float32 [T, heads, D]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
