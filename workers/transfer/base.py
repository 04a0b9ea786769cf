"""The seam between the handover and whatever moves the bytes: `describe` on one side, `pull` on the other.

The reader pulls; nobody ever writes into another worker's pool. A pull says only that bytes arrived: whether they are
the right ones is for the caller to check against the ticket (generation, digest, lease).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tandem.workers.errors import TransferError

if TYPE_CHECKING:
    import torch

NUM_PATTERN_BLOCKS = 4
"""Blocks behind the pool's own (ids from num_blocks on): they carry a known pattern for others' first pulls, and nobody
writes into them."""
NUM_PROBE_BLOCKS = 2 * NUM_PATTERN_BLOCKS
"""Those, and as many behind them, where a worker's own first pulls arrive: others may read the pattern meanwhile."""


class PullTimeout(TransferError):
    """The pull did not end in time. Until `settled` is done its destination blocks may be written: quarantine them."""

    def __init__(self, message: str, settled: Awaitable[None]) -> None:
        super().__init__(message, reason="timeout")
        self.settled = settled


@dataclass(frozen=True, slots=True)
class KVPoolMemory:
    """One worker's pool as a transport sees it: `num_blocks` (probe blocks included) times `block_bytes`, in one piece.

    Holds the tensor, so the memory lives as long as this record does.
    """

    blocks: torch.Tensor
    """uint8 [num_blocks, block_bytes], contiguous, on the worker's device."""
    address: int

    @classmethod
    def of(cls, pool: torch.Tensor) -> KVPoolMemory:
        """View a contiguous tensor of any dtype, [num_blocks, ...], as blocks of bytes. Copies nothing."""
        import torch

        blocks = pool.view(pool.shape[0], -1).view(torch.uint8)
        return cls(blocks=blocks, address=blocks.data_ptr())

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[0]

    @property
    def block_bytes(self) -> int:
        return self.blocks.shape[1]


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
        Does not block the event loop for the time of the copy. A cancelled pull ends only when its destination is
        quiet: it raises `CancelledError` then, or `PullTimeout` if that takes longer than `timeout_s`.
        """

    def transport_of(self, peer: bytes) -> str:
        """The transport in use towards this peer, for people: "cma", "tcp", "gloo", ..."""

    async def forget(self, peer: bytes) -> None:
        """Drop what is kept for this peer (it died, or came back as a new epoch). Unknown peers are fine."""

    async def close(self) -> None:
        """Release everything. No pull may be in flight."""


def check_pull(
    pool: KVPoolMemory,
    remote_blocks: Sequence[int],
    local_blocks: Sequence[int],
    *,
    remote_num_blocks: int,
    remote_block_bytes: int,
) -> None:
    """Refuse a pull that could touch anything but the named blocks. Raises `TransferError` with reason "refused"."""
    if remote_block_bytes != pool.block_bytes:
        raise refused(f"block_bytes differs: ours {pool.block_bytes}, theirs {remote_block_bytes}")
    if len(remote_blocks) != len(local_blocks):
        raise refused(f"{len(remote_blocks)} remote blocks for {len(local_blocks)} local ones")
    if len(set(local_blocks)) != len(local_blocks):
        raise refused("a local block is named twice")
    for side, blocks, num_blocks in (
        ("remote", remote_blocks, remote_num_blocks),
        ("local", local_blocks, pool.num_blocks),
    ):
        if blocks and not (min(blocks) >= 0 and max(blocks) < num_blocks):
            raise refused(f"{side} block out of range: ids {min(blocks)} to {max(blocks)} of {num_blocks} blocks")


def finish_copies(blocks: torch.Tensor) -> None:
    """Wait for what this thread has copied into a pool: whoever reads it next may do so on another stream."""
    if blocks.is_cuda:
        import torch

        torch.cuda.current_stream(blocks.device).synchronize()


def refused(message: str) -> TransferError:
    return TransferError(message, reason="refused")


async def undisturbed(copying: Coroutine[Any, Any, None]) -> None:
    """Run a copy to its end even if the awaiting task is cancelled meanwhile, then let the cancellation go on.

    A copy cannot be recalled: were the caller to give its blocks away at once, bytes would land in somebody else's.
    An error of the copy (`PullTimeout` above all) is raised in place of the cancellation.
    """
    task = asyncio.ensure_future(copying)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and task.exception() is None:
        raise cancelled
    task.result()


def probe_pattern(num_bytes: int) -> np.ndarray:
    """The known pattern of the probe blocks: uint8 [num_bytes], the same on every worker, without short periods."""
    counter = np.arange((num_bytes + 7) // 8, dtype=np.uint64)
    mixed = (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed ^ (mixed >> np.uint64(29))).view(np.uint8)[:num_bytes]
