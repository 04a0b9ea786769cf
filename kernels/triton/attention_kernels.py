"""The kernels of paged attention, launched by `attention.py`: one for decode steps, one for prefill chunks, of the same
parts.

The positions of a sequence are cut into splits of SPLIT, splits into tiles; both at absolute positions. Within a
split the tiles are taken in order, with a running maximum (in units of log2):

    s = q k^T * scale;  m' = max(m, max s);  p = 2^(s - m');  l = l 2^(m - m') + sum p;  o = o 2^(m - m') + p v

and the splits' (m, l, o) are merged in order by the same rule. A position that is masked has p = 0 and a tile or split
that is masked as a whole changes nothing, so a token meets the same operations whatever else is in its tile of queries.

* decode: a program has the query heads that share a KV head, of one token. With few of them the splits are spread over
  several programs, and the last to arrive merges.
* prefill: a program has a tile of consecutive tokens of one sequence, and walks through the splits itself.

Every sum is a matrix product (that of the weights is one with a matrix of ones), and everything else is element-wise or
a maximum: nothing depends on how many rows a tile has, or on the number of warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_NO_MAXIMUM = tl.constexpr(-1.0e30)  # below every score, yet finite: 2^(-inf - _NO_MAXIMUM) is 0
_ONES = tl.constexpr(16)  # columns of the matrix of ones, the fewest that every chip's products take


@triton.jit
def _scores(
    query: tl.tensor, keys: tl.tensor, scale: tl.tensor, softcap: tl.tensor, HAS_SOFTCAP: tl.constexpr
) -> tl.tensor:
    """scale * q k^T, perhaps capped, in units of log2. query [M, D], keys [TILE, D] -> float32 [M, TILE]."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if HAS_SOFTCAP:  # softcap * tanh(scores / softcap)
        scores = softcap - 2.0 * softcap / (tl.exp(2.0 * scores / softcap) + 1.0)
    return scores * _LOG2_E


@triton.jit
def _merge(
    maximum: tl.tensor,
    total: tl.tensor,
    result: tl.tensor,
    part_maximum: tl.tensor,
    part_total: tl.tensor,
    part_result: tl.tensor,
) -> tl.tensor:
    """Two (m, l, o) as one. [M], [M], [M, D]"""
    new_maximum = tl.maximum(maximum, part_maximum)
    old_weight, part_weight = tl.exp2(maximum - new_maximum), tl.exp2(part_maximum - new_maximum)
    total = total * old_weight + part_total * part_weight
    result = result * old_weight[:, None] + part_result * part_weight[:, None]
    return new_maximum, total, result


