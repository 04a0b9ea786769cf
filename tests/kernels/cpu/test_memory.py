"""Memory that the system may back with huge pages."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tandem.kernels.cpu.memory import WeightArena, huge_region


def flags_of(address: int) -> list[str]:
    """What the kernel says of the mapping at an address, as of /proc/self/smaps."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(match[1], 16) <= address < int(match[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping at {address:x}")


def test_a_region_is_private_zeroed_and_asks_for_huge_pages() -> None:
    region = huge_region(3 << 20)
    assert region.numel() == 3 << 20
    assert region.data_ptr() % (2 << 20) == 0
    assert not region.any()
    flags = flags_of(region.data_ptr())
    assert "sh" not in flags
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def test_parts_of_an_arena_are_apart_and_aligned() -> None:
    arena = WeightArena()
    parts = [arena.take(size) for size in (1, 64, 100, 80 << 20, 7)]
    for value, part in enumerate(parts):
        part[-1] = part[0] = value
    assert [int(part[0]) for part in parts] == list(range(5))
    assert all(part.data_ptr() % 64 == 0 and part.dtype == torch.uint8 for part in parts)
