"""What is done to a row's logits before a token is drawn: biases, penalties, masks. Kernels call these, none is one."""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32
_CLAIMED = tl.constexpr(1 << 30)  # above every count


@triton.jit
def clean(logits: tl.tensor) -> tl.tensor:
    """float32, NaN as the lowest, infinities as the largest finite numbers."""
    wide = logits.to(tl.float32)
    wide = tl.where(wide == wide, wide, -LARGEST)
    return tl.minimum(tl.maximum(wide, -LARGEST), LARGEST)


@triton.jit
def penalise(
    scratch_row_ptr: tl.tensor,
    count_row_ptr: tl.tensor,
    history_ptr: tl.tensor,
    prompt_len: tl.tensor,
    history_len: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    repetition: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Rewrite the logits of the history's tokens. Counts are 0 before and after."""
    for first in range(0, history_len, BLOCK):
        index = first + tl.arange(0, BLOCK)
        token = tl.load(history_ptr + index, mask=index < history_len, other=0)
        tl.atomic_add(count_row_ptr + token, 1, mask=(index >= prompt_len) & (index < history_len), sem="relaxed")
    tl.debug_barrier()
    for first in range(0, history_len, BLOCK):
        index = first + tl.arange(0, BLOCK)
        known = index < history_len
        token = tl.load(history_ptr + index, mask=known, other=0)
        claimed = tl.atomic_or(count_row_ptr + token, _CLAIMED, mask=known, sem="relaxed")
        known = known & (claimed < _CLAIMED)  # of equals, one rewrites the token
        count = claimed.to(tl.float32)
        logits = tl.load(scratch_row_ptr + token, mask=known, other=0.0)
        logits = tl.where(logits > 0, logits / repetition, logits * repetition)
        logits = logits - frequency * count - tl.where(count > 0, presence, 0.0)
        tl.store(scratch_row_ptr + token, logits, mask=known)
    tl.debug_barrier()
    for first in range(0, history_len, BLOCK):
        index = first + tl.arange(0, BLOCK)
        token = tl.load(history_ptr + index, mask=index < history_len, other=0)
        tl.store(count_row_ptr + token, 0, mask=index < history_len)


@triton.jit
def add_biases(
    scratch_row_ptr: tl.tensor,
    bias_token_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    num_biases: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Add the row's biases to its logits. Their tokens are different ones."""
    for first in range(0, num_biases, BLOCK):
        index = first + tl.arange(0, BLOCK)
        known = index < num_biases
        token = tl.load(bias_token_ptr + index, mask=known, other=0)
        logits = tl.load(scratch_row_ptr + token, mask=known, other=0.0)
        logits = clean(logits + tl.load(bias_ptr + index, mask=known, other=0.0))
        tl.store(scratch_row_ptr + token, logits, mask=known)


@triton.jit
def _is_allowed(mask_row_ptr: tl.tensor, ids: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """The tokens' bits. bool"""
    words = tl.load(mask_row_ptr + ids // 32, mask=ids < vocab_size, other=0)
    return ((words >> (ids % 32)) & 1) != 0


@triton.jit
def mask(scratch_row_ptr: tl.tensor, mask_row_ptr: tl.tensor, vocab_size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """The lowest number for every token that may not be chosen."""
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        inside = ids < vocab_size
        forbidden = inside & ~_is_allowed(mask_row_ptr, ids, vocab_size)
        tl.store(scratch_row_ptr + ids, tl.full((BLOCK,), -LARGEST, tl.float32), mask=forbidden)


@triton.jit
def replace_forbidden(
    token: tl.tensor, mask_row_ptr: tl.tensor, vocab_size: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """The token if it is allowed, else the lowest that is, or 0."""
    word = tl.load(mask_row_ptr + token // 32)
    if ((word >> (token % 32)) & 1) == 0:
        lowest = vocab_size
        for first in range(0, vocab_size, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            allowed = _is_allowed(mask_row_ptr, ids, vocab_size)
            lowest = tl.minimum(lowest, tl.min(tl.where(allowed, ids, vocab_size), 0))
        token = tl.where(lowest < vocab_size, lowest, 0)
    return token
