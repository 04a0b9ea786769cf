"""The memory that holds K and V: one tensor, in which each block is one contiguous range of bytes."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from tandem.kernels.cpu.memory import huge_region
from tandem.workers.models.config import ModelConfig
from tandem.workers.transfer.base import NUM_PROBE_BLOCKS

LAYOUT_VERSION = 1
"""Of `[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]`. Two workers must agree on it."""


class KVCache:
    """Blocks of KV, `num_blocks` of them for the block pool and NUM_PROBE_BLOCKS behind them for the transfer's probe.

    Memory is reserved, not touched: a block costs physical memory once it is written. What a fresh block holds is
    undefined.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (num_blocks + NUM_PROBE_BLOCKS, config.num_kv_heads, config.num_layers, 2, block_size, config.head_dim)
        # Made in inference mode it could only be written there, and tiers and transports write from other threads.
        with torch.inference_mode(mode=False):
            if torch.device(device).type == "cpu":
                self.tensor = huge_region(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
            else:
                self.tensor = torch.empty(shape, dtype=dtype, device=device)
        # Steps run on another stream, and none of them touches a block while it is copied: so copies wait for nobody.
        on_device = self.tensor.is_cuda
        self._copies = torch.cuda.Stream(self.tensor.device) if on_device else None  # type: ignore[no-untyped-call]
        self.num_blocks = num_blocks
        """Blocks of the pool, without the probe blocks."""
        self.block_size = block_size
        self.block_bytes = block_bytes(config, block_size, dtype)

    def data_ptr(self) -> int:
        """Address of block 0; block i is `i * block_bytes` behind it."""
        return self.tensor.data_ptr()

    def copy_block(self, source: int, destination: int) -> None:
        """All of it, also what no token has written yet: one move of a contiguous range."""
        self.tensor[destination].copy_(self.tensor[source])

    def bytes_of(self, block_id: int) -> npt.NDArray[np.uint8]:
        """A writable view of one block, uint8 [block_bytes]. CPU only. Raises `IndexError` on an unknown id."""
        view: npt.NDArray[np.uint8] = self._block(block_id).numpy()
        return view

    def copy_out(self, block_id: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy one block into uint8 [block_bytes] of host memory. Lets other threads run meanwhile."""
        if self._copies is None:
            np.copyto(out, self.bytes_of(block_id))
        else:
            with torch.cuda.stream(self._copies):
                torch.from_numpy(out).copy_(self._block(block_id))

    def copy_in(self, block_id: int, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite one block with uint8 [block_bytes] of host memory; done when this returns."""
        if self._copies is None:
            np.copyto(self.bytes_of(block_id), data)
        else:
            with torch.cuda.stream(self._copies):
                self._block(block_id).copy_(torch.from_numpy(np.require(data, requirements="W")))
            self._copies.synchronize()

    def digest(self, block_id: int) -> bytes:
        """xxh3-128 of the block's bytes, 16 bytes."""
        if self._copies is None:
            return xxhash.xxh3_128_digest(self.bytes_of(block_id).data)
        host = torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        self.copy_out(block_id, host)
        return xxhash.xxh3_128_digest(host.data)

    def _block(self, block_id: int) -> torch.Tensor:
        """uint8 [block_bytes], a view of one block on its device."""
        if not 0 <= block_id < self.tensor.shape[0]:
            raise IndexError(f"block {block_id} of {self.tensor.shape[0]}")
        return self.tensor[block_id].view(torch.uint8).view(-1)


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: K and V of `block_size` tokens over all layers."""
    return config.kv_elements_per_token * block_size * dtype.itemsize


def num_blocks_for(memory_bytes: int, config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Blocks for the pool that fit into `memory_bytes` beside the probe blocks; 0 if none does."""
    return max(0, memory_bytes // block_bytes(config, block_size, dtype) - NUM_PROBE_BLOCKS)
