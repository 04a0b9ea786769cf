"""The decoder of Llama, Mistral, Qwen2 and Qwen3: one forward pass over a step's tokens, written once for all.

The variants (biases, QK-norm, grouped heads, sliding windows, rotary scaling, tied embeddings) are in the
configuration and in which weights are None.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tandem.kernels.ops import Ops, PackedLinear, QKNorm, StepPlan
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.rope import build_rope_table
from tandem.workers.models.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    input_norm: Tensor
    qkv: PackedLinear
    qk_norm: QKNorm | None
    window: int | None
    output: PackedLinear
    post_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True, eq=False)
class _Workspace:
    """The activations of one step, reused by every layer and every step."""

    cos: Tensor  # [num_tokens, head_dim / 2] float32
    sin: Tensor  # [num_tokens, head_dim / 2] float32
    residual: Tensor  # [num_tokens, hidden]
    x: Tensor  # [num_tokens, hidden]
    qkv: Tensor  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    query: Tensor  # [num_tokens, num_heads, head_dim]
    attended: Tensor  # [num_tokens, num_heads * head_dim]
    activated: Tensor  # [num_tokens, intermediate]
    projected: Tensor  # [num_tokens, hidden]

    def first(self, num_tokens: int) -> _Workspace:
        """Views of the first rows."""
        return _Workspace(**{each.name: getattr(self, each.name)[:num_tokens] for each in fields(self)})


class Decoder:
    """A model ready to run. Holds packed weights and the rotary table; the KV cache is the caller's.

    Activations live in buffers that the next `forward` overwrites. They grow when a step needs more than any before:
    whoever records steps calls `reserve` first, as a recorded step keeps the addresses that it saw.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: Ops, max_model_len: int) -> None:
        self._config = config
        self._ops = ops
        self._rope = build_rope_table(config, max_model_len).to(weights.embedding.device)
        self._embedding = weights.embedding
        windows = config.sliding_window or (None,) * config.num_layers
        self._layers = [self._pack_layer(layer, window) for layer, window in zip(weights.layers, windows, strict=True)]
        self._final_norm = weights.final_norm
        self._lm_head = ops.pack_linear(weights.lm_head, None)
        self.reserve(1)

    def reserve(self, num_tokens: int) -> None:
        """Make room for steps of so many tokens."""
        self._workspace = self._make_workspace(num_tokens)

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """All weights of matrix products, in the order of a forward pass, the language-model head last."""
        per_layer = ((layer.qkv, layer.output, layer.gate_up, layer.down) for layer in self._layers)
        return (*itertools.chain.from_iterable(per_layer), self._lm_head)

    def _pack_layer(self, weights: LayerWeights, window: int | None) -> _Layer:
        pack = self._ops.pack_linear
        qk_norm = None
        if weights.q_norm is not None and weights.k_norm is not None:
            qk_norm = QKNorm(weights.q_norm, weights.k_norm, self._config.rms_norm_eps)
        return _Layer(
            input_norm=weights.input_norm,
            qkv=pack(weights.qkv, weights.qkv_bias),
            qk_norm=qk_norm,
            window=window,
            output=pack(weights.output, weights.output_bias),
            post_norm=weights.post_norm,
            gate_up=self._ops.pack_gate_up(weights.gate_up, weights.gate_up_bias),
            down=pack(weights.down, weights.down_bias),
        )

    def forward(self, token_ids: Tensor, kv_cache: Tensor, plan: StepPlan) -> Tensor:
        """Hidden states after the final norm, [num_tokens, hidden], until the next call. Writes K and V to the cache.

        token_ids [num_tokens] int64; kv_cache [num_blocks, KVH, num_layers, 2, block_size, D]; plan as of `plan_step`.
        """
        ops, eps = self._ops, self._config.rms_norm_eps
        scale = self._config.head_dim**-0.5
        num_tokens = token_ids.shape[0]
        if num_tokens > self._workspace.x.shape[0]:
            self._workspace = self._make_workspace(num_tokens)
        work = self._workspace.first(num_tokens)
        ops.embedding(plan.layout.positions, self._rope.cos, out=work.cos)
        ops.embedding(plan.layout.positions, self._rope.sin, out=work.sin)
        ops.embedding(token_ids, self._embedding, out=work.residual)
        ops.rms_norm(work.residual, self._layers[0].input_norm, eps, out=work.x)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            ops.linear(work.x, layer.qkv, out=work.qkv)
            ops.rope_and_write_kv(work.qkv, work.cos, work.sin, layer.qk_norm, kv_cache, index, plan, out=work.query)
            ops.paged_attention(work.query, kv_cache, index, plan, scale, layer.window, out=work.attended)
            ops.linear(work.attended, layer.output, out=work.projected)
            ops.add_rms_norm(work.projected, work.residual, layer.post_norm, eps, out=work.x)
            ops.gate_up_silu(work.x, layer.gate_up, out=work.activated)
            ops.linear(work.activated, layer.down, out=work.projected)
            ops.add_rms_norm(work.projected, work.residual, next_norm, eps, out=work.x)
        return work.x

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits over the vocabulary. hidden [num_rows, hidden], as `forward` returns them -> [num_rows, vocab]."""
        return self._ops.linear(hidden, self._lm_head, out=out)

    def _make_workspace(self, num_tokens: int) -> _Workspace:
        config = self._config
        query_size = config.num_heads * config.head_dim
        like = self._embedding

        def rotary() -> Tensor:
            return like.new_empty(num_tokens, config.head_dim // 2, dtype=torch.float32)

        return _Workspace(
            cos=rotary(),
            sin=rotary(),
            residual=like.new_empty(num_tokens, config.hidden_size),
            x=like.new_empty(num_tokens, config.hidden_size),
            qkv=like.new_empty(num_tokens, query_size + 2 * config.num_kv_heads * config.head_dim),
            query=like.new_empty(num_tokens, config.num_heads, config.head_dim),
            attended=like.new_empty(num_tokens, query_size),
            activated=like.new_empty(num_tokens, config.intermediate_size),
            projected=like.new_empty(num_tokens, config.hidden_size),
        )
