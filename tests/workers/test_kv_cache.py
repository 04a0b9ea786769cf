"""The cache's layout, its byte view, its digests, and that reserved memory is free until it is used."""

from __future__ import annotations

import psutil
import pytest
import torch
import xxhash

from tandem.workers.kv_cache import KVCache, block_bytes, num_blocks_for
from tandem.workers.models.config import ModelConfig, RopeConfig
from tandem.workers.transfer.base import NUM_PROBE_BLOCKS

CONFIG = ModelConfig("llama", 100, 32, 64, 5, 6, 2, 8, 1e-5, 512, True, RopeConfig(10000.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_block_is_one_contiguous_range(dtype: torch.dtype) -> None:
    cache = KVCache(CONFIG, 4, 16, dtype, "cpu")
    assert cache.tensor.shape == (4 + NUM_PROBE_BLOCKS, 2, 5, 2, 16, 8)
    assert cache.tensor.is_contiguous()
    assert cache.num_blocks == 4
    assert cache.block_bytes == 2 * 5 * 2 * 16 * 8 * dtype.itemsize == block_bytes(CONFIG, 16, dtype)
    assert cache.data_ptr() == cache.tensor.data_ptr()
    assert cache.tensor[3].data_ptr() == cache.data_ptr() + 3 * cache.block_bytes


def test_bytes_are_a_writable_view_and_the_digest_covers_them() -> None:
    cache = KVCache(CONFIG, 4, 16, torch.bfloat16, "cpu")
    cache.tensor.fill_(1.0)
    before = [cache.digest(block) for block in range(4)]
    assert before[2] == xxhash.xxh3_128_digest(bytes(cache.bytes_of(2)))
    assert len(before[2]) == 16
    cache.bytes_of(2)[-1] ^= 1
    assert float(cache.tensor[2].flatten()[-1]) != 1.0
    assert bool((cache.tensor[[1, 3]] == 1.0).all())
    assert [block for block in range(4) if cache.digest(block) != before[block]] == [2]


@pytest.mark.parametrize("device", ["cpu", "meta"])  # which stands for any other
def test_it_may_be_written_outside_of_inference_mode(device: str) -> None:
    """As tiers, transports and the probe do, in threads of their own."""
    with torch.inference_mode():
        cache = KVCache(CONFIG, 4, 16, torch.bfloat16, device)
    assert not cache.tensor.is_inference()
    cache.tensor[2].view(torch.uint8).zero_()
    with torch.inference_mode():
        cache.copy_block(2, 3)


@pytest.mark.parametrize("block_id", [-1, 4 + NUM_PROBE_BLOCKS])
def test_unknown_blocks_are_refused(block_id: int) -> None:
    with pytest.raises(IndexError):
        KVCache(CONFIG, 4, 16, torch.bfloat16, "cpu").bytes_of(block_id)


def test_untouched_memory_costs_nothing() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KVCache(CONFIG, 1 << 19, 16, torch.float32, "cpu")
    assert cache.tensor.nbytes > 5 << 30
    assert process.memory_info().rss - before < 64 << 20


def test_blocks_that_fit() -> None:
    size = block_bytes(CONFIG, 16, torch.bfloat16)
    assert num_blocks_for(size * (NUM_PROBE_BLOCKS + 3), CONFIG, 16, torch.bfloat16) == 3
    assert num_blocks_for(size * (NUM_PROBE_BLOCKS + 3) - 1, CONFIG, 16, torch.bfloat16) == 2
    assert num_blocks_for(size, CONFIG, 16, torch.bfloat16) == 0
