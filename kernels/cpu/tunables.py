"""What the autotuner can choose for the CPU backend: how far ahead weights are fetched, how work is cut.

None of it touches the order of a reduction.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tandem.kernels.cpu.packing import CpuLinear
from tandem.kernels.ops import StepLayout, StepPlan
from tandem.kernels.tuning import Candidate, Tunable, TuningKey, TuningWorkload, buckets_up_to

if TYPE_CHECKING:
    from tandem.kernels.cpu.backend import CpuOps

_PREFETCHES = (4096, 0)
"""Bytes ahead of the weights in use."""
_ROW_BLOCKS = (512, 256, 128)
"""Rows that pass through several panels of weights before the next rows do."""
_LEAST_PREFILL_ROWS = 32
ATTENTION = tuple(Candidate.of(query_block=size) for size in (128, 64, 256, 32))


def linear_tunables(ops: CpuOps, workload: TuningWorkload) -> Iterator[Tunable]:
    """One per shape of weight and bucket of rows; the language-model head has a row per sequence only."""
    groups: dict[tuple[str, str], list[CpuLinear]] = {}
    for packed in workload.linears:
        assert isinstance(packed, CpuLinear)
        groups.setdefault((packed.op, packed.shape), []).append(packed)
    for (op, shape), weights in groups.items():
        is_head = workload.linears[-1] in weights
        for bucket in buckets_up_to(workload.max_seqs if is_head else workload.max_rows):
            key = TuningKey(op, shape, bucket, workload.dtype)
            yield Tunable(key, linear_candidates(bucket), _prepare_linear(ops, weights, bucket), timer=_timer())


def linear_candidates(rows: int) -> tuple[Candidate, ...]:
    """Those that differ: a block of more than all rows is no block."""
    row_blocks = [_ROW_BLOCKS[0], *(size for size in _ROW_BLOCKS[1:] if size < rows)]
    return tuple(
        Candidate.of(prefetch=prefetch, row_block=row_block)
        for prefetch, row_block in itertools.product(_PREFETCHES, row_blocks)
    )


def _prepare_linear(ops: CpuOps, weights: Sequence[CpuLinear], rows: int) -> Callable[[Candidate], Callable[[], None]]:
    """Each run takes the next weight, whichever candidate's it is: by then it has left the core's own cache."""
    one = weights[0]
    x = torch.ones(rows, one.in_features, dtype=one.dtype)
    out = torch.empty(rows, one.out_features, dtype=one.dtype)
    turn = itertools.cycle(range(len(weights)))

    def prepare(candidate: Candidate) -> Callable[[], None]:
        replays = [ops.capture(partial(ops.submit_linear, x, packed, out, candidate)).replay for packed in weights]
        return lambda: replays[next(turn)]()

    return prepare


def attention_tunables(ops: CpuOps, workload: TuningWorkload) -> Iterator[Tunable]:
    """A chunk of a prompt behind a context of its own length; decode steps have one row per sequence to share out."""
    for rows in buckets_up_to(workload.max_rows):
        if rows >= _LEAST_PREFILL_ROWS:
            shape = f"{workload.num_heads}:{workload.num_kv_heads}x{workload.head_dim}"
            key = TuningKey("paged_attention", shape, rows, workload.dtype)
            yield Tunable(key, ATTENTION, _prepare_attention(ops, workload, rows), timer=_timer())


def _prepare_attention(ops: CpuOps, workload: TuningWorkload, rows: int) -> Callable[[Candidate], Callable[[], None]]:
    dtype = getattr(torch, workload.dtype)
    context = min(2 * rows, max(workload.max_context, rows))
    num_blocks = -(-context // workload.block_size)
    kv_cache = torch.zeros(num_blocks, workload.num_kv_heads, 1, 2, workload.block_size, workload.head_dim, dtype=dtype)
    query = torch.ones(rows, workload.num_heads, workload.head_dim, dtype=dtype)
    positions = torch.arange(context - rows, context)
    tables = torch.arange(num_blocks).unsqueeze(0)
    layout = StepLayout(positions, positions, torch.tensor([0, rows]), torch.tensor([context]), tables)
    out = torch.empty(rows, workload.num_heads * workload.head_dim, dtype=dtype)
    scale = workload.head_dim**-0.5

    def prepare(candidate: Candidate) -> Callable[[], None]:
        operands = (query, kv_cache, 0, StepPlan(layout), scale, None, None, out)
        return ops.capture(partial(ops.submit_attention, *operands, candidate)).replay

    return prepare


def _timer() -> Callable[[], float]:
    """One thread's own time, which others who use its core do not lengthen; with several, the time that passes."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def cpu_name() -> str:
    """The CPU's model, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return "unknown CPU"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
