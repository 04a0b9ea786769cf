"""The one table of transports. A library is imported only when its transport is asked for."""

from __future__ import annotations

from tandem.workers.config import TransferName
from tandem.workers.errors import UserError
from tandem.workers.transfer.base import KVPoolMemory, Transfer
from tandem.workers.transfer.local import LocalPools


def create_transfer(
    name: TransferName,
    kv_pool: KVPoolMemory,
    worker_id: str,
    epoch: int,
    device: str,
    *,
    host: str = "127.0.0.1",
    local_pools: LocalPools | None = None,
) -> Transfer:
    """Make one worker's end of the transport `name`. `host` is the address that peers reach this worker at.

    `local_pools` is who can be reached by "local"; by default nobody but the worker itself. Raises `UserError` when the
    transport's library is missing or its environment cannot work.
    """
    if kv_pool.blocks.device.type != device:
        raise UserError(f"the KV pool is on {kv_pool.blocks.device.type}, but device is {device!r}")
    if name == "nixl":
        from tandem.workers.transfer.nixl import NixlTransfer

        return NixlTransfer(kv_pool, worker_id=worker_id, epoch=epoch, host=host)
    if name == "nccl":
        from tandem.workers.transfer.nccl import NcclTransfer

        return NcclTransfer(kv_pool, host=host)
    if name == "local":
        from tandem.workers.transfer.local import LocalTransfer

        return LocalTransfer(kv_pool, local_pools if local_pools is not None else LocalPools())
    raise UserError(f"transfer must be nixl, nccl or local, but is {name!r}")
