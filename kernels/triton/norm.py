"""RMSNorm, alone and with the residual added in the same pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.triton.launch import Launch, check_float, check_rows, next_power_of_two

_MAX_WIDTH = 32_768


@triton.jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row: residual += x; out = residual * rsqrt(mean(residual^2) + eps) * weight. Grid: (rows,).

    The sum's order is that of BLOCK and num_warps, which are functions of the width alone.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    dtype = x.dtype
    if HAS_RESIDUAL:
        place = residual_ptr + row * residual_stride + columns
        x = (tl.load(place, mask=mask, other=0.0).to(tl.float32) + x.to(tl.float32)).to(dtype)
        tl.store(place, x, mask=mask)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    normalised = (wide * inverse).to(dtype).to(tl.float32)  # rounded before the weight, as in the Llama family
    tl.store(out_ptr + row * out_stride + columns, (normalised * weight).to(dtype), mask=mask)


def rms_norm(launch: Launch, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """x, residual [T, width] (residual is updated in place), weight [width] -> out [T, width].

    Raises `ValueError` on another layout, or rows wider than 32,768.
    """
    num_rows, width = x.shape
    if width > _MAX_WIDTH:
        raise ValueError(f"rows of {width}, at most {_MAX_WIDTH} can be normalised")
    check_float("x", x)
    check_rows("x", x, (num_rows, width), x.dtype)
    check_rows("weight", weight, (width,), x.dtype)
    check_rows("out", out, (num_rows, width), x.dtype)
    if residual is not None:
        check_rows("residual", residual, (num_rows, width), x.dtype)
    kept = x if residual is None else residual
    block = next_power_of_two(width)
    arguments = (x, kept, weight, out, x.stride(0), kept.stride(0), out.stride(0), width, eps)
    launch(
        _rms_norm_kernel,
        (num_rows,),
        arguments,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        num_stages=1,
    )
