"""The tiers that a worker's configuration asks for."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from tandem.workers.config import WorkerConfig
from tandem.workers.errors import UserError
from tandem.workers.metrics import WorkerMetrics
from tandem.workers.offload.disk import DiskTier
from tandem.workers.offload.disk_file import DiskFile, num_slots_for, worker_file
from tandem.workers.offload.host import HostTier
from tandem.workers.offload.records import TierEvent, nobody_listens
from tandem.workers.offload.tiers import BlockMemory, Tiers
from tandem.workers.types import ModelIdentity

NUM_SPARE_BLOCKS = 16
"""Slots of host memory beyond what was asked for: blocks on their way. With a disk, they are its writer's queue."""


def create_tiers(
    config: WorkerConfig,
    identity: ModelIdentity,
    memory: BlockMemory,
    metrics: WorkerMetrics,
    on_event: TierEvent = nobody_listens,
) -> Tiers | None:
    """None when no tier was asked for. Raises `UserError` when one would not hold a single block."""
    num_host = config.kv_host_memory_bytes // memory.block_bytes
    if config.kv_host_memory_bytes and num_host == 0:
        raise UserError(f"kv_host_memory_bytes must hold a block, which is {memory.block_bytes} bytes")
    disk = _create_disk(config, identity, memory.block_bytes, metrics, on_event)
    if num_host == 0 and disk is None:
        return None
    host = HostTier(num_host, NUM_SPARE_BLOCKS, memory.block_bytes, on_event)
    return Tiers(memory, config.block_size, host, disk, metrics)


def _create_disk(
    config: WorkerConfig, identity: ModelIdentity, block_bytes: int, metrics: WorkerMetrics, on_event: TierEvent
) -> DiskTier | None:
    if config.kv_disk_path is None:
        return None
    num_slots = num_slots_for(config.kv_disk_bytes, block_bytes, config.block_size)
    if num_slots == 0:
        raise UserError(f"kv_disk_bytes must hold a block, which is {block_bytes} bytes and a header")
    file = worker_file(config.kv_disk_path, config.worker_id)
    namespace = namespace_of(identity, config.cluster_key)

    def open_file() -> DiskFile:
        return DiskFile(file, num_slots, block_bytes, config.block_size, namespace)

    def count(event: str) -> None:
        if event == "evicted":
            metrics.count("kv_tier_evicted_blocks_total", tier="disk")
        else:
            metrics.count("kv_tier_failures_total", tier="disk", reason=event)

    return DiskTier(open_file, num_slots, block_bytes, count, on_event)


def namespace_of(identity: ModelIdentity, cluster_key: bytes) -> bytes:
    """16 bytes that stand for the model, the layout, and the secret behind the keys. Blocks of another namespace would
    never be asked for: their slots may be reused at once."""
    parts = [
        getattr(identity, field.name) for field in msgspec.structs.fields(identity) if field.name != "max_model_len"
    ]
    return blake2b(msgspec.msgpack.encode(parts), key=cluster_key[:64], digest_size=16, person=b"tandem-disk").digest()
