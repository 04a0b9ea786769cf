"""Rows of a table, by index."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.triton.launch import Launch, ceil_div, check_float, check_index, check_rows

_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def _embedding_kernel(
    ids_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    table_stride: tl.tensor,
    out_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """out[i] = table[ids[i]]. Grid: (rows, column blocks)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(ids_ptr + row)
    values = tl.load(table_ptr + index * table_stride + columns, mask=columns < width)
    tl.store(out_ptr + row * out_stride + columns, values, mask=columns < width)


def embedding(launch: Launch, token_ids: Tensor, table: Tensor, out: Tensor) -> None:
    """token_ids [T] int64, table [V, width] -> out [T, width]."""
    num_rows, width = token_ids.shape[0], table.shape[1]
    check_float("table", table)
    check_index("token_ids", token_ids, (num_rows,))
    check_rows("table", table, tuple(table.shape), table.dtype)
    check_rows("out", out, (num_rows, width), table.dtype)
    arguments = (token_ids, table, out, width, table.stride(0), out.stride(0))
    launch(_embedding_kernel, (num_rows, ceil_div(width, _BLOCK)), arguments, BLOCK=_BLOCK, num_warps=4, num_stages=1)
