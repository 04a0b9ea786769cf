"""Decode attention of the CPU backend beside the read bandwidth of the same process, demo model's shape.

    tests/bench/attention.py [--threads 1] [--sequences 1,8,32] [--context 512] [--rounds 20]

One list of as many layers as the model has, each with KV of its own, as in a decode step. Prints the best and the
median round of each batch size. Rounds are interleaved, and the whole KV is read between, so small batches come from
memory, too. On a machine that others use, run it with a real-time priority on one core: `chrt -f 10 taskset -c 0 ...`;
with two threads set OMP_WAIT_POLICY=PASSIVE, or torch's threads spin on the cores that ours need.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tandem.kernels.cpu.backend import CpuOps
from tandem.kernels.cpu.memory import huge_region
from tandem.kernels.ops import StepLayout, StepPlan

HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCK_SIZE = 9, 3, 64, 30, 32


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode attention beside the read bandwidth.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    batches = [int(count) for count in options.sequences.split(",")]
    cache = _kv_cache(max(batches) * -(-options.context // BLOCK_SIZE))
    ops = CpuOps()
    steps = {count: _recorded(ops, cache, count, options.context) for count in batches}
    reader = _reader(cache)
    reads: list[float] = []
    seconds: dict[int, list[float]] = {count: [] for count in batches}
    for _ in range(options.rounds):
        reads.append(_timed(reader))
        for count in batches:
            seconds[count].append(_timed(steps[count]))
    lines = [f"read bandwidth: {_rates(reads, cache.nbytes)}, {options.threads} thread(s)"]
    for count in batches:
        num_bytes = count * options.context * KV_HEADS * HEAD_DIM * 2 * cache.itemsize * LAYERS
        best, median = min(seconds[count]) * 1e3, statistics.median(seconds[count]) * 1e3
        lines.append(f"{count} x {options.context}: {_rates(seconds[count], num_bytes)}; {best:.2f} ms ({median:.2f})")
    sys.stdout.write("\n".join(lines) + "\n")


def _kv_cache(num_blocks: int) -> Tensor:
    """[num_blocks, KV_HEADS, LAYERS, 2, BLOCK_SIZE, HEAD_DIM] bfloat16."""
    shape = (num_blocks, KV_HEADS, LAYERS, 2, BLOCK_SIZE, HEAD_DIM)
    cache = huge_region(torch.Size(shape).numel() * 2).view(torch.bfloat16).view(shape)
    return cache.normal_()


def _recorded(ops: CpuOps, cache: Tensor, count: int, context: int) -> Callable[[], None]:
    """Attention of one decode step of `count` sequences."""
    blocks = -(-context // BLOCK_SIZE)
    lens = torch.full((count,), context)
    tables = torch.arange(count * blocks).view(count, blocks)
    plan = StepPlan(StepLayout(lens - 1, torch.zeros_like(lens), torch.arange(count + 1), lens, tables))
    query = torch.randn(count, HEADS, HEAD_DIM).to(torch.bfloat16)
    out = torch.empty(count, HEADS * HEAD_DIM, dtype=torch.bfloat16)

    def step() -> None:
        for layer in range(LAYERS):
            ops.paged_attention(query, cache, layer, plan, HEAD_DIM**-0.5, out=out)

    return ops.capture(step).replay


def _reader(cache: Tensor) -> Callable[[], object]:
    """The same memory, read once from one end to the other."""
    matrix = cache.view(-1).view(torch.float32).view(-1, 1024)
    vector = torch.ones(1024)
    return lambda: torch.mv(matrix, vector)


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _rates(seconds: list[float], num_bytes: int) -> str:
    best, median = (num_bytes / value / 1e9 for value in (min(seconds), statistics.median(seconds)))
    return f"{best:.1f} GB/s (median {median:.1f})"


if __name__ == "__main__":
    main()
