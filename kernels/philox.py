"""Philox4x32-10, the counter-based random generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(SC11), vectorised over rows in int64 arithmetic.

There is no state: a token's random number is a function of (seed, choice, position), so it is the same on every worker
and at every batch size.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio, and sqrt(3) - 1
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _multiply(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of 32-bit words; int64 overflow wraps, which keeps all 64 bits."""
    product = x * multiplier
    return (product >> 32) & _MASK, product & _MASK


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random 32-bit words per row. Words are int64 tensors [num_rows] with values in [0, 2**32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """One number in [0, 1) per row, float64 with 53 random bits. All int64 [num_rows].

    Key: low and high word of the seed. Counter: low and high word of the position, the choice, 0.
    """
    counter = (position & _MASK, (position >> 32) & _MASK, choice & _MASK, torch.zeros_like(choice))
    first, second, _, _ = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    bits = ((first >> 5) << 26) | (second >> 6)
    return bits.to(torch.float64) * 2.0**-53
