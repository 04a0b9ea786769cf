"""Who used the cores: Linux's own counts, so that a figure taken on a busy machine can be told from a quiet one."""

from __future__ import annotations

import os
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
