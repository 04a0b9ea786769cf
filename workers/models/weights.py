"""The weights of one model as the runtime wants them: stacked per GEMM, in the serving dtype."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections are [out_features, in_features], as in the checkpoint; a bias that it lacks is None."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]: q rows, then k rows, then v rows
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim], Qwen3
    k_norm: Tensor | None  # [head_dim], Qwen3
    output: Tensor  # [hidden, num_heads * head_dim]
    output_bias: Tensor | None
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]: gate rows, then up rows
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None

    def to(self, device: torch.device | str) -> LayerWeights:
        """On `device`; the same tensors if they are there."""
        tensors: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        moved: dict[str, Any] = {name: None if one is None else one.to(device) for name, one in tensors.items()}
        return LayerWeights(**moved)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a model, on one device and in one dtype."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]; the embedding itself when tied

    def to(self, device: torch.device | str) -> ModelWeights:
        """On `device`; the same tensors if they are there. What is tied stays tied."""
        embedding = self.embedding.to(device)
        is_tied = self.lm_head is self.embedding
        return ModelWeights(
            embedding=embedding,
            layers=tuple(layer.to(device) for layer in self.layers),
            final_norm=self.final_norm.to(device),
            lm_head=embedding if is_tied else self.lm_head.to(device),
        )
