"""What a check finds, line by line, and the table. No torch in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    check: str
    case: str
    outcome: Literal["ok", "FAILED", "skipped", "measured"]
    detail: str = ""


def table(rows: Sequence[Row]) -> str:
    """As markdown."""
    lines = ["| check | case | outcome | |", "|---|---|---|---|"]
    lines += [f"| {row.check} | {row.case} | {row.outcome} | {row.detail.replace('|', '/')} |" for row in rows]
    return "\n".join(lines) + "\n"
