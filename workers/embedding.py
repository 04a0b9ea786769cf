"""Pooled hidden states become an embedding. Everything is added in one order, whatever chunks the tokens came in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]  # [num_rows, hidden]


def add_rows(total: Rows | None, rows: Rows) -> Rows:
    """`total` ([1, hidden]; None: nothing yet) and these rows behind it, added one by one."""
    for row in rows:
        total = row[None].copy() if total is None else total + row
    assert total is not None, "no rows"
    return total


def unit_vector(total: Rows) -> bytes | None:
    """`total` [1, hidden] at length 1: little-endian float32. None: not all is finite, or all is zero."""
    values = total[0].astype(np.float64)
    length = float(np.sqrt(np.sum(values * values)))
    if not 0 < length < float("inf"):
        return None
    embedding: bytes = (values / length).astype("<f4").tobytes()
    return embedding
