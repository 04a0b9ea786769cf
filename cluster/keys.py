"""What one cluster's processes share: a secret, a name for their part of Redis, and where epochs begin."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """`secret` authenticates connections and keys the block hashes; `namespace` separates clusters in one Redis."""

    secret: bytes
    namespace: str
    first_epoch: int
    """Of the workers. Those of a later launcher with the same key come after all that an earlier one has used."""

    @classmethod
    def of(cls, text: str | None) -> ClusterKey:
        """From the words that every process of the cluster was given; None: a random one that nobody else has."""
        if text is None:
            return cls(secret=secrets.token_bytes(32), namespace=secrets.token_hex(8), first_epoch=0)
        return cls(
            secret=_derived(text, b"secret"),
            namespace=_derived(text, b"namespace")[:8].hex(),
            first_epoch=int(time.time()),
        )


def _derived(text: str, purpose: bytes) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"tandem " + purpose).digest()
