"""What the launchers must know of a chip, and which tuning candidates fit it. Pure functions, no triton in here.

Every matrix product of one chip goes through one family of instructions, whatever the number of rows: another family
rounds its partial sums elsewhere, and a token would get other bits in a large batch than in a small one. On Hopper and
data-centre Blackwell that family needs tiles of at least 64 rows, so a single row travels with 63 rows of zeros. A
decode step waits for memory, not for the matrix units, and does not notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Architecture:
    """One generation of chips."""

    capability: int  # 10 * major + minor, as in "sm_90"
    shared_bytes: int  # that one block may use
    min_rows: int  # of a tile of a matrix product
    matrix_instruction: str  # in the PTX of a 16-bit product


_KIB = 1024
ARCHITECTURES = {
    80: Architecture(80, 163 * _KIB, 16, "mma.sync"),
    86: Architecture(86, 99 * _KIB, 16, "mma.sync"),
    89: Architecture(89, 99 * _KIB, 16, "mma.sync"),
    90: Architecture(90, 227 * _KIB, 64, "wgmma.mma_async"),
    100: Architecture(100, 227 * _KIB, 64, "tcgen05.mma"),
    120: Architecture(120, 99 * _KIB, 16, "mma.sync"),
}


@cache
def architecture_of(device: torch.device) -> Architecture:
    """The chip of `device`; a CPU, where kernels run in the interpreter, counts as the smallest.

    Raises `ValueError` for a chip older than sm_80.
    """
    if device.type != "cuda":
        return ARCHITECTURES[80]
    major, minor = torch.cuda.get_device_capability(device)
    known = [one for one in ARCHITECTURES.values() if one.capability // 10 == major and one.capability % 10 <= minor]
    if not known:
        raise ValueError(f"the triton backend needs sm_80 or newer, but {device} is sm_{major}{minor}")
    return known[-1]


@dataclass(frozen=True, slots=True)
class Tile:
    """How one block of threads works on a matrix product: [rows, columns] of the result, `depth` at a time."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def fits(tile: Tile, architecture: Architecture, itemsize: int, *, sums: int, operands: int) -> bool:
    """Whether a candidate runs on a chip without spilling, and in the chip's family of instructions.

    A program holds `sums` float32 tiles of the result's size, and `operands` tiles of weights per stage.
    """
    has_warp_groups = architecture.min_rows > 16
    if itemsize == 2 and (tile.rows < architecture.min_rows or (has_warp_groups and tile.num_warps % 4)):
        return False
    shared = tile.num_stages * (tile.rows + operands * tile.columns) * tile.depth * itemsize
    registers = sums * tile.rows * tile.columns // (32 * tile.num_warps)
    limit = _max_sum_registers(architecture, itemsize, tile.num_warps, sums)
    return shared <= architecture.shared_bytes and registers <= limit


def _max_sum_registers(architecture: Architecture, itemsize: int, num_warps: int, sums: int) -> int:
    """Of a thread, for sums. It has 255; addresses, masks, and operands outside shared memory take the others.

    Found by compiling (`aot.py`): what is let through does not spill. Blocks of four warps that hold several sums need
    more beside them.
    """
    if itemsize == 4:  # multiplied by the ordinary units, from registers
        return 32
    if architecture.min_rows == 16:
        return 96
    return 64 if num_warps == 4 and sums > 1 else 128
