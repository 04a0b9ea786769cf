"""The in-process fake: pools of one process, found by an id in the description, copied with plain tensor copies.

It keeps the contract of the real transports (validation, own thread, deadlines), so tests and a single-process worker
pair can run on it. Which pools can be reached is decided by who shares a `LocalPools`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from tandem.workers.errors import TransferError
from tandem.workers.transfer.base import KVPoolMemory, check_pull, finish_copies, refused, undisturbed


class LocalPools:
    """The pools that `LocalTransfer`s of one process can read from each other, by id."""

    def __init__(self) -> None:
        self.by_id: dict[str, KVPoolMemory] = {}


class _Description(msgspec.Struct, frozen=True, tag="local", forbid_unknown_fields=True):
    pool_id: str


class LocalTransfer:
    """`Transfer` between the pools of one process."""

    name = "local"

    def __init__(self, pool: KVPoolMemory, pools: LocalPools) -> None:
        self._pool = pool
        self._pools = pools
        self._pool_id = uuid.uuid4().hex
        self._thread = ThreadPoolExecutor(1, "transfer-local")
        pools.by_id[self._pool_id] = pool

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(_Description(self._pool_id))

    async def pull(
        self, peer: bytes, remote_blocks: Sequence[int], local_blocks: Sequence[int], *, timeout_s: float
    ) -> None:
        source = self._find(peer)
        check_pull(
            self._pool,
            remote_blocks,
            local_blocks,
            remote_num_blocks=source.num_blocks,
            remote_block_bytes=source.block_bytes,
        )
        await undisturbed(self._copy(source, list(remote_blocks), list(local_blocks)))

    def transport_of(self, peer: bytes) -> str:
        return "memcpy"

    async def forget(self, peer: bytes) -> None:
        """Nothing is kept per peer."""

    async def close(self) -> None:
        self._pools.by_id.pop(self._pool_id, None)
        self._thread.shutdown()

    def _find(self, peer: bytes) -> KVPoolMemory:
        try:
            pool_id = msgspec.msgpack.decode(peer, type=_Description).pool_id
        except msgspec.DecodeError as error:
            raise refused("not the description of a local pool") from error
        source = self._pools.by_id.get(pool_id)
        if source is None:
            raise TransferError("the peer's pool is not, or no longer, in this process", reason="disconnect")
        return source

    async def _copy(self, source: KVPoolMemory, remote_blocks: list[int], local_blocks: list[int]) -> None:
        def copy() -> None:
            for remote, local in zip(remote_blocks, local_blocks, strict=True):
                self._pool.blocks[local].copy_(source.blocks[remote])
            finish_copies(self._pool.blocks)

        await asyncio.get_running_loop().run_in_executor(self._thread, copy)
