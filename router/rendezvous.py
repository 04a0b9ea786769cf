"""Which workers requests with the same `prompt_cache_key` prefer: the same at every gateway, without a word.

Rendezvous hashing: each worker's name and the key make a number, and the lowest numbers are preferred in that order. A
worker that comes or goes changes the order of nobody else. Pure functions.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

NUM_PREFERRED = 8
"""Of each kind: the next one is asked when the first is busier than others."""
Hashes = npt.NDArray[np.uint64]
"""[num_workers]."""


def key_of(label: str, salt: str = "") -> int:
    """The number of a client's key, 64 bits. `salt`: two tenants' equal labels are different keys."""
    return int.from_bytes(blake2b(label.encode(), key=salt.encode()[:64], digest_size=8).digest(), "big")


@lru_cache(maxsize=1 << 14)
def hash_of(worker_id: str) -> int:
    return int.from_bytes(blake2b(worker_id.encode(), digest_size=8).digest(), "big")


def first_rows(key: int, hashes: Hashes) -> list[int]:
    """The rows of `NUM_PREFERRED` workers, or of all there are, in the key's order. `hashes`: `hash_of` each."""
    numbers = _mixed(hashes ^ np.uint64(key))
    count = min(NUM_PREFERRED, len(numbers))
    lowest = np.argpartition(numbers, count - 1)[:count] if count else np.arange(0)
    rows: list[int] = lowest[np.argsort(numbers[lowest])].tolist()
    return rows


def _mixed(numbers: Hashes) -> Hashes:
    """Every bit depends on every bit: splitmix64's finaliser. Without it the order of two workers for a key would tell
    that of others, and some would be first far more often."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
