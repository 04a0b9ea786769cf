"""A source worker in another process: serves a pool of known content until its standard input closes.

Run as a script: peer.py BACKEND NUM_BLOCKS BLOCK_BYTES. Writes its description in hex on one line of standard output.
"""

from __future__ import annotations

import sys

import torch

from tandem.workers.transfer.backends import create_transfer
from tandem.workers.transfer.base import KVPoolMemory


def content(num_blocks: int, block_bytes: int, seed: int) -> torch.Tensor:
    """uint8 [num_blocks, block_bytes], the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**62), 2**62, (num_blocks, (block_bytes + 7) // 8), generator=generator)
    return words.view(torch.uint8)[:, :block_bytes].contiguous()


def main() -> None:
    torch.set_num_threads(1)
    name, num_blocks, block_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pool = KVPoolMemory.of(content(num_blocks, block_bytes, seed=1))
    transfer = create_transfer(name, pool, "peer", 0, "cpu")  # type: ignore[arg-type]
    sys.stdout.write(transfer.describe().hex() + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
