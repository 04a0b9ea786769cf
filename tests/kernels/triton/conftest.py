"""The GPU kernels, on CPU tensors in triton's interpreter.

Whether kernels are interpreted is decided when triton is imported, so it happens here, with the variable set for the
moment: nothing else in this process, nor a process that it starts, sees it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from tandem.kernels.ops import Ops, StepLayout, load_ops

if "triton" in sys.modules:
    raise RuntimeError("triton was imported before this folder's conftest.py, so its kernels would not be interpreted")
os.environ["TRITON_INTERPRET"] = "1"
try:
    TRITON = load_ops("triton")
    import_module("triton.experimental.gluon")  # the interpreter imports it at the first launch
    INTERPRETER: Any = import_module("triton.runtime.interpreter")
finally:
    del os.environ["TRITON_INTERPRET"]


def _as_float32(handle: Any) -> np.ndarray[Any, Any]:
    """The interpreter keeps bfloat16 as its 16 bits."""
    if handle.dtype.scalar.name == "bf16":
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    values: np.ndarray[Any, Any] = handle.data.astype(np.float32)
    return values


def _ordered_dot(self: Any, a: Any, b: Any, acc: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Products summed in the order of K, as matrix units do it for every row, whatever the number of rows.

    The interpreter's own goes through BLAS, whose order depends on the shape, and gets bfloat16 wrong.
    """
    left, right = _as_float32(a), _as_float32(b)
    product = np.add.reduce(left[:, :, None] * right[None, :, :], axis=1, dtype=np.float32)
    return INTERPRETER.TensorHandle(acc.data + product, acc.dtype.scalar)


INTERPRETER.InterpreterBuilder.create_dot = _ordered_dot


@pytest.fixture
def ops() -> Ops:
    """The backend under test, in the interpreter."""
    return TRITON


@pytest.fixture
def reference() -> Ops:
    return load_ops("reference")


@pytest.fixture
def make_layout() -> Callable[..., StepLayout]:
    """Sequences by (tokens in the step, context length), each with blocks of its own, in no particular order.

    Block 0 is nobody's: what tables hold behind a sequence's blocks.

    `padding` adds rows that belong to nobody, `empty` sequences without tokens.
    """

    def make(
        sequences: Sequence[tuple[int, int]], block_size: int, padding: int = 0, empty: int = 0, width: int = 0
    ) -> StepLayout:
        blocks = [-(-context // block_size) for _, context in sequences]
        order = (torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(7)) + 1).tolist()
        tables = torch.zeros(len(sequences) + empty, max(width, *blocks), dtype=torch.int64)
        starts, positions, slots = [0], [], []
        for row, (num_tokens, context) in enumerate(sequences):
            mine = [order.pop() for _ in range(blocks[row])]
            tables[row, : len(mine)] = torch.tensor(mine)
            starts.append(starts[-1] + num_tokens)
            for position in range(context - num_tokens, context):
                positions.append(position)
                slots.append(mine[position // block_size] * block_size + position % block_size)
        return StepLayout(
            positions=torch.tensor(positions + [0] * padding),
            slots=torch.tensor(slots + [0] * padding),
            query_starts=torch.tensor(starts + starts[-1:] * empty),
            context_lens=torch.tensor([context for _, context in sequences] + [0] * empty),
            block_tables=tables,
        )

    return make
