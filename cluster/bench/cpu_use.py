"""Who used the cores: Linux's own counts, so that a figure taken on a busy machine can be told from a quiet one."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_FIELDS_BEFORE_IDLE = 3
_NUM_BUSY_FIELDS = 8
"""user nice system idle iowait irq softirq steal: all but idle and iowait is somebody's work."""


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds so far, of the whole machine and of those that we watch."""

    busy_s: float
    own_s: float

    def others_since(self, earlier: CpuUse, elapsed_s: float) -> float:
        """Cores that all other processes together kept busy, on average. The counts tick every 10 ms."""
        busy_s, own_s = self.busy_s - earlier.busy_s, self.own_s - earlier.own_s
        return max(0.0, busy_s - own_s) / elapsed_s if elapsed_s > 0 else 0.0


def cpu_use(process_group: int) -> CpuUse:
    """Of every process in `process_group`, and of this one."""
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    own = sum(_ticks(path, process_group) for path in _PROC.iterdir() if path.name.isdigit())
    return CpuUse(busy_ticks((_PROC / "stat").read_text()) * tick_s, own * tick_s)


def busy_ticks(stat: str) -> int:
    """From the text of /proc/stat: ticks of all cores that were neither idle nor waiting for a disk."""
    fields = [int(field) for field in stat.splitlines()[0].split()[1 : 1 + _NUM_BUSY_FIELDS]]
    return sum(fields) - sum(fields[_FIELDS_BEFORE_IDLE : _FIELDS_BEFORE_IDLE + 2])


def _ticks(folder: Path, process_group: int) -> int:
    """CPU ticks of one process, its children that have ended included; 0 if it is none of ours, or gone."""
    try:
        text = (folder / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # The name in parentheses may hold anything; what follows it is plain.
    fields = text[text.rindex(")") + 2 :].split()
    if int(fields[2]) != process_group and int(folder.name) != os.getpid():
        return 0
    return sum(int(field) for field in fields[11:15])


@dataclass(frozen=True, slots=True)
class ProcessMoment:
    """The clocks, in seconds, when one process was looked at. Its CPU time ticks every 10 ms."""

    wall_s: float
    cpu_s: float
    """Of all its threads."""
    busy_s: float
    """Of all cores."""
    own_s: float
    """CPU time of all that we watch, this process among them."""

    @classmethod
    def of(cls, pid: int, watched: Sequence[int] = ()) -> ProcessMoment:
        """Raises `ProcessLookupError` or `FileNotFoundError` when the process is gone."""
        tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        ticks = {each: _own_ticks(each) for each in {pid, os.getpid(), *watched}}
        busy = busy_ticks((_PROC / "stat").read_text())
        return cls(time.monotonic(), ticks[pid] * tick_s, busy * tick_s, sum(ticks.values()) * tick_s)

    def others_since(self, earlier: ProcessMoment) -> float:
        """Cores that all processes but the watched ones kept busy, on average."""
        others_s = (self.busy_s - earlier.busy_s) - (self.own_s - earlier.own_s)
        return max(0.0, others_s) / (self.wall_s - earlier.wall_s)


def _own_ticks(pid: int) -> int:
    """CPU ticks of one process, without those of its children."""
    text = (_PROC / str(pid) / "stat").read_text()
    return sum(int(field) for field in text[text.rindex(")") + 2 :].split()[11:13])


def resident_bytes(pid: int) -> int:
    """Memory of one process that is really there."""
    return int((_PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
