"""What the checks share: the context they run in, their rows, and the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tandem.kernels.ops import Ops, load_ops


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    check: str
    case: str
    outcome: Literal["ok", "FAILED", "skipped", "measured"]
    detail: str = ""


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
        return cls(place, load_ops("triton"), load_ops("reference"), place.type == "cpu")

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        every = (torch.float32, torch.float16, torch.bfloat16)
        return every[1:2] if self.is_tiny else every


Check = Callable[[Context], Iterator[Row]]


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def close(check: str, case: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> Row:
    """Compare with the reference's result, relative to its largest value."""
    scale = max(1.0, float(expected.float().abs().max()))
    error = float((actual.float().cpu() - expected.float().cpu()).abs().max()) / scale
    return Row(check, case, "ok" if error <= tolerance else "FAILED", f"error {error:.1e}, at most {tolerance:.0e}")


def equal(check: str, case: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Row:
    """Bit for bit."""
    wrong = sum(not torch.equal(actual, expected) for actual, expected in pairs)
    return Row(check, case, "FAILED" if wrong else "ok", f"{wrong} of {len(pairs)} differ" if wrong else "equal bits")


def table(rows: Sequence[Row]) -> str:
    """As markdown."""
    lines = ["| check | case | outcome | |", "|---|---|---|---|"]
    lines += [f"| {row.check} | {row.case} | {row.outcome} | {row.detail} |" for row in rows]
    return "\n".join(lines) + "\n"
