"""What the user sees while a cluster starts: who does what, and for how long.

Parts are "model", "ray", "redis", "gateway" and one per worker; phases are short sentences in the present tense. On a
terminal one table is redrawn in place; anywhere else each change is one plain line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass(slots=True)
class PartProgress:
    """One line of the table. Times in seconds of the clock."""

    phase: str
    phase_since: float
    started: float
    ended: float | None = None
    phases: list[tuple[str, float]] = field(default_factory=list)
    """Phases that are over, with their length in seconds."""


class StartProgress:
    """Collects phases per part. This base class shows nothing; the two below show it in their way."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.began = clock()
        self.parts: dict[str, PartProgress] = {}

    def phase(self, part: str, phase: str) -> None:
        """`part` is now doing `phase`. Repeating the current phase changes nothing."""
        now = self._clock()
        known = self.parts.get(part)
        if known is None or known.ended is not None:
            self.parts[part] = PartProgress(phase=phase, phase_since=now, started=now)
        elif known.phase == phase:
            return
        else:
            known.phases.append((known.phase, now - known.phase_since))
            known.phase, known.phase_since = phase, now
        self._show(part)

    def done(self, part: str, outcome: str = "ready") -> None:
        """`part` has finished starting."""
        if part not in self.parts:
            self.phase(part, outcome)
        known, now = self.parts[part], self._clock()
        known.phases.append((known.phase, now - known.phase_since))
        known.phase, known.phase_since, known.ended = outcome, now, now
        self._show(part)

    def update(self, part: str, message: str, done: int | None, total: int | None) -> None:
        """A phase that may know how far it is: shown as percent, and not as a phase of its own."""
        self.phase(part, message)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self.began

    def seconds(self, part: str) -> float:
        known = self.parts[part]
        return (self._clock() if known.ended is None else known.ended) - known.started

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Show until the block ends."""
        yield

    def _show(self, part: str) -> None:
        """Called after each change."""


class PlainProgress(StartProgress):
    """One line per change: seconds since the start, part, phase, and at its end the seconds that the part took."""

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._stream = stream

    def _show(self, part: str) -> None:
        known = self.parts[part]
        took = "" if known.ended is None else f" ({self.seconds(part):.1f} s)"
        self._stream.write(f"[{self.elapsed_s:5.1f} s] {part:<13} {known.phase}{took}\n")
        self._stream.flush()


class LogProgress(StartProgress):
    """One record per change."""

    def _show(self, part: str) -> None:
        known = self.parts[part]
        fields: dict[str, str | float] = {"part": part, "phase": known.phase, "elapsed_s": round(self.elapsed_s, 1)}
        if known.ended is not None:
            fields["took_s"] = round(self.seconds(part), 1)
        logger.info("%s: %s", part, known.phase, extra={"fields": fields})


class TableProgress(StartProgress):
    """A table that is redrawn in place ten times a second, so that the seconds run."""

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._console = console
        self._percent: dict[str, int] = {}

    def update(self, part: str, message: str, done: int | None, total: int | None) -> None:
        self.phase(part, message)
        if done is not None and total:
            self._percent[part] = 100 * done // total

    @contextmanager
    def showing(self) -> Iterator[None]:
        with Live(get_renderable=self._table, console=self._console, refresh_per_second=10):
            yield

    def _show(self, part: str) -> None:
        self._percent.pop(part, None)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("part", style="bold", min_width=12)
        table.add_column("phase", min_width=40)
        table.add_column("seconds", justify="right")
        for part, known in list(self.parts.items()):
            mark = "[green]✓[/]" if known.ended is not None else "[yellow]…[/]"
            percent = f" {self._percent[part]} %" if part in self._percent else ""
            table.add_row(part, f"{mark} {known.phase}{percent}", f"{self.seconds(part):.1f}")
        return table


def create_progress(stream: TextIO, *, as_records: bool = False) -> StartProgress:
    """Records where the log is for machines; else the table on a terminal, lines elsewhere."""
    if as_records:
        return LogProgress()
    if stream.isatty():
        return TableProgress(Console(file=stream))
    return PlainProgress(stream)
