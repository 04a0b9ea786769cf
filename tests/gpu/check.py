"""Runs the checks of this folder, each in a process of its own, and prints one table. See run.sh.

    check.py [--dry-run] [--list] [--only NAME ...] [--limit SECONDS]

    probe ──> checks that compare, side by side ──> checks that measure, one by one ──> table

A check that fails, dies, hangs or overruns its time costs its own rows and nobody else's. The exit status is 1 if
something failed, 2 if there is no GPU. No torch in here: what a driver does to a process happens elsewhere.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from children import Child
from plan import GRACE_S, LIMIT_S, PLAN, Planned
from rows import Row, table

HERE = Path(__file__).parent
PROBE_S = 60.0
POLL_S = 0.05


class Run:
    """All rows so far, and who makes more."""

    def __init__(self, wanted: Sequence[Planned], *, is_dry: bool, limit_s: float) -> None:
        self._wanted = wanted
        self._device = "cpu" if is_dry else "cuda"
        self._deadline = time.monotonic() + limit_s
        self._rows: dict[str, list[Row]] = {}
        self._children: list[Child] = []
        self.where = "interpreter"

    def run(self) -> None:
        together = [one for one in self._wanted if not one.measures]
        cores = len(os.sched_getaffinity(0))
        self._run(together, num_at_once=max(1, cores * 3 // 4))
        self._run([one for one in self._wanted if one.measures], num_at_once=1)

    def end(self) -> None:
        """End what still runs, and keep its rows."""
        for child in self._children:
            self._collect(child)
        self._children.clear()

    def report(self) -> str:
        """What there is so far. Checks that were not begun are in it, too."""
        rows: list[Row] = []
        for planned in self._wanted:
            rows += self._rows.get(planned.name, [Row(planned.name, "all", "skipped", "no time left")])
        failed = [row for row in rows if row.outcome == "FAILED"]
        skipped = sum(row.outcome == "skipped" for row in rows)
        # last, where whoever sees the end alone finds it
        heading = f"{self.where}: {len(failed)} failed, {skipped} skipped, {len(rows)} rows"
        again = f"\nFailed:\n\n{table(failed)}" if failed else ""
        return f"{table(rows)}{again}\n{heading}\n"

    @property
    def has_failed(self) -> bool:
        return any(row.outcome == "FAILED" for rows in self._rows.values() for row in rows)

    def _run(self, planned: Sequence[Planned], *, num_at_once: int) -> None:
        coming = list(planned)
        while coming or self._children:
            now = time.monotonic()
            while coming and len(self._children) < num_at_once and now < self._deadline:
                self._children.append(self._start(coming.pop(0), num_at_once))
            if now >= self._deadline:
                coming.clear()
            for child in [one for one in self._children if one.is_over or now >= min(one.deadline, self._deadline)]:
                self._children.remove(child)
                self._collect(child)
                write_report(self.report())
            time.sleep(POLL_S)

    def _start(self, planned: Planned, num_at_once: int) -> Child:
        share_s = min(planned.share_s, max(1.0, self._deadline - time.monotonic() - GRACE_S))
        command = [sys.executable, str(HERE / "child.py"), planned.name, planned.module, self._device, str(share_s)]
        threads = max(1, len(os.sched_getaffinity(0)) // num_at_once)
        return Child(planned.name, command, share_s + GRACE_S, os.environ | {"OMP_NUM_THREADS": str(threads)})

    def _collect(self, child: Child) -> None:
        self._rows[child.name] = child.collect()


def probe() -> str:
    """The GPU and what drives it, in one line. Exits with status 2 where there is none."""
    program = (
        "import platform, torch, triton\n"
        "assert torch.cuda.is_available(), f'torch {torch.__version__} finds no GPU'\n"
        "print(f'{torch.cuda.get_device_name()}, sm_%d%d, ' % torch.cuda.get_device_capability()\n"
        "    + f'torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}')\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=PROBE_S, check=False
        )
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired:
        done, why = None, f"no answer within {PROBE_S:.0f} s"
    if done is None or done.returncode != 0:
        sys.stderr.write(f"no GPU here ({why}): --dry-run does what needs none\n")
        sys.exit(2)
    return done.stdout.strip().splitlines()[-1]


def write_report(text: str) -> None:
    """After each check: whoever ends this early finds what there was."""
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "gpu.md").write_text(text, encoding="utf-8")


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    names = [planned.name for planned in PLAN]
    parser = argparse.ArgumentParser(description="Checks that need a GPU.")
    parser.add_argument("--dry-run", action="store_true", help="the smallest cases, in triton's interpreter")
    parser.add_argument("--list", action="store_true", help="list the checks")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="only these checks")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all of them")
    options = parser.parse_args()
    wanted = [planned for planned in PLAN if not options.only or planned.name in options.only]
    if options.list:
        sys.stdout.write("".join(f"{planned.name}\n" for planned in wanted))
        return 0
    signal.signal(signal.SIGTERM, _stop)
    run = Run(wanted, is_dry=options.dry_run, limit_s=options.limit)
    if not options.dry_run:
        run.where = probe()
    try:
        run.run()
    except KeyboardInterrupt:
        sys.stderr.write("stopped: this is what there was until now\n")
    finally:
        run.end()
    text = run.report()
    write_report(text)
    sys.stdout.write(text)
    return 1 if run.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
