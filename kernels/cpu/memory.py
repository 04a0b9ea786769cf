"""Memory for weights and KV: large regions that the system may back with huge pages.

A decode step reads all weights and the KV of all its contexts once. With pages of 4 KiB that is a translation every
4 KiB, walked through two levels of tables on a virtual machine.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_REGION_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20
_LINE_BYTES = 64


class WeightArena:
    """Hands out zeroed memory, line-aligned, never given back before the arena and all its tensors are gone."""

    def __init__(self) -> None:
        self._region: Tensor | None = None
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]."""
        if self._region is None or self._used + num_bytes > self._region.numel():
            self._region = huge_region(max(num_bytes, _REGION_BYTES))
            self._used = 0
        start = self._used
        self._used += num_bytes + -num_bytes % _LINE_BYTES
        return self._region[start : start + num_bytes]


def huge_region(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], zeros, reserved but not touched."""
    # Private: Python shares by default, and shared memory gets huge pages only where the system is set up for it.
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]
