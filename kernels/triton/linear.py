"""x @ weight.T + bias: one kernel, whose sums have one order whatever the number of rows.

K is cut into a number of splits that is a function of the weight's shape alone. Each split is summed on its own, a step
of BLOCK_K after the other, and the splits' sums are added in order. With few rows the splits are spread over the grid,
or a narrow weight would keep only a few multiprocessors busy: each program stores its partial sum, and the last to
arrive at a tile adds them up. With many rows one program walks through its splits. Both ways give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.ops import PackedLinear
from tandem.kernels.triton.buffers import Buffers
from tandem.kernels.triton.device import Architecture, Tile, fits
from tandem.kernels.triton.launch import Launch, ceil_div, check_float, check_rows
from tandem.kernels.tuning import Candidate

ROWS_SPLIT_IN_GRID = 64
"""Up to so many rows, splits are spread over the grid. Only speed depends on it."""
_MAX_SPLITS = 16
_MIN_SPLIT_LEN = 256
_WANTED_PROGRAMS = 256
"""About two for each multiprocessor of a large chip. A constant, since it decides on the order of sums."""
GROUP_ROWS = 8
"""Tiles of rows that share a pass over the columns."""


@triton.jit
def _multiply_split(
    x_row_ptr: tl.tensor,
    weight_row_ptr: tl.tensor,
    row_mask: tl.tensor,
    column_mask: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
) -> tl.tensor:
    """The sum over K from start to end. float32 [BLOCK_M, BLOCK_N]."""
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(start, end, BLOCK_K):
        if IS_EVEN:
            x = tl.load(x_row_ptr + first + inner[None, :], mask=row_mask, other=0.0)
            weight = tl.load(weight_row_ptr + first + inner[:, None], mask=column_mask, other=0.0)
        else:
            rest = end - first
            x = tl.load(x_row_ptr + first + inner[None, :], mask=row_mask & (inner < rest)[None, :], other=0.0)
            weight = tl.load(
                weight_row_ptr + first + inner[:, None], mask=column_mask & (inner < rest)[:, None], other=0.0
            )
        total = tl.dot(x, weight, acc=total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    num_rows: tl.tensor,
    in_features: tl.tensor,
    out_features: tl.tensor,
    split_len: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    out_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_IN_GRID: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
) -> None:
    """One tile of the result. Grid: (tiles, splits if SPLITS_IN_GRID else 1)."""
    tile = tl.program_id(0)
    tiles_down = tl.cdiv(num_rows, BLOCK_M)
    tiles_across = tl.cdiv(out_features, BLOCK_N)
    # tiles go down GROUP_ROWS at a time before they go across, so that neighbours share weights in the cache
    group = tile // (GROUP_ROWS * tiles_across)
    height = min(tiles_down - group * GROUP_ROWS, GROUP_ROWS)
    in_group = tile % (GROUP_ROWS * tiles_across)
    row = (group * GROUP_ROWS + in_group % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (in_group // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = (row < num_rows)[:, None]
    column_mask = (column < out_features)[None, :]
    x_row_ptr = x_ptr + row.to(tl.int64)[:, None] * x_stride
    weight_row_ptr = weight_ptr + column.to(tl.int64)[None, :] * weight_stride
    target = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    if SPLITS_IN_GRID:
        split = tl.program_id(1)
        start = split * split_len
        end = min(start + split_len, in_features)
        part = _multiply_split(
            x_row_ptr, weight_row_ptr, row_mask, column_mask, start, end, BLOCK_M, BLOCK_N, BLOCK_K, IS_EVEN
        )
        place = partial_ptr + row.to(tl.int64)[:, None] * out_features + column[None, :]
        size = PARTIAL_ROWS * out_features
        tl.store(place + split.to(tl.int64) * size, part, mask=row_mask & column_mask, cache_modifier=".cg")
        tl.debug_barrier()  # all of this program's stores come before the count
        arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
        if arrived == NUM_SPLITS - 1:
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for index in range(NUM_SPLITS):
                total += tl.load(place + index * size, mask=row_mask & column_mask, other=0.0, cache_modifier=".cg")
            if HAS_BIAS:
                total += tl.load(bias_ptr + column, mask=column < out_features, other=0.0).to(tl.float32)[None, :]
            tl.store(target, total.to(out_ptr.dtype.element_ty), mask=row_mask & column_mask)
            tl.store(counter_ptr + tile, 0)  # ready for the next product
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if NUM_SPLITS == 1:
            total = _multiply_split(
                x_row_ptr, weight_row_ptr, row_mask, column_mask, 0, in_features, BLOCK_M, BLOCK_N, BLOCK_K, IS_EVEN
            )
        else:
            for split in range(NUM_SPLITS):
                start = split * split_len
                end = min(start + split_len, in_features)
                total += _multiply_split(
                    x_row_ptr, weight_row_ptr, row_mask, column_mask, start, end, BLOCK_M, BLOCK_N, BLOCK_K, IS_EVEN
                )
        if HAS_BIAS:
            total += tl.load(bias_ptr + column, mask=column < out_features, other=0.0).to(tl.float32)[None, :]
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=row_mask & column_mask)


@dataclass(frozen=True, slots=True, eq=False)
class TritonLinear(PackedLinear):
    """A weight as it was loaded, and how its K is cut into splits."""

    weight: Tensor  # [out_features, in_features]
    bias: Tensor | None  # [out_features]
    num_splits: int
    split_len: int

    def partial_elements(self) -> int:
        """float32 elements of workspace that the partial sums need."""
        return self.num_splits * ROWS_SPLIT_IN_GRID * self.out_features if self.num_splits > 1 else 0

    def num_counters(self) -> int:
        return ceil_div(self.out_features, 16) * (ROWS_SPLIT_IN_GRID // 16)


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Partial sums and arrival counts, shared by all products of one stream. Counters are 0 between products."""

    partial: Tensor  # float32 [n]
    counters: Tensor  # int32 [n]


