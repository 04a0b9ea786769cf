"""Rotary position embedding: cosine and sine tables for every position that a worker can serve.

Frequencies follow the formulas of the published checkpoints' reference implementation (Hugging Face `transformers`),
in float32 as there; the scaling variants come from: linear (kaiokendev), dynamic NTK (bloc97, emozilla), YaRN
(arXiv:2309.00071), Llama 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.workers.models.config import ModelConfig, RopeConfig


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """Row p is position p; the attention factor of the scaling is multiplied in."""

    cos: Tensor  # [max_model_len, head_dim / 2] float32
    sin: Tensor  # [max_model_len, head_dim / 2] float32

    def to(self, device: torch.device) -> RopeTable:
        """On `device`; the same tensors if they are there."""
        return RopeTable(self.cos.to(device), self.sin.to(device))


def build_rope_table(config: ModelConfig, max_model_len: int) -> RopeTable:
    """The table for positions 0 to max_model_len - 1, computed on the CPU: the same bits for every device."""
    frequencies, attention_factor = rope_frequencies(config, max_model_len)
    # Angles in float32, as in the reference. Their cosines in float64, where the rounded result does not depend on the
    # instruction set or on the length of the table.
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies).double()
    return RopeTable((angles.cos() * attention_factor).float(), (angles.sin() * attention_factor).float())


def rope_frequencies(config: ModelConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Radians per position for each pair of dimensions, float32 [head_dim / 2], and the factor on cosine and sine."""
    rope, dim = config.rope, config.head_dim
    if rope.scaling == "linear":
        return _base_frequencies(rope.theta, dim) / rope.factor, 1.0
    if rope.scaling == "dynamic":
        return _base_frequencies(_dynamic_theta(config, max_model_len), dim), 1.0
    if rope.scaling == "llama3":
        return _llama3_frequencies(rope, dim, _trained_length(config)), 1.0
    if rope.scaling == "yarn":
        return _yarn_frequencies(rope, dim, _trained_length(config)), _yarn_attention_factor(rope)
    return _base_frequencies(rope.theta, dim), 1.0


def _base_frequencies(theta: float, dim: int) -> Tensor:
    return 1.0 / _powers(theta, dim)


def _powers(theta: float, dim: int) -> Tensor:
    """theta^(2i / dim), float32 [dim / 2]. In float64: float32 powers depend on the instruction set."""
    exponents = torch.arange(0, dim, 2).float() / dim
    return (theta ** exponents.double()).float()


def _trained_length(config: ModelConfig) -> int:
    return config.rope.original_max_position_embeddings or config.max_position_embeddings


def _dynamic_theta(config: ModelConfig, max_model_len: int) -> float:
    """Dynamic NTK stretches theta with the length of the text. Ours is fixed: for a text of max_model_len tokens.

    The reference recomputes it while the text grows, so that K of one and the same token depends on how long the text
    happened to be when the token was run: nothing could be cached or shared. A worker whose max_model_len does not
    exceed the trained length computes exactly what the reference does for its texts.
    """
    rope, dim = config.rope, config.head_dim
    stretch = max(max_model_len, config.max_position_embeddings) / config.max_position_embeddings
    return float(rope.theta * (rope.factor * stretch - (rope.factor - 1.0)) ** (dim / (dim - 2)))


def _llama3_frequencies(rope: RopeConfig, dim: int, trained: int) -> Tensor:
    """Long waves are divided by the factor, short ones kept, those between are interpolated."""
    frequencies = _base_frequencies(rope.theta, dim)
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = trained / rope.low_freq_factor, trained / rope.high_freq_factor
    smooth = (trained / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    result = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), between, result)


def _yarn_frequencies(rope: RopeConfig, dim: int, trained: int) -> Tensor:
    """Fast dimensions are extrapolated, slow ones interpolated, with a linear ramp between."""

    def dimension_of(num_rotations: float) -> float:
        return dim * math.log(trained / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp needs a slope
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = _powers(rope.theta, dim)
    extrapolated = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - extrapolated) + 1.0 / powers * extrapolated


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
