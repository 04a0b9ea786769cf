"""The checks: where each is, how long it may take, and what runs beside it. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Planned:
    """One check, which runs in a process of its own: an error of the device would spoil everything behind it."""

    name: str
    """Of a function in `module` that yields rows."""
    module: str
    share_s: float
    """After so long it stops at the next row. Most of it goes into compiling."""
    measures: bool = False
    """It runs by itself, after those that run together."""


PLAN = (
    Planned("norms_and_embedding", "op_checks", 60.0),
    Planned("sampling", "op_checks", 90.0),
    Planned("host_copies", "transfer_checks", 30.0),
    Planned("products", "op_checks", 150.0),
    Planned("attention", "op_checks", 150.0),
    Planned("attention_heads", "op_checks", 150.0),
    Planned("models", "model_checks", 150.0),
    Planned("overlap", "overlap_checks", 150.0),
    Planned("compiles", "compile_checks", 120.0),
    Planned("workers", "worker_checks", 60.0, measures=True),
    Planned("transfer", "transfer_checks", 30.0, measures=True),
    Planned("hidden", "overlap_checks", 45.0, measures=True),
    Planned("timings", "timings", 90.0, measures=True),
)
GRACE_S = 15.0
"""What a row may overrun its check's share by, before its process is ended."""
LIMIT_S = 440.0
"""Of all of it."""
