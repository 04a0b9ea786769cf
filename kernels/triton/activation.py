"""The gate and up projection with SiLU of the gate, times up: one kernel, whose products never leave the registers.

A tile of the result needs the same columns of the gate's and of the up projection's weights. K is not split: these are
the widest weights of a layer, and their tiles keep a chip busy at any number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.ops import PackedLinear
from tandem.kernels.triton.device import Architecture, Tile
from tandem.kernels.triton.launch import Launch, ceil_div, check_float, check_rows
from tandem.kernels.triton.linear import GROUP_ROWS, depth_of, pick_tiles, tile_of
from tandem.kernels.tuning import Candidate


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    in_features: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    out_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
) -> None:
    """One tile of gate / (1 + exp(-gate)) * up. Grid: (tiles,), in the order of `linear`'s."""
    tile = tl.program_id(0)
    tiles_down = tl.cdiv(num_rows, BLOCK_M)
    tiles_across = tl.cdiv(width, BLOCK_N)
    group = tile // (GROUP_ROWS * tiles_across)
    height = min(tiles_down - group * GROUP_ROWS, GROUP_ROWS)
    in_group = tile % (GROUP_ROWS * tiles_across)
    row = (group * GROUP_ROWS + in_group % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (in_group // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    row_mask = (row < num_rows)[:, None]
    column_mask = (column < width)[None, :]
    x_row_ptr = x_ptr + row.to(tl.int64)[:, None] * x_stride + inner[None, :]
    gate_ptr = weight_ptr + column.to(tl.int64)[None, :] * weight_stride + inner[:, None]
    up_ptr = gate_ptr + width.to(tl.int64) * weight_stride
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, in_features, BLOCK_K):
        x_mask, weight_mask = row_mask, column_mask
        if not IS_EVEN:
            inside = inner < in_features - first
            x_mask = row_mask & inside[None, :]
            weight_mask = column_mask & inside[:, None]
        x = tl.load(x_row_ptr + first, mask=x_mask, other=0.0)
        gate = tl.dot(x, tl.load(gate_ptr + first, mask=weight_mask, other=0.0), acc=gate, input_precision="ieee")
        up = tl.dot(x, tl.load(up_ptr + first, mask=weight_mask, other=0.0), acc=up, input_precision="ieee")
    if HAS_BIAS:
        gate += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + width + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    dtype = out_ptr.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    target = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(target, result.to(dtype), mask=row_mask & column_mask)


@dataclass(frozen=True, slots=True, eq=False)
class TritonGateUp(PackedLinear):
    """`out_features` is the intermediate size."""

    weight: Tensor  # [2 * out_features, in_features]
    bias: Tensor | None  # [2 * out_features]


def pack_gate_up(weight: Tensor, bias: Tensor | None) -> TritonGateUp:
    """Keeps a reference to both."""
    check_float("weight", weight)
    num_outputs, in_features = weight.shape
    if num_outputs % 2:
        raise ValueError(f"stacked gate and up weights must have an even number of rows, but have {num_outputs}")
    weight = weight.contiguous()
    check_rows("weight", weight, (num_outputs, in_features), weight.dtype)
    if bias is not None:
        bias = bias.contiguous()
        check_rows("bias", bias, (num_outputs,), weight.dtype)
    return TritonGateUp(in_features, num_outputs // 2, weight, bias)


def candidates(num_rows: int, dtype: torch.dtype, architecture: Architecture) -> tuple[Candidate, ...]:
    """What can be tuned for a number of rows, best guess first."""
    return pick_tiles(num_rows, dtype, architecture, sums=2, operands=2)


def gate_up_silu(launch: Launch, x: Tensor, packed: TritonGateUp, out: Tensor, candidate: Candidate) -> None:
    """x [T, in_features] -> out [T, intermediate]."""
    num_rows, weight, width = x.shape[0], packed.weight, packed.out_features
    check_rows("x", x, (num_rows, packed.in_features), weight.dtype)
    check_rows("out", out, (num_rows, width), weight.dtype)
    tile: Tile = tile_of(candidate, weight.dtype)
    strides = (x.stride(0), weight.stride(0), out.stride(0))
    bias = weight if packed.bias is None else packed.bias
    launch(
        _gate_up_kernel,
        (ceil_div(num_rows, tile.rows) * ceil_div(width, tile.columns),),
        (x, weight, bias, out, num_rows, packed.in_features, width, *strides),
        HAS_BIAS=packed.bias is not None,
        IS_EVEN=packed.in_features % depth_of(weight.dtype) == 0,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        GROUP_ROWS=GROUP_ROWS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
