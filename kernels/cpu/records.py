"""The native op record, as `native/op.h` lays it out, and lists of them.

A list is one buffer: appending is packing one record behind the last, running is one native call with its address.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from torch import Tensor

MAX_POINTERS, MAX_SIZES, MAX_NUMBERS = 24, 16, 4

RECORD = struct.Struct(f"<q{MAX_POINTERS}Q{MAX_SIZES}q{MAX_NUMBERS}d")
_NO_SIZES = (0,) * MAX_SIZES
_NO_NUMBERS = (0.0,) * MAX_NUMBERS

# The order of the table in native/run.cpp.
EMBEDDING, RMS_NORM, ROPE_AND_WRITE_KV, LINEAR, PAGED_ATTENTION, SAMPLE = range(6)


class OpList:
    """Native ops in the order in which they run. Keeps alive whatever their addresses point to."""

    def __init__(self) -> None:
        self._records = bytearray()
        self._operands: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._records) // RECORD.size

    def append(
        self,
        code: int,
        operands: Sequence[Tensor | None],
        sizes: Sequence[int],
        numbers: Sequence[float] = (),
    ) -> None:
        """Add one op. An operand that is None is a null pointer."""
        pointers = [0] * MAX_POINTERS
        for index, tensor in enumerate(operands):
            if tensor is not None:
                pointers[index] = tensor.data_ptr()
                self._operands.append(tensor)
        self._records += RECORD.pack(
            code, *pointers, *sizes, *_NO_SIZES[len(sizes) :], *numbers, *_NO_NUMBERS[len(numbers) :]
        )

    def run(self, library: ctypes.CDLL, num_threads: int) -> None:
        """One native call; the GIL is free meanwhile."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._records)) if self._records else 0
        status = library.tandem_run(address, len(self), num_threads)
        assert status == 0, "an op code that the library does not know"
