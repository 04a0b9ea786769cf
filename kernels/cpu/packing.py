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
    """A weight in the order in which native/linear.cpp reads it, and what its rows are for."""

    weight: Tensor  # in panels, see linear.cpp
    bias: Tensor | None  # padded to whole panels
    dtype: torch.dtype
    is_gated: bool

    @property
    def shape(self) -> str:
        """As the tuner names it."""
        return f"{self.in_features}x{self.out_features}"

    @property
    def op(self) -> str:
        """The op that it is for, as the tuner names it."""
        return "gate_up_silu" if self.is_gated else "linear"


def pack(weight: Tensor, bias: Tensor | None, arena: WeightArena) -> CpuLinear:
    """weight [out_features, in_features], bias [out_features] or None. Copies the weight into the arena."""
    out_features, in_features = weight.shape
    return CpuLinear(in_features, out_features, *_packed(weight, bias, arena), weight.dtype, is_gated=False)


def pack_gated(weight: Tensor, bias: Tensor | None, arena: WeightArena) -> CpuLinear:
    """weight [2 * out_features, in_features], bias [2 * out_features]: gate, then up. A panel is 16 of each."""
    rows, in_features = weight.shape
    interleaved = None if bias is None else _interleaved(bias.unsqueeze(1)).flatten()
    packed = _packed(_interleaved(weight), interleaved, arena)
    return CpuLinear(in_features, rows // 2, *packed, weight.dtype, is_gated=True)


def _interleaved(stacked: Tensor) -> Tensor:
    """[2 * outs, ins] -> [panels * 32, ins]: 16 rows of the first half, 16 of the second, and so on."""
    half = PANEL // 2
    gate, up = (F.pad(part, (0, 0, 0, -part.shape[0] % half)) for part in stacked.chunk(2))
    pairs = torch.stack((gate.view(-1, half, stacked.shape[1]), up.view(-1, half, stacked.shape[1])), dim=1)
    return pairs.reshape(-1, stacked.shape[1])


def _packed(weight: Tensor, bias: Tensor | None, arena: WeightArena) -> tuple[Tensor, Tensor | None]:
    panels = _pair_panels(weight) if weight.dtype == torch.bfloat16 else _panels(weight)
    memory = arena.take(panels.numel() * panels.element_size()).view(panels.dtype).view(panels.shape)
    memory.copy_(panels)
    return memory, None if bias is None else F.pad(bias, (0, -bias.shape[0] % PANEL)).contiguous()


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
