"""Runs the checks of this folder and prints one table. See run.sh.

    check.py [--dry-run] [--only NAME ...] [--device cuda]

`--device cpu` runs the smallest cases in triton's interpreter: it shows that the checks work, not that the GPU does.
The exit status is 1 if something failed. Each check has its share of the time (most of it goes into compiling); what
does not fit is left out, and says so.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

BUDGET_S = 430.0
SHARES_S = {"attention": 100.0, "products": 80.0, "models": 80.0, "overlap": 60.0}
"""Of the checks that could take it all. The others are short, and the timings come last."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks that need a GPU.")
    parser.add_argument("--dry-run", action="store_true", help="list the checks")
    parser.add_argument("--only", nargs="*", help="only these checks")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

    import torch
    from model_checks import models
    from op_checks import attention, norms_and_embedding, products, sampling
    from overlap_checks import overlap
    from report import Check, Context, Row, table
    from timings import timings
    from transfer_checks import host_copies, transfer

    checks: tuple[Check, ...] = (
        *(norms_and_embedding, sampling, host_copies, transfer),
        *(products, attention, models, overlap, timings),
    )
    wanted = [check for check in checks if not options.only or check.__name__ in options.only]
    if options.dry_run:
        sys.stdout.write("".join(f"{check.__name__}\n" for check in wanted))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("no GPU here: --device cpu runs the smallest cases in the interpreter\n")
        return 2

    began = time.monotonic()
    rows: list[Row] = []
    with torch.inference_mode():
        context = Context.on(options.device)
        for check in wanted:
            started = time.monotonic()
            if started - began > BUDGET_S:
                rows.append(Row(check.__name__, "all", "skipped", "no time left"))
                continue
            try:
                for row in check(context):
                    rows.append(row)
                    sys.stderr.write(f"{row.check}: {row.case}: {row.outcome} {row.detail}\n")
                    now = time.monotonic()
                    if now - began > BUDGET_S or now - started > SHARES_S.get(check.__name__, BUDGET_S):
                        rows.append(Row(check.__name__, "the rest", "skipped", "no time left"))
                        break
            except Exception as error:  # noqa: BLE001 (one broken check must not hide the others; it is shown and counted)
                traceback.print_exc()
                rows.append(Row(check.__name__, "ended early", "FAILED", f"{type(error).__name__}: {error}"[:200]))
            rows.append(Row(check.__name__, "seconds", "measured", f"{time.monotonic() - started:.1f}"))
    failed = sum(row.outcome == "FAILED" for row in rows)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "interpreter"
    heading = f"{name}, torch {torch.__version__}: {failed} failed, {len(rows)} rows\n\n"
    text = heading + table(rows)
    sys.stdout.write(text)
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "gpu.md").write_text(text, encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
