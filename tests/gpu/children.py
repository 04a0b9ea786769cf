"""A check's process, seen from outside: what it says, whether it is over, and its end. No torch in here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from rows import Row


class Child:
    """Started at once. It writes rows as JSON, one per line; its group of processes ends with it."""

    def __init__(self, name: str, command: Sequence[str], limit_s: float, environment: Mapping[str, str]) -> None:
        self.name = name
        self._began = time.monotonic()
        self.deadline = self._began + limit_s
        self._rows: list[Row] = []
        pipes: dict[str, int] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, start_new_session=True, env=environment, **pipes)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def collect(self) -> list[Row]:
        """All rows, with one about the end where that was none of its own. Ends the process if need be."""
        is_late = not self.is_over
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what it may have left behind, too
        status = self._process.wait()
        self._reader.join(timeout=5.0)
        seconds = time.monotonic() - self._began
        if is_late:
            self._rows.append(Row(self.name, "ended from outside", "FAILED", f"it hung, or took {seconds:.0f} s"))
        elif status != 0:
            why = f"signal {-status}" if status < 0 else f"exit status {status}"
            self._rows.append(Row(self.name, "ended early", "FAILED", f"{why}: see what it said"))
        self._rows.append(Row(self.name, "seconds", "measured", f"{seconds:.1f}"))
        return self._rows

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    row = Row(**json.loads(line))
                except (ValueError, TypeError):
                    sys.stderr.write(line)
                    continue
                self._rows.append(row)
                sys.stderr.write(f"{row.check}: {row.case}: {row.outcome} {row.detail}\n")
