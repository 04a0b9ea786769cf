"""The script for a GPU machine (tests/gpu) starts, lists its checks, and its smallest cases hold in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "gpu" / "run.sh"


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(out)}
    return subprocess.run([RUN, *arguments], capture_output=True, text=True, timeout=170, check=False, env=environment)


def test_a_dry_run_lists_the_checks(tmp_path: Path) -> None:
    done = run(tmp_path, "--dry-run")
    assert done.returncode == 0, done.stderr
    expected = [
        "norms_and_embedding",
        "sampling",
        "host_copies",
        "transfer",
        "products",
        "attention",
        "models",
        "overlap",
        "timings",
    ]
    assert done.stdout.split() == expected


def test_the_smallest_cases_hold_in_the_interpreter(tmp_path: Path) -> None:
    done = run(tmp_path, "--device", "cpu", "--only", "products", "host_copies", "transfer", "timings")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "gpu.md").read_text(encoding="utf-8") == done.stdout
    assert "FAILED" not in done.stdout
    assert "| timing | all | skipped | no GPU |" in done.stdout


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(tmp_path, "--only", "sampling")
    assert done.returncode == 2
    assert "no GPU here" in done.stderr
