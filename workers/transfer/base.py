"""The seam between the handover and whatever moves the bytes: `describe` on one side, `pull` on the other.

The reader pulls; nobody ever writes into another worker's pool. A pull says only that bytes arrived: whether they are
the right ones is for the caller to check against the ticket (generation, digest, lease).
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

import numpy as np

from tandem.workers.errors import TransferError

NUM_PROBE_BLOCKS = 8
"""Blocks behind the pool's own (ids num_blocks to num_blocks + 7): they carry a known pattern for the first pull."""


class PullTimeout(TransferError):
    """The pull did not end in time. Until `settled` is done its destination blocks may be written: quarantine them."""

    def __init__(self, message: str, settled: Awaitable[None]) -> None:
        super().__init__(message, reason="timeout")
        self.settled = settled


class Transfer(Protocol):
    """One worker's end of a transport. All methods are called from the worker's event loop."""

    name: str

    def describe(self) -> bytes:
        """What a peer needs to read this worker's pool. Opaque, safe to parse (no pickle), at most 1 MiB."""

    async def pull(
        self, peer: bytes, remote_blocks: Sequence[int], local_blocks: Sequence[int], *, timeout_s: float
    ) -> None:
        """Copy the peer's blocks into ours, pairwise. `peer` is the peer's `describe()`.

        Returns when every byte has landed. Raises `TransferError` with the reason, `PullTimeout` if more may land.
        Does not block the event loop for the time of the copy.
        """

    def transport_of(self, peer: bytes) -> str:
        """The transport in use towards this peer, for people: "cma", "tcp", "gloo", ..."""

    async def forget(self, peer: bytes) -> None:
        """Drop what is kept for this peer (it died, or came back as a new epoch). Unknown peers are fine."""

    async def close(self) -> None:
        """Release everything. No pull may be in flight."""


def probe_pattern(num_bytes: int) -> np.ndarray:
    """The known pattern of the probe blocks: uint8 [num_bytes], the same on every worker, without short periods."""
    counter = np.arange((num_bytes + 7) // 8, dtype=np.uint64)
    mixed = (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed ^ (mixed >> np.uint64(29))).view(np.uint8)[:num_bytes]
