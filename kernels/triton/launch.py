"""How kernels are started: one door, so that launches can be counted, recorded for ahead-of-time compilation, checked.

Kernels are compiled without fusing multiplications and additions: whether the compiler finds a pair to fuse depends on
tile sizes and numbers of warps, and those are for tuning, which must not change a bit. Numbers of rows are excluded
from specialisation for the same reason.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

Grid = tuple[int, ...]
Kernel = Any
"""What `triton.jit` makes."""


def compile_options(num_warps: int) -> dict[str, int | bool | None]:
    """What every kernel is compiled with.

    Left to itself, the assembler sometimes spills a few registers to fit more threads on a multiprocessor: `maxnreg`
    tells it that it may use them all (up to 8 warps have 255 each).
    """
    return {"enable_fp_fusion": False, "maxnreg": 255 if num_warps <= 8 else None}


class Launch(Protocol):
    """Starts `kernel` with its arguments in order, `meta` holding compile-time constants, num_warps, num_stages."""

    def __call__(self, kernel: Kernel, grid: Grid, arguments: tuple[object, ...], **meta: int) -> None: ...


class CountedLaunch(Launch, Protocol):
    """A `Launch` that says how many kernels it has started."""

    @property
    def num_launches(self) -> int: ...


class DeviceLaunch:
    """Starts kernels on the current device (or in the interpreter) and counts them."""

    def __init__(self) -> None:
        self.num_launches = 0

    def __call__(self, kernel: Kernel, grid: Grid, arguments: tuple[object, ...], **meta: int) -> None:
        if 0 in grid:
            return
        self.num_launches += 1
        kernel[grid](*arguments, **compile_options(meta["num_warps"]), **meta)


def ceil_div(total: int, part: int) -> int:
    return -(-total // part)


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


_ALIGNMENT_BYTES = 16
FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_rows(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises `ValueError` unless `tensor` has this shape and dtype, rows without gaps, and starts at 16 bytes."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, but is {tensor.dtype} {list(tensor.shape)}")
    inner = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size > 1 and stride != inner:
            raise ValueError(f"each row of {name} must be contiguous, but its strides are {tensor.stride()}")
        inner *= size
    if tensor.data_ptr() % _ALIGNMENT_BYTES:
        raise ValueError(f"{name} must start at a multiple of {_ALIGNMENT_BYTES} bytes")


def check_float(name: str, tensor: Tensor) -> None:
    """Raises `ValueError` unless the kernels know this dtype."""
    if tensor.dtype not in FLOAT_TYPES:
        raise ValueError(f"{name} must be float16, bfloat16 or float32, but is {tensor.dtype}")


def check_index(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raises `ValueError` unless `tensor` is int64 of this shape with contiguous rows."""
    if tuple(tensor.shape) != shape or tensor.dtype != torch.int64:
        raise ValueError(f"{name} must be torch.int64 {list(shape)}, but is {tensor.dtype} {list(tensor.shape)}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous, but its strides are {tensor.stride()}")
