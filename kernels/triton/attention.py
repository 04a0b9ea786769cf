"""Paged attention: which kernel, over how many programs, with which tiles. `attention_kernels.py` has the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.ops import StepLayout
from tandem.kernels.triton.attention_kernels import decode_kernel, prefill_kernel
from tandem.kernels.triton.buffers import Buffers
from tandem.kernels.triton.device import Architecture
from tandem.kernels.triton.launch import (
    Launch,
    ceil_div,
    check_float,
    check_index,
    check_rows,
    next_power_of_two,
)
from tandem.kernels.tuning import Candidate

_WANTED_PROGRAMS = 256


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a model's attention, and what follows from it: none of it may depend on the step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        return max(16, next_power_of_two(self.head_dim))

    def tile(self, architecture: Architecture) -> int:
        """Positions of one KV tile. Decides on the order of sums: a function of model and chip alone."""
        if self.dtype.itemsize == 4:  # multiplied by the ordinary units, from registers
            return 16
        return 64 if self.padded_dim <= (64 if architecture.min_rows == 16 else 128) else 32

    @property
    def split_len(self) -> int:
        """Positions that are attended on their own before they are merged; 0: all. Decides on the order of sums.

        With heads of more than 128 a second result would not fit into the registers.
        """
        return 512 if self.padded_dim <= 128 else 0

    def max_splits(self, layout: StepLayout, block_size: int) -> int:
        """Of the longest sequence for which the block tables have room."""
        return ceil_div(layout.block_tables.shape[1] * block_size, self.split_len) if self.split_len else 1

    def num_programs(self, layout: StepLayout, block_size: int) -> int:
        """Over how many programs the splits of one token and KV head are spread. Only speed depends on it."""
        wanted = ceil_div(_WANTED_PROGRAMS, layout.slots.shape[0] * self.num_kv_heads)
        return min(wanted, self.max_splits(layout, block_size))

    def partial_elements(self, num_tokens: int, max_splits: int) -> int:
        """float32 elements of workspace for the splits of a decode step."""
        return num_tokens * self.num_heads * max_splits * (self.padded_dim + 2)


@dataclass(frozen=True, slots=True, eq=False)
class SplitWorkspace:
    """Splits' results and arrival counts of decode steps. Counters are 0 between calls."""

    partial: Tensor  # float32 [n]
    counters: Tensor  # int32 [n]


def workspace_for(layout: StepLayout, heads: Heads, block_size: int, buffers: Buffers) -> SplitWorkspace:
    """For any step of this shape. Nothing but counters where no splits are spread."""
    num_tokens, device = layout.slots.shape[0], layout.slots.device
    size = 0
    if is_decode(layout) and heads.num_programs(layout, block_size) > 1:
        size = heads.partial_elements(num_tokens, heads.max_splits(layout, block_size))
    return SplitWorkspace(
        buffers.get("attention splits", size, torch.float32, device),
        buffers.get("attention counters", num_tokens * heads.num_kv_heads, torch.int32, device),
    )


def is_decode(layout: StepLayout) -> bool:
    """Whether a step has (about) one token per sequence; both kernels can compute any step."""
    return layout.slots.shape[0] <= layout.context_lens.shape[0]


def _rows(heads: Heads, architecture: Architecture) -> int:
    least = architecture.min_rows if heads.dtype.itemsize == 2 else 16
    return max(least, next_power_of_two(heads.group))


def fits(candidate: Candidate, heads: Heads, architecture: Architecture) -> bool:
    """Whether a candidate runs on a chip without spilling, and in the chip's family of instructions.

    A thread has 255 registers. How many may hold results and scores was found by compiling (`aot.py`).
    """
    rows, num_warps = candidate["block_m"], candidate["num_warps"]
    if heads.dtype.itemsize == 2 and architecture.min_rows > 16 and num_warps % 4:
        return False
    tile = heads.tile(architecture)
    operands = (rows + 2 * candidate["num_stages"] * tile) * heads.padded_dim * heads.dtype.itemsize
    results = 2 if heads.split_len else 1
    registers = rows * (results * heads.padded_dim + tile) // (32 * num_warps)
    if heads.dtype.itemsize == 4:
        limit = 24
    elif architecture.min_rows == 16:
        limit = 80
    else:
        limit = 160 if candidate["num_stages"] == 2 else 144
    return operands <= architecture.shared_bytes and registers <= limit