@triton.jit
def _finish(result: tl.tensor, total: tl.tensor) -> tl.tensor:
    """o / l; rows that nobody asked for have seen nothing."""
    return result / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _attend_split(
    query: tl.tensor,
    kv_ptr: tl.tensor,
    table_ptr: tl.tensor,
    block_stride: tl.tensor,
    position: tl.tensor,
    split: tl.tensor,
    first_position: tl.tensor,
    last_position: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """(m, l, o) of one split. query [M, D] of rows at `position` [M], from first_position to last_position."""
    dims = tl.arange(0, BLOCK_D)
    ones = tl.full((TILE, _ONES), 1.0, tl.float32).to(query.dtype)
    maximum = tl.full((BLOCK_M,), _NO_MAXIMUM, tl.float32)
    totals = tl.zeros((BLOCK_M, _ONES), tl.float32)
    result = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    start = split * SPLIT
    if WINDOW > 0:
        first_visible = tl.maximum(first_position - WINDOW + 1, 0)
        start = tl.maximum(start, first_visible // TILE * TILE)
    end = last_position + 1
    if SPLIT > 0:
        end = tl.minimum(end, split * SPLIT + SPLIT)
    for first in range(start, end, TILE):
        place = first + tl.arange(0, TILE)
        inside = place < end
        block = tl.load(table_ptr + place // BLOCK_SIZE, mask=inside, other=0)
        source = kv_ptr + (block * block_stride + (place % BLOCK_SIZE) * HEAD_DIM)[:, None] + dims[None, :]
        mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(source, mask=mask, other=0.0)
        scores = _scores(query, keys, scale, softcap, HAS_SOFTCAP)
        visible = (place[None, :] <= position[:, None]) & inside[None, :]
        if WINDOW > 0:
            visible = visible & (place[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        decay = tl.exp2(maximum - new_maximum)[:, None]
        weights = tl.exp2(scores - new_maximum[:, None]).to(query.dtype)
        values = tl.load(source + BLOCK_SIZE * HEAD_DIM, mask=mask, other=0.0)
        totals = tl.dot(weights, ones, acc=totals * decay, input_precision="ieee")
        result = tl.dot(weights, values, acc=result * decay, input_precision="ieee")
        maximum = new_maximum
    return maximum, tl.max(totals, 1), result  # the columns of totals are equal


@triton.jit
def _attend(
    query: tl.tensor,
    kv_ptr: tl.tensor,
    table_ptr: tl.tensor,
    block_stride: tl.tensor,
    position: tl.tensor,
    first_position: tl.tensor,
    last_position: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """(l, o) over all splits, one after the other. Without splits (SPLIT 0), nothing is ever merged."""
    if SPLIT == 0:
        _, total, result = _attend_split(
            query, kv_ptr, table_ptr, block_stride, position, 0, first_position, last_position,
            scale, softcap, WINDOW, HAS_SOFTCAP, HEAD_DIM, BLOCK_SIZE, SPLIT, BLOCK_M, BLOCK_D, TILE,
        )  # fmt: skip
    else:
        first_split = 0
        if WINDOW > 0:
            first_split = tl.maximum(first_position - WINDOW + 1, 0) // SPLIT
        maximum = tl.full((BLOCK_M,), _NO_MAXIMUM, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        result = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for split in range(first_split, last_position // SPLIT + 1):
            part_maximum, part_total, part_result = _attend_split(
                query, kv_ptr, table_ptr, block_stride, position, split, first_position, last_position,
                scale, softcap, WINDOW, HAS_SOFTCAP, HEAD_DIM, BLOCK_SIZE, SPLIT, BLOCK_M, BLOCK_D, TILE,
            )  # fmt: skip
            maximum, total, result = _merge(maximum, total, result, part_maximum, part_total, part_result)
    return total, result


@triton.jit
def _store_part(
    place: tl.tensor,
    place_of_maximum: tl.tensor,
    is_row: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    result: tl.tensor,
) -> None:
    """Keep a split's (m, l, o) for whoever merges them, past the caches of one multiprocessor."""
    tl.store(place, result, mask=is_row[:, None], cache_modifier=".cg")
    tl.store(place_of_maximum, maximum, mask=is_row, cache_modifier=".cg")
    tl.store(place_of_maximum + 1, total, mask=is_row, cache_modifier=".cg")


@triton.jit
def _merge_parts(
    place: tl.tensor,
    place_of_maximum: tl.tensor,
    is_row: tl.tensor,
    size: tl.tensor,
    num_splits: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """(l, o) of all splits that were kept, `size` elements apart, in their order."""
    maximum = tl.full((BLOCK_M,), _NO_MAXIMUM, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for index in range(num_splits):
        part_place, part_place_of_maximum = place + index * size, place_of_maximum + index * size
        part_result = tl.load(part_place, mask=is_row[:, None], other=0.0, cache_modifier=".cg")
        part_maximum = tl.load(part_place_of_maximum, mask=is_row, other=0.0, cache_modifier=".cg")
        part_total = tl.load(part_place_of_maximum + 1, mask=is_row, other=0.0, cache_modifier=".cg")
        maximum, total, result = _merge(maximum, total, result, part_maximum, part_total, part_result)
    return total, result


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride", "max_splits"],
    do_not_specialize_on_alignment=["table_ptr", "query_starts_ptr", "positions_ptr"],
)
def decode_kernel(
    query_ptr: tl.tensor,
    kv_cache_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    max_splits: tl.tensor,
    query_stride: tl.tensor,
    out_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    layer_offset: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    IS_SPREAD: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Some splits of one token and KV head. Grid: (tokens, KV heads, programs); more than one if IS_SPREAD."""
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    program = tl.program_id(2)
    num_programs = tl.num_programs(2)
    seq = num_seqs * 0  # as many sequences end at or before this token
    for first in range(0, num_seqs, 64):
        index = first + tl.arange(0, 64)
        ends = tl.load(query_starts_ptr + 1 + index, mask=index < num_seqs, other=9223372036854775807)
        seq += tl.sum((ends <= token).to(tl.int32), 0)
    if seq < num_seqs:
        last_position = tl.load(positions_ptr + token).to(tl.int32)
        first_split = 0
        num_splits = 1
        if SPLIT > 0:
            if WINDOW > 0:
                first_split = tl.maximum(last_position - WINDOW + 1, 0) // SPLIT
            num_splits = last_position // SPLIT - first_split + 1
        if program < num_splits:
            row = tl.arange(0, BLOCK_M)
            dims = tl.arange(0, BLOCK_D)
            is_row = row < GROUP
            rows_mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
            offset = (kv_head * GROUP + row)[:, None] * HEAD_DIM + dims[None, :]
            wide_token = token.to(tl.int64)
            query = tl.load(query_ptr + wide_token * query_stride + offset, mask=rows_mask, other=0.0)
            position = tl.where(is_row, last_position, -1)
            kv_ptr = kv_cache_ptr + kv_head.to(tl.int64) * head_stride + layer_offset
            table = table_ptr + seq.to(tl.int64) * table_stride
            # [token, KV head, split, row of GROUP, D and then m and l]
            size = GROUP * (BLOCK_D + 2)
            home = partial_ptr + (wide_token * tl.num_programs(1) + kv_head) * max_splits * size
            place = home + row[:, None] * (BLOCK_D + 2) + dims[None, :]
            place_of_maximum = home + row * (BLOCK_D + 2) + BLOCK_D
            target = out_ptr + wide_token * out_stride + offset
            if IS_SPREAD:
                for index in range(program, num_splits, num_programs):
                    part_maximum, part_total, part_result = _attend_split(
                        query, kv_ptr, table, block_stride, position, first_split + index, last_position, last_position,
                        scale, softcap, WINDOW, HAS_SOFTCAP, HEAD_DIM, BLOCK_SIZE, SPLIT, BLOCK_M, BLOCK_D, TILE,
                    )  # fmt: skip
                    if num_splits == 1:  # merged with nothing, it would stay as it is
                        values = _finish(part_result, part_total).to(out_ptr.dtype.element_ty)
                        tl.store(target, values, mask=rows_mask)
                    else:
                        part_place, part_place_of_maximum = place + index * size, place_of_maximum + index * size
                        _store_part(part_place, part_place_of_maximum, is_row, part_maximum, part_total, part_result)
                if num_splits > 1:
                    tl.debug_barrier()  # all of this program's stores come before the count
                    counter = counter_ptr + token * tl.num_programs(1) + kv_head
                    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
                    if arrived == tl.minimum(num_splits, num_programs) - 1:
                        total, result = _merge_parts(
                            place, place_of_maximum, is_row, size, num_splits, BLOCK_M, BLOCK_D
                        )
                        tl.store(target, _finish(result, total).to(out_ptr.dtype.element_ty), mask=rows_mask)
                        tl.store(counter, 0)  # ready for the next layer
            else:
                total, result = _attend(
                    query, kv_ptr, table, block_stride, position, last_position, last_position,
                    scale, softcap, WINDOW, HAS_SOFTCAP, HEAD_DIM, BLOCK_SIZE, SPLIT, BLOCK_M, BLOCK_D, TILE,
                )  # fmt: skip
                tl.store(target, _finish(result, total).to(out_ptr.dtype.element_ty), mask=rows_mask)


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "query_starts_ptr", "positions_ptr"],
)
def prefill_kernel(
    query_ptr: tl.tensor,
    kv_cache_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    query_stride: tl.tensor,
    out_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    layer_offset: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """A tile of one sequence's queries, for one KV head. Grid: (tokens // tile_len + sequences, KV heads).

    Sequence i has the tiles from query_starts[i] // tile_len + i on: at least as many as it needs.
    """
    TILE_LEN: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = num_seqs * 0 - 1
    for first in range(0, num_seqs, 64):
        index = first + tl.arange(0, 64)
        starts = tl.load(query_starts_ptr + index, mask=index < num_seqs, other=9223372036854775807)
        begun = (starts // TILE_LEN + index <= tile) & (index < num_seqs)
        seq += tl.sum(begun.to(tl.int32), 0)
    start = tl.load(query_starts_ptr + seq).to(tl.int32)
    first_token = start + (tile - start // TILE_LEN - seq) * TILE_LEN
    num_tokens = tl.minimum(tl.load(query_starts_ptr + seq + 1).to(tl.int32) - first_token, TILE_LEN)
    if num_tokens > 0:
        row = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        is_row = row // GROUP < num_tokens
        token = (first_token + row // GROUP).to(tl.int64)
        rows_mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        offset = (kv_head * GROUP + row % GROUP)[:, None] * HEAD_DIM + dims[None, :]
        query = tl.load(query_ptr + token[:, None] * query_stride + offset, mask=rows_mask, other=0.0)
        first_position = tl.load(positions_ptr + first_token).to(tl.int32)
        last_position = first_position + num_tokens - 1
        position = tl.where(is_row, first_position + row // GROUP, -1)
        kv_ptr = kv_cache_ptr + kv_head.to(tl.int64) * head_stride + layer_offset
        table = table_ptr + seq.to(tl.int64) * table_stride
        total, result = _attend(
            query, kv_ptr, table, block_stride, position, first_position, last_position,
            scale, softcap, WINDOW, HAS_SOFTCAP, HEAD_DIM, BLOCK_SIZE, SPLIT, BLOCK_M, BLOCK_D, TILE,
        )  # fmt: skip
        target = out_ptr + token[:, None] * out_stride + offset
        tl.store(target, _finish(result, total).to(out_ptr.dtype.element_ty), mask=rows_mask)
