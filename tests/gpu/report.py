"""What the checks share: the context they run in, and how they compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from rows import Row
from torch import Tensor

from tandem.kernels.capture import Captured
from tandem.kernels.ops import Ops, load_ops
from tandem.kernels.triton.backend import TritonOps
from tandem.kernels.triton.graph import count_ops

T = TypeVar("T")


class InterpretedOps(TritonOps):
    """In the interpreter there are no graphs: a replay computes the step again, into the tensors of the first time."""

    def capture(self, step: Callable[[], T]) -> Captured[T] | None:
        result, num_ops = count_ops(step, self._launch)
        return Captured(result, lambda: _copy(step(), result), num_ops)


def _copy(source: Any, target: Any) -> None:
    """Tensors, or records of them."""
    if isinstance(target, Tensor):
        target.copy_(source)
        return
    for each in fields(target):
        if (old := getattr(target, each.name)) is not None:
            old.copy_(getattr(source, each.name))


@dataclass(frozen=True, slots=True)
class Context:
    """Where and how thoroughly to check."""

    device: torch.device
    ops: Ops
    reference: Ops
    is_tiny: bool
    """The smallest of everything: for the interpreter, to see that the checks themselves work."""

    @classmethod
    def on(cls, device: str) -> Context:
        place = torch.device(device)
        is_tiny = place.type == "cpu"
        return cls(place, InterpretedOps() if is_tiny else load_ops("triton"), load_ops("reference"), is_tiny)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        every = (torch.float32, torch.float16, torch.bfloat16)
        return every[1:2] if self.is_tiny else every


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def close(check: str, case: str, actual: Tensor, expected: Tensor, tolerance: float) -> Row:
    """Compare with the reference's result, relative to its largest value. What is not a number is wrong."""
    scale = max(1.0, float(expected.float().abs().max()))
    error = float((actual.float().cpu() - expected.float().cpu()).abs().max()) / scale
    return Row(check, case, "ok" if error <= tolerance else "FAILED", f"error {error:.1e}, at most {tolerance:.0e}")


def equal(check: str, case: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> Row:
    """Bit for bit."""
    wrong = sum(not torch.equal(actual, expected) for actual, expected in pairs)
    return Row(check, case, "FAILED" if wrong else "ok", f"{wrong} of {len(pairs)} differ" if wrong else "equal bits")
