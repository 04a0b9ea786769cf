"""How many blocks of KV a worker has: what it was told, or, on a GPU, what its memory holds beside everything else.

What else there is cannot be known before it is there, and recorded steps hold the cache's addresses. So a worker starts
with a trial cache, tunes, records and rehearses with that, looks at what is left, and records once more: its kernels
are compiled by then, so that takes a second.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem.workers.config import WorkerConfig
from tandem.workers.device import DeviceMemory, kv_memory_bytes
from tandem.workers.errors import UserError
from tandem.workers.kv_cache import KVCache, num_blocks_for
from tandem.workers.models.config import ModelConfig


def first_num_blocks(config: WorkerConfig, model: ModelConfig) -> int:
    """All of them if their memory was given, else enough for a trial. Raises `UserError` if a request does not fit."""
    if config.kv_cache_memory_bytes is None:
        return -(-config.max_num_batched_tokens // config.block_size)
    return _checked(config, model, config.kv_cache_memory_bytes, "kv_cache_memory_bytes holds")


def full_cache(
    config: WorkerConfig,
    model: ModelConfig,
    trial: KVCache,
    measure: Callable[[torch.device], DeviceMemory] = DeviceMemory.of,
) -> KVCache:
    """In place of the trial one, now that all else is in the device's memory. Raises `UserError` as above."""
    device = trial.tensor.device
    left = kv_memory_bytes(measure(device), config.gpu_memory_utilization, config.gpu_share)
    num_blocks = _checked(config, model, left, f"what is left of the GPU's memory for KV, {left} bytes, holds")
    return KVCache(model, num_blocks, config.block_size, trial.tensor.dtype, device)


def _checked(config: WorkerConfig, model: ModelConfig, num_bytes: int, found: str) -> int:
    num_blocks = num_blocks_for(num_bytes, model, config.block_size, getattr(torch, config.dtype))
    num_tokens = num_blocks * config.block_size
    if num_tokens < config.max_model_len:
        raise UserError(
            f"{found} {num_tokens} tokens, but max_model_len is {config.max_model_len}: raise the first or lower the "
            f"second"
        )
    return num_blocks
