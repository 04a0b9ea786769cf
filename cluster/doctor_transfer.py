"""One measurement for `tandem doctor`: how fast NIXL moves KV blocks here. Prints one line of JSON.

A program of its own: `python -m tandem.cluster.doctor_transfer`. Two agents in one process read from each other over
loopback, in blocks as large as those of a small model.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

NUM_BLOCKS = 64
BLOCK_BYTES = 720 << 10
ROUNDS = 5
TIMEOUT_S = 20.0


async def measure() -> dict[str, object]:
    """The best of a few rounds. Raises `TandemError` when NIXL cannot be used."""
    import torch

    from tandem.workers.transfer.base import KVPoolMemory
    from tandem.workers.transfer.nixl import NixlTransfer

    pools = [KVPoolMemory.of(torch.full((NUM_BLOCKS, BLOCK_BYTES), fill, dtype=torch.uint8)) for fill in (1, 2)]
    source, reader = (
        NixlTransfer(pool, worker_id=name, epoch=0, host="127.0.0.1")
        for pool, name in zip(pools, ("a", "b"), strict=True)
    )
    blocks = list(range(NUM_BLOCKS))
    described = source.describe()
    best_s = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        await reader.pull(described, blocks, blocks, timeout_s=TIMEOUT_S)
        best_s = min(best_s, time.perf_counter() - began)
    assert bool((pools[1].blocks == 1).all()), "what was read is not what was there"
    result = {
        "transport": reader.transport_of(described),
        "gigabytes_per_s": NUM_BLOCKS * BLOCK_BYTES / best_s / 1e9,
    }
    await reader.close()
    await source.close()
    return result


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(measure())) + "\n")
