"""QK-norm, rotation, and the write of K and V into the paged cache, in one pass over the projected heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.ops import QKNorm, StepLayout
from tandem.kernels.triton.launch import Launch, ceil_div, check_float, check_index, check_rows, next_power_of_two

_HEADS_PER_PROGRAM = 8


@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["slots_ptr", "query_starts_ptr"],
)
def _rope_kernel(
    qkv_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    kv_cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_seqs: tl.tensor,
    qkv_stride: tl.tensor,
    angle_stride: tl.tensor,
    out_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    layer_offset: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    """Some heads of one token. Grid: (tokens, blocks of heads). Padding tokens leave the cache as it is."""
    token = tl.program_id(0).to(tl.int64)
    if token < tl.load(query_starts_ptr + num_seqs):
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        half = tl.arange(0, HALF_BLOCK)
        inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (half < HALF)[None, :]
        source = qkv_ptr + token * qkv_stride + head[:, None] * (2 * HALF) + half[None, :]
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        is_query = head < NUM_HEADS
        is_value = head >= NUM_HEADS + NUM_KV_HEADS
        turned_first, turned_second = first, second
        if HAS_NORM:
            dtype = qkv_ptr.dtype.element_ty
            square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            inverse = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
            in_half = (half < HALF)[None, :]
            q_first = tl.load(q_weight_ptr + half[None, :], mask=in_half, other=0.0).to(tl.float32)
            q_second = tl.load(q_weight_ptr + HALF + half[None, :], mask=in_half, other=0.0).to(tl.float32)
            k_first = tl.load(k_weight_ptr + half[None, :], mask=in_half, other=0.0).to(tl.float32)
            k_second = tl.load(k_weight_ptr + HALF + half[None, :], mask=in_half, other=0.0).to(tl.float32)
            first_weight = tl.where(is_query[:, None], q_first, k_first)
            second_weight = tl.where(is_query[:, None], q_second, k_second)
            turned_first = ((first * inverse).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
            turned_second = ((second * inverse).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
        cos = tl.load(cos_ptr + token * angle_stride + half, mask=half < HALF, other=0.0)[None, :]
        sin = tl.load(sin_ptr + token * angle_stride + half, mask=half < HALF, other=0.0)[None, :]
        new_first = tl.where(is_value[:, None], first, turned_first * cos - turned_second * sin)
        new_second = tl.where(is_value[:, None], second, turned_second * cos + turned_first * sin)

        to_query = inside & is_query[:, None]
        target = out_ptr + token * out_stride + head[:, None] * (2 * HALF) + half[None, :]
        tl.store(target, new_first.to(out_ptr.dtype.element_ty), mask=to_query)
        tl.store(target + HALF, new_second.to(out_ptr.dtype.element_ty), mask=to_query)

        slot = tl.load(slots_ptr + token)
        kv_head = tl.where(is_value, head - NUM_HEADS - NUM_KV_HEADS, head - NUM_HEADS)
        place = (slot // BLOCK_SIZE) * block_stride + kv_head.to(tl.int64) * head_stride + layer_offset
        place += (slot % BLOCK_SIZE + tl.where(is_value, BLOCK_SIZE, 0)) * (2 * HALF)
        target = kv_cache_ptr + place[:, None] + half[None, :]
        to_cache = inside & (head >= NUM_HEADS)[:, None]
        tl.store(target, new_first.to(kv_cache_ptr.dtype.element_ty), mask=to_cache)
        tl.store(target + HALF, new_second.to(kv_cache_ptr.dtype.element_ty), mask=to_cache)


def rope_and_write_kv(
    launch: Launch,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    qk_norm: QKNorm | None,
    kv_cache: Tensor,
    layer: int,
    layout: StepLayout,
    out: Tensor,
) -> None:
    """See `ops.Ops.rope_and_write_kv`. out [T, H, D]."""
    _, num_kv_heads, num_layers, _, block_size, head_dim = kv_cache.shape
    num_tokens, num_heads = out.shape[0], out.shape[1]
    num_all_heads = num_heads + 2 * num_kv_heads
    _check(qkv, cos, sin, qk_norm, kv_cache, layout, out)
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer {layer} of {num_layers}")
    q_weight, k_weight = (qkv, qkv) if qk_norm is None else (qk_norm.q_weight, qk_norm.k_weight)
    heads = min(_HEADS_PER_PROGRAM, next_power_of_two(num_all_heads))
    arguments = (
        qkv,
        cos,
        sin,
        q_weight,
        k_weight,
        kv_cache,
        layout.slots,
        layout.query_starts,
        out,
        layout.context_lens.shape[0],
        qkv.stride(0),
        cos.stride(0),
        out.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        layer * kv_cache.stride(2),
        0.0 if qk_norm is None else qk_norm.eps,
    )
    launch(
        _rope_kernel,
        (num_tokens, ceil_div(num_all_heads, heads)),
        arguments,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        HALF_BLOCK=next_power_of_two(head_dim // 2),
        BLOCK_SIZE=block_size,
        HEADS=heads,
        HAS_NORM=qk_norm is not None,
        num_warps=4 if head_dim > 64 else 2,
        num_stages=1,
    )


def _check(
    qkv: Tensor, cos: Tensor, sin: Tensor, qk_norm: QKNorm | None, kv_cache: Tensor, layout: StepLayout, out: Tensor
) -> None:
    num_tokens, num_heads, head_dim = out.shape
    check_float("qkv", qkv)
    check_rows("qkv", qkv, (num_tokens, (num_heads + 2 * kv_cache.shape[1]) * head_dim), kv_cache.dtype)
    check_rows("cos", cos, (num_tokens, head_dim // 2), torch.float32)
    check_rows("sin", sin, (num_tokens, head_dim // 2), torch.float32)
    check_rows("out", out, (num_tokens, num_heads, head_dim), qkv.dtype)
    check_index("slots", layout.slots, (num_tokens,))
    if cos.stride(0) != sin.stride(0):
        raise ValueError("cos and sin must have the same stride")
    if qk_norm is not None:
        check_rows("q_weight", qk_norm.q_weight, (head_dim,), qkv.dtype)
        check_rows("k_weight", qk_norm.k_weight, (head_dim,), qkv.dtype)
