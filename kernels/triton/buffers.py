"""Memory that ops share from step to step: partial sums, counters, scratch rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.triton.launch import next_power_of_two


class Buffers:
    """One zero-initialised buffer per use; grows by powers of two.

    A buffer that was outgrown stays alive, because a captured step may still point to it.
    """

    def __init__(self) -> None:
        self._current: dict[str, Tensor] = {}
        self._outgrown: list[Tensor] = []

    def get(self, use: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """At least `size` elements. Allocates if the buffer is smaller so far (or was on another device)."""
        buffer = self._current.get(use)
        if buffer is None or buffer.numel() < size or buffer.device != device:
            if buffer is not None:
                self._outgrown.append(buffer)
            buffer = torch.zeros(next_power_of_two(max(size, 16)), dtype=dtype, device=device)
            self._current[use] = buffer
        return buffer
