"""What the machine can do: read bandwidth and bfloat16 matrix rate, each by several kernels. The best is the limit.

An adapter of `side_process`; its `load` needs torch and numpy.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.cpu.memory import huge_region

READ_BYTES = 1 << 30
"""Many times any cache."""
_NUM_COLUMNS = 4096
_NUM_READS = 3
_MATRIX_SIZES = ((2048, 2048, 2048), (4096, 4096, 4096), (1024, 4096, 4096))
"""Rows, inner, columns."""
_NUM_PRODUCTS = 3

Kernels = dict[str, Callable[[], object]]


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Threads that spin would be beaten by threads that sleep as soon as anybody else runs."""
    return {"OMP_WAIT_POLICY": "PASSIVE"}


def load(options: argparse.Namespace) -> Callable[[dict[str, Any]], dict[str, Any]]:
    num_threads = len(options.cores)
    torch.set_num_threads(num_threads)
    reads = _read_kernels(num_threads)

    @torch.inference_mode()
    def measure(command: dict[str, Any]) -> dict[str, Any]:
        if command["measure"] == "bandwidth":
            return {"rates": {name: READ_BYTES / _best_s(kernel, _NUM_READS) for name, kernel in reads.items()}}
        if command["measure"] == "matrix":
            return {"rates": _matrix_rates()}
        raise ValueError(f"cannot measure {command['measure']!r}")

    return measure


def _best_s(kernel: Callable[[], object], repeats: int) -> float:
    """The shortest of some: a limit is what can be reached."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        kernel()
        best = min(best, time.perf_counter() - started)
    return best


def _read_kernels(num_threads: int) -> Kernels:
    """Each reads the same READ_BYTES once, on `num_threads` threads."""
    # In huge pages, as our weights and KV are; written, or every page would be the system's one page of zeros.
    matrix = huge_region(READ_BYTES).view(torch.float32).view(-1, _NUM_COLUMNS).zero_()
    vector = torch.ones(_NUM_COLUMNS)
    array, numpy_vector = matrix.numpy(), vector.numpy()
    parts = np.array_split(array, num_threads)
    find_byte = ctypes.CDLL(None).memchr
    find_byte.argtypes, find_byte.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    executor = ThreadPoolExecutor(num_threads)

    def on_all_threads(function: Callable[[Any], object]) -> object:
        return list(executor.map(function, parts))

    return {
        "torch.mv, float32": lambda: torch.mv(matrix, vector),
        "torch.sum, float32": lambda: torch.sum(matrix),
        "numpy product, float32": lambda: on_all_threads(lambda part: part @ numpy_vector),
        "numpy sum, float32": lambda: on_all_threads(np.sum),
        # Looks for a byte that is not there: loads and compares, nothing else.
        "memchr": lambda: on_all_threads(lambda part: find_byte(part.ctypes.data, 1, part.nbytes)),
    }


def _matrix_rates() -> dict[str, float]:
    rates: dict[str, float] = {}
    for rows, inner, columns in _MATRIX_SIZES:
        left, right = torch.randn(rows, inner).bfloat16(), torch.randn(columns, inner).bfloat16()
        for name, kernel in _matrix_kernels(left, right).items():
            operations = 2.0 * rows * inner * columns
            rates[f"{name}, {rows} x {inner} x {columns}"] = operations / _best_s(kernel, _NUM_PRODUCTS)
    return rates


def _matrix_kernels(left: Tensor, right: Tensor) -> Kernels:
    """left [rows, inner] times the transpose of right [columns, inner], both bfloat16."""
    out = left.new_empty(left.shape[0], right.shape[0])
    packed = torch.ops.mkldnn._reorder_linear_weight(right, left.shape[0])
    return {
        "torch.mm": lambda: torch.mm(left, right.T, out=out),
        "oneDNN prepacked": lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], ""),
    }