def workspace_for(packed: TritonLinear, buffers: Buffers) -> Workspace:
    """For products of up to `ROWS_SPLIT_IN_GRID` rows, whose splits are spread over the grid."""
    device = packed.weight.device
    return Workspace(
        buffers.get("linear partial sums", packed.partial_elements(), torch.float32, device),
        buffers.get("linear counters", packed.num_counters(), torch.int32, device),
    )


def depth_of(dtype: torch.dtype) -> int:
    """BLOCK_K. Fixed: it decides on the order of sums."""
    return 32 if dtype == torch.float32 else 64


def split_inner(in_features: int, out_features: int, depth: int) -> tuple[int, int]:
    """(number of splits, length of each but perhaps the last). A function of the weight's shape alone."""
    num_splits, tiles = 1, ceil_div(out_features, 64)
    while (
        2 * num_splits <= _MAX_SPLITS
        and 2 * num_splits * tiles <= _WANTED_PROGRAMS
        and in_features // (2 * num_splits) >= _MIN_SPLIT_LEN
    ):
        num_splits *= 2
    length = ceil_div(ceil_div(in_features, num_splits), depth) * depth
    return ceil_div(in_features, length), length


def pack_linear(weight: Tensor, bias: Tensor | None) -> TritonLinear:
    """Keeps a reference to both: rows of weights are already what the kernel reads."""
    check_float("weight", weight)
    out_features, in_features = weight.shape
    weight = weight.contiguous()
    check_rows("weight", weight, (out_features, in_features), weight.dtype)
    if bias is not None:
        bias = bias.contiguous()
        check_rows("bias", bias, (out_features,), weight.dtype)
    num_splits, split_len = split_inner(in_features, out_features, depth_of(weight.dtype))
    return TritonLinear(in_features, out_features, weight, bias, num_splits, split_len)


