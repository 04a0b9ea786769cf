"""Blocks for tests of the tiers: everything about one follows from its name, a number."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tandem.workers.offload.records import Record, pack

BLOCK_BYTES = 1000
BLOCK_SIZE = 4
NAMESPACE = b"n" * 16


def content(name: int) -> npt.NDArray[np.uint8]:
    """The bytes of the block of this name, uint8 [BLOCK_BYTES]."""
    return np.random.default_rng(name).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def key_of(name: int) -> bytes:
    return name.to_bytes(16, "big")


def tokens_of(name: int) -> tuple[int, ...]:
    return tuple(range(name, name + BLOCK_SIZE))


def parent_of(name: int) -> bytes | None:
    """Names that are multiples of 10 begin a prompt; the others follow upon the name before."""
    return key_of(name - 1) if name % 10 else None


def record_of(name: int, priority: int = 35) -> Record:
    return Record(key_of(name), parent_of(name), pack(tokens_of(name)), priority)
