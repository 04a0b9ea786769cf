"""KV blocks from GPU memory to GPU memory over NIXL, between two processes: of two GPUs, or of one where there is one.

Run as a script, this file is the source: transfer_checks.py NUM_BLOCKS BLOCK_BYTES DEVICE.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
import xxhash
from report import Context
from rows import Row

from tandem.workers.errors import TransferError, UserError
from tandem.workers.kv_cache import KVCache
from tandem.workers.models.config import ModelConfig, RopeConfig
from tandem.workers.transfer.backends import create_transfer
from tandem.workers.transfer.base import KVPoolMemory
from tandem.workers.transfer.nixl_library import load_nixl

_TIMEOUT_S = 8.0
_NUM_PULLS = 5


def content(num_blocks: int, block_bytes: int, device: str) -> torch.Tensor:
    """uint8 [num_blocks, block_bytes], the same in every process."""
    words = torch.randint(-(2**62), 2**62, (num_blocks, block_bytes // 8), generator=torch.Generator().manual_seed(1))
    return words.view(torch.uint8).to(device)


def host_copies(context: Context) -> Iterator[Row]:
    """What tiers, digests and the probe do with blocks on the device, beside the same bytes in host memory."""
    shape = ModelConfig("llama", 100, 32, 64, 5, 6, 2, 8, 1e-5, 512, True, RopeConfig(10000.0))
    with torch.inference_mode():  # as a worker makes it
        cache = KVCache(shape, 4, 16, torch.bfloat16, context.device)
    rows = torch.arange(cache.block_bytes, dtype=torch.int64).to(torch.uint8).numpy()
    arrived = np.zeros_like(rows)
    cache.tensor.zero_()
    if context.device.type == "cuda":
        torch.cuda.synchronize()
    cache.copy_in(2, rows)
    cache.copy_out(2, arrived)
    is_right = np.array_equal(rows, arrived) and cache.digest(2) == xxhash.xxh3_128_digest(rows.data)
    is_right = is_right and cache.digest(1) == xxhash.xxh3_128_digest(np.zeros_like(rows).data)
    yield Row("transfer", "a block to the host and back, its digest", "ok" if is_right else "FAILED")


def transfer(context: Context) -> Iterator[Row]:
    source, target, where = "cpu", "cpu", "host memory"
    if context.device.type == "cuda":
        source, target = f"cuda:{torch.cuda.device_count() - 1}", "cuda:0"
        where = "two GPUs" if source != target else "one GPU, two processes"
    case = f"NIXL, {where}"
    try:
        library, _ = load_nixl("127.0.0.1", context.device.type)
    except UserError as error:
        yield Row("transfer", case, "skipped", str(error))
        return
    num_blocks, block_bytes = (4, 4096) if context.is_tiny else (256, 4 << 20)
    command = [sys.executable, __file__, str(num_blocks), str(block_bytes), source]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        description = next((line for line in process.stdout if _is_hex(line)), None)
        if description is None:
            yield Row("transfer", case, "FAILED", "the source could not be started: see what it said")
            return
        yield Row("transfer", f"{case}, library", "measured", library.__name__)
        yield from asyncio.run(_pull(bytes.fromhex(description), num_blocks, block_bytes, target, case))
    finally:
        process.kill()
        process.wait()


def _is_hex(line: str) -> bool:
    """Libraries write to standard output, too."""
    text = line.strip()
    return len(text) > 32 and all(character in "0123456789abcdef" for character in text)


async def _pull(peer: bytes, num_blocks: int, block_bytes: int, device: str, case: str) -> list[Row]:
    pool = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)
    if pool.is_cuda:
        torch.cuda.synchronize()
    ours = create_transfer("nixl", KVPoolMemory.of(pool), "reader", 0, pool.device.type)
    remote = list(range(0, num_blocks, 2))
    local = [num_blocks - 1 - block for block in remote]
    times = []
    try:
        for _ in range(_NUM_PULLS):
            began = time.perf_counter()
            await ours.pull(peer, remote, local, timeout_s=_TIMEOUT_S)
            times.append(time.perf_counter() - began)
    except TransferError as error:
        return [Row("transfer", case, "FAILED", f"{error} ({error.reason}), after {len(times)} pulls")]
    expected = content(num_blocks, block_bytes, device)
    is_right = torch.equal(pool[local], expected[remote])
    rate = len(remote) * block_bytes / min(times) / 1e9
    size = f"{len(remote)} blocks of {block_bytes >> 10} KiB"
    rows = [
        Row("transfer", f"{case}, bytes", "ok" if is_right else "FAILED", size),
        Row("transfer", f"{case}, rate", "measured", f"{rate:.1f} GB/s, {min(times) * 1e3:.2f} ms"),
        Row("transfer", f"{case}, first pull", "measured", f"{times[0] * 1e3:.0f} ms"),
    ]
    await ours.close()
    return rows


def main() -> None:
    num_blocks, block_bytes, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    pool = KVPoolMemory.of(content(num_blocks, block_bytes, device))
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    source = create_transfer("nixl", pool, "source", 0, pool.blocks.device.type)
    sys.stdout.write(source.describe().hex() + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
