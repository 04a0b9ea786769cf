"""One check: child.py NAME MODULE DEVICE SECONDS. Writes its rows as JSON to where standard output was."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from importlib import import_module

from rows import Row


def main() -> None:
    name, module, device, share_s = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries write there, too

    def tell(row: Row) -> None:
        rows.write(json.dumps(asdict(row)) + "\n")
        rows.flush()

    began = time.monotonic()
    if device == "cpu" and name != "compiles":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    try:
        from report import Context

        for row in getattr(import_module(module), name)(Context.on(device)):
            tell(row)
            if time.monotonic() - began > share_s:
                tell(Row(name, "the rest", "skipped", "no time left"))
                break
    except BaseException as error:  # noqa: BLE001 (told, and counted)
        traceback.print_exc()
        first = next(iter(str(error).splitlines()), "")
        tell(Row(name, "ended early", "FAILED", f"{type(error).__name__}: {first}"[:200]))
    rows.flush()
    os._exit(0)  # a broken driver may hang at the end of a process


if __name__ == "__main__":
    main()
