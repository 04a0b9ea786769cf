"""Weights in the order in which `native/linear.cpp` reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.cpu.memory import WeightArena
from tandem.kernels.ops import PackedLinear

PANEL = 32
"""Outputs that one thread computes together."""
STEP = 32
"""Inputs of one step, bfloat16."""


@dataclass(frozen=True, slots=True, eq=False)
class CpuLinear(PackedLinear):
    weight: Tensor  # in panels, see linear.cpp
    bias: Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> str:
        """As the tuner names it."""
        return f"{self.in_features}x{self.out_features}"


def pack(weight: Tensor, bias: Tensor | None, arena: WeightArena) -> CpuLinear:
    """weight [out_features, in_features], bias [out_features] or None. Copies the weight into the arena."""
    out_features, in_features = weight.shape
    panels = _pair_panels(weight) if weight.dtype == torch.bfloat16 else _panels(weight)
    memory = arena.take(panels.numel() * panels.element_size()).view(panels.dtype).view(panels.shape)
    memory.copy_(panels)
    return CpuLinear(in_features, out_features, memory, None if bias is None else bias.contiguous(), weight.dtype)


def _pair_panels(weight: Tensor) -> Tensor:
    """bfloat16 [outs, ins] -> int32 [panels, ins / 32, 2, 16 pairs, 16 outputs]."""
    out_features, in_features = weight.shape
    padded = F.pad(weight, (0, -in_features % STEP, 0, -out_features % PANEL)).contiguous()
    pairs = padded.view(torch.int32).view(padded.shape[0] // PANEL, 2, 16, padded.shape[1] // STEP, 16)
    return pairs.permute(0, 3, 1, 4, 2)


def _panels(weight: Tensor) -> Tensor:
    """[outs, ins] -> [panels, ins, 32 outputs]."""
    padded = F.pad(weight, (0, 0, 0, -weight.shape[0] % PANEL))
    return padded.view(-1, PANEL, weight.shape[1]).transpose(1, 2)
