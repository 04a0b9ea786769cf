"""The decoder of Llama, Mistral, Qwen2 and Qwen3: one forward pass over a step's tokens, written once for all.

The variants (biases, QK-norm, grouped heads, sliding windows, rotary scaling, tied embeddings) are in the
configuration and in which weights are None.
"""

from __future__ import annotations

from dataclasses import dataclass

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


class Decoder:
    """A model ready to run. Holds packed weights and the rotary table; the KV cache is the caller's."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: Ops, max_model_len: int) -> None:
        self._config = config
        self._ops = ops
        self._rope = build_rope_table(config, max_model_len)
        self._embedding = weights.embedding
        windows = config.sliding_window or (None,) * config.num_layers
        self._layers = [self._pack_layer(layer, window) for layer, window in zip(weights.layers, windows, strict=True)]
        self._final_norm = weights.final_norm
        self._lm_head = ops.pack_linear(weights.lm_head, None)

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
            gate_up=pack(weights.gate_up, weights.gate_up_bias),
            down=pack(weights.down, weights.down_bias),
        )

    def forward(self, token_ids: Tensor, kv_cache: Tensor, plan: StepPlan) -> Tensor:
        """Hidden states after the final norm, [num_tokens, hidden]. Writes the tokens' K and V into the cache.

        token_ids [num_tokens] int64; kv_cache [num_blocks, KVH, num_layers, 2, block_size, D]; plan as of `plan_step`.
        """
        ops, eps = self._ops, self._config.rms_norm_eps
        scale = self._config.head_dim**-0.5
        cos = ops.embedding(plan.layout.positions, self._rope.cos)
        sin = ops.embedding(plan.layout.positions, self._rope.sin)
        residual = ops.embedding(token_ids, self._embedding)
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            qkv = ops.linear(x, layer.qkv)
            query = ops.rope_and_write_kv(qkv, cos, sin, layer.qk_norm, kv_cache, index, plan)
            attended = ops.paged_attention(query, kv_cache, index, plan, scale, layer.window)
            x = ops.add_rms_norm(ops.linear(attended, layer.output), residual, layer.post_norm, eps)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
            x = ops.add_rms_norm(x, residual, next_norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary. hidden [num_rows, hidden], as `forward` returns them -> [num_rows, vocab]."""
        return self._ops.linear(hidden, self._lm_head)