_TILES = (
    (16, 64, 4, 4),
    (16, 32, 2, 6),
    (16, 128, 4, 4),
    (32, 64, 4, 4),
    (64, 64, 4, 4),
    (64, 32, 4, 6),
    (64, 128, 4, 4),
    (64, 128, 8, 3),
    (64, 256, 4, 3),
    (128, 128, 8, 3),
    (128, 128, 4, 4),
    (128, 256, 8, 3),
)
"""(BLOCK_M, BLOCK_N, num_warps, num_stages)"""
_FLOAT32_TILES = ((16, 64, 8, 4), (64, 32, 8, 6))
"""Without matrix units: for tests and small models, and little to gain by tuning."""


def tile_of(candidate: Candidate, dtype: torch.dtype) -> Tile:
    return Tile(
        candidate["block_m"], candidate["block_n"], depth_of(dtype), candidate["num_warps"], candidate["num_stages"]
    )


def candidates(num_rows: int, num_splits: int, dtype: torch.dtype, architecture: Architecture) -> tuple[Candidate, ...]:
    """What can be tuned for a number of rows, best guess first."""
    return pick_tiles(num_rows, dtype, architecture, sums=1 if num_splits == 1 else 2, operands=1)


def pick_tiles(
    num_rows: int, dtype: torch.dtype, architecture: Architecture, *, sums: int, operands: int
) -> tuple[Candidate, ...]:
    """The candidates that fit: tiles of at most as many rows as there are, or half as many; the larger ones first.

    A program holds `sums` float32 tiles of the result's size, and `operands` tiles of weights per stage.
    """
    fitting = []
    for rows, columns, num_warps, num_stages in _FLOAT32_TILES if dtype == torch.float32 else _TILES:
        tile = Tile(rows, columns, depth_of(dtype), num_warps, num_stages)
        if fits(tile, architecture, dtype.itemsize, sums=sums, operands=operands):
            parameters = {"block_m": rows, "block_n": columns, "num_warps": num_warps, "num_stages": num_stages}
            fitting.append(Candidate.of(**parameters))
    least = min(one["block_m"] for one in fitting)
    largest = max(one["block_m"] for one in fitting if one["block_m"] <= max(least, num_rows))
    sensible = [one for one in fitting if one["block_m"] in (largest, largest // 2)]
    return tuple(sorted(sensible, key=lambda one: one["block_m"] != largest))


def linear(
    launch: Launch, x: Tensor, packed: TritonLinear, out: Tensor, workspace: Workspace, candidate: Candidate
) -> None:
    """x [T, in_features] -> out [T, out_features]."""
    num_rows, weight = x.shape[0], packed.weight
    check_rows("x", x, (num_rows, packed.in_features), weight.dtype)
    check_rows("out", out, (num_rows, packed.out_features), weight.dtype)
    block_m, block_n, depth = candidate["block_m"], candidate["block_n"], depth_of(weight.dtype)
    in_grid = packed.num_splits > 1 and num_rows <= ROWS_SPLIT_IN_GRID
    num_tiles = ceil_div(num_rows, block_m) * ceil_div(packed.out_features, block_n)
    arguments = (
        x,
        weight,
        weight if packed.bias is None else packed.bias,
        out,
        workspace.partial,
        workspace.counters,
        num_rows,
        packed.in_features,
        packed.out_features,
        packed.split_len,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
    )
    launch(
        _linear_kernel,
        (num_tiles, packed.num_splits if in_grid else 1),
        arguments,
        HAS_BIAS=packed.bias is not None,
        NUM_SPLITS=packed.num_splits,
        SPLITS_IN_GRID=in_grid,
        PARTIAL_ROWS=ROWS_SPLIT_IN_GRID,
        IS_EVEN=packed.in_features % depth == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=depth,
        GROUP_ROWS=GROUP_ROWS,
        num_warps=candidate["num_warps"],
        num_stages=candidate["num_stages"],
    )
