"""The part of pooling that touches tensors: which rows of a step's hidden states an item wants, and their sums.

A mean is made of the sums of whole blocks of tokens, each added up from its first token to its last. Chunks begin at
the border of a block, so these sums do not depend on chunks, and nobody computes beside whom.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.workers.batch import PoolSpec


def pool(hidden: Tensor, spec: PoolSpec) -> Tensor:
    """hidden [num_tokens, hidden]: of the tokens that an item computed, after the final norm. Returns the rows of
    `Pooled`, [num_rows, hidden] float32, on the same device: a copy, since the next step overwrites the others."""
    if spec.mode == "last":
        rows = hidden[-1:]
    elif spec.mode == "first":
        rows = hidden[:1]
    else:
        rows = _run_sums(hidden.to(torch.float32), spec.run_len)
    return rows.to(torch.float32, copy=True)


def _run_sums(hidden: Tensor, run_len: int) -> Tensor:
    """[num_tokens, hidden] float32 -> [num_runs, hidden]: sums of `run_len` rows each, the last maybe of fewer."""
    num_whole = hidden.shape[0] // run_len
    whole, rest = hidden[: num_whole * run_len], hidden[num_whole * run_len :]
    sums = []
    if num_whole:
        sums.append(_sum_in_order(whole.view(num_whole, run_len, -1)))
    if len(rest):
        sums.append(_sum_in_order(rest[None]))
    return torch.cat(sums)


def _sum_in_order(runs: Tensor) -> Tensor:
    """[num_runs, run_len, hidden] -> [num_runs, hidden]. Additions alone: a reduction may choose its order."""
    total = runs[:, 0].clone()
    for index in range(1, runs.shape[1]):
        total += runs[:, index]
    return total
