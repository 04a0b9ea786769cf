"""All kernels go through Triton's own launcher, and a worker that serves compiles nothing that its start did not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_nothing_is_compiled_once_a_worker_serves() -> None:
    program = Path(__file__).with_name("variants_program.py")
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", program], capture_output=True, text=True, timeout=100, check=False, env=variables
    )
    assert done.returncode == 0, done.stderr
    first, *later = done.stdout.splitlines()
    assert int(first.split()[0]) > 20
    assert later == []
