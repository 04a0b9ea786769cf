"""A random Llama of two layers, in this process and without a file."""

from __future__ import annotations

import torch

from tandem.workers.models.config import ModelConfig, RopeConfig
from tandem.workers.models.weights import LayerWeights, ModelWeights

CONFIG = ModelConfig("llama", 499, 64, 96, 2, 6, 2, 16, 1e-5, 512, True, RopeConfig(10000.0))


def random_weights(dtype: torch.dtype) -> ModelWeights:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    norm = torch.ones(64, dtype=dtype)
    layers = tuple(
        LayerWeights(
            input_norm=norm,
            qkv=random(160, 64),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            output=random(64, 96),
            output_bias=None,
            post_norm=norm,
            gate_up=random(192, 64),
            gate_up_bias=None,
            down=random(64, 96),
            down_bias=None,
        )
        for _ in range(2)
    )
    embedding = random(499, 64) * 2
    return ModelWeights(embedding, layers, norm, embedding)
