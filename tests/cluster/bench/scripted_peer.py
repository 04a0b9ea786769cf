"""An engine that answers at once with known figures, for the tests of the protocol. Not a test."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def environment(options: argparse.Namespace) -> dict[str, str]:
    return {"SCRIPTED": options.variant}


def load(options: argparse.Namespace) -> Callable[[dict[str, Any]], dict[str, Any]]:
    if options.variant == "no-start":
        sys.exit("cannot be loaded, sorry")
    sys.stdout.write("libraries print what they like\n")
    sys.stdout.flush()

    def measure(command: dict[str, Any]) -> dict[str, Any]:
        if options.variant == "dies" and command["measure"] == "prefill":
            sys.stderr.write("killed by a bad prompt\n")
            os._exit(3)
        if command["measure"] == "about":
            cores = sorted(os.sched_getaffinity(0))
            return {"cores": cores, "scripted": os.environ["SCRIPTED"], "threads": os.environ["OMP_NUM_THREADS"]}
        if command["measure"] == "burn":
            ends = time.process_time() + command["seconds"]
            while time.process_time() < ends:
                pass
            return {}
        if command["measure"] == "fail":
            raise ValueError("not today")
        step_s = 0.25 if command["measure"] == "prefill" else 0.001 * command["streams"]
        return {"seconds": [step_s] * command.get("steps", 1), "command": command}

    return measure