def decode_candidates(heads: Heads, architecture: Architecture) -> tuple[Candidate, ...]:
    """What can be tuned for decode steps, best guess first."""
    return _fitting([(_rows(heads, architecture), w, s) for w in (4, 8, 2) for s in (3, 2)], heads, architecture)


def prefill_candidates(heads: Heads, architecture: Architecture) -> tuple[Candidate, ...]:
    """What can be tuned for chunks of prompts, best guess first."""
    least = _rows(heads, architecture)
    rows = [max(least, wanted) for wanted in ((16,) if heads.dtype.itemsize == 4 else (64, 128, 32))]
    return _fitting([(r, w, s) for r in rows for w in (4, 8) for s in (2, 3)], heads, architecture)


def _fitting(parameters: list[tuple[int, int, int]], heads: Heads, architecture: Architecture) -> tuple[Candidate, ...]:
    candidates = [Candidate.of(block_m=m, num_warps=w, num_stages=s) for m, w, s in dict.fromkeys(parameters)]
    fitting = tuple(one for one in candidates if fits(one, heads, architecture))
    # a group of very many query heads needs more rows than registers hold well: it still runs
    return fitting or (Candidate.of(block_m=parameters[0][0], num_warps=8, num_stages=2),)


def paged_attention(
    launch: Launch,
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    layout: StepLayout,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: Tensor,
    workspace: SplitWorkspace,
    candidate: Candidate,
    architecture: Architecture,
) -> None:
    """See `ops.Ops.paged_attention`. query [T, H, D] -> out [T, H * D]."""
    heads = Heads(query.shape[1], kv_cache.shape[1], kv_cache.shape[5], query.dtype)
    block_size, num_tokens = kv_cache.shape[4], query.shape[0]
    _check(query, kv_cache, layer, layout, out)
    strides = (query.stride(0), out.stride(0), kv_cache.stride(0), kv_cache.stride(1), layer * kv_cache.stride(2))
    tensors = (query, kv_cache, out, layout.block_tables, layout.query_starts, layout.positions)
    numbers = (*strides, scale, 0.0 if softcap is None else softcap)
    num_seqs, table_stride = layout.context_lens.shape[0], layout.block_tables.stride(0)
    meta = {
        "GROUP": heads.group,
        "WINDOW": 0 if window is None else window,
        "HAS_SOFTCAP": softcap is not None,
        "HEAD_DIM": heads.head_dim,
        "BLOCK_SIZE": block_size,
        "SPLIT": heads.split_len,
        "BLOCK_M": candidate["block_m"],
        "BLOCK_D": heads.padded_dim,
        "TILE": heads.tile(architecture),
        "num_warps": candidate["num_warps"],
        "num_stages": candidate["num_stages"],
    }
    if is_decode(layout):
        programs = heads.num_programs(layout, block_size)
        sizes = (num_seqs, table_stride, heads.max_splits(layout, block_size))
        arguments = (*tensors, workspace.partial, workspace.counters, *sizes, *numbers)
        launch(decode_kernel, (num_tokens, heads.num_kv_heads, programs), arguments, IS_SPREAD=programs > 1, **meta)
    else:
        num_tiles = num_tokens // (candidate["block_m"] // heads.group) + num_seqs
        tile_arguments = (*tensors, num_seqs, table_stride, *numbers)
        launch(prefill_kernel, (num_tiles, heads.num_kv_heads), tile_arguments, **meta)


def _check(query: Tensor, kv_cache: Tensor, layer: int, layout: StepLayout, out: Tensor) -> None:
    num_tokens, num_heads, head_dim = query.shape
    check_float("query", query)
    check_rows("query", query, (num_tokens, num_heads, head_dim), kv_cache.dtype)
    check_rows("out", out, (num_tokens, num_heads * head_dim), query.dtype)
    check_index("positions", layout.positions, (num_tokens,))
    if not 0 <= layer < kv_cache.shape[2]:
        raise ValueError(f"layer {layer} of {kv_cache.shape[2]}")
