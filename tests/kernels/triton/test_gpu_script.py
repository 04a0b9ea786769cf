"""The script for a GPU machine (tests/gpu): its checks hold in the interpreter, and none of them can hide another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "gpu"


def run(out: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHON": sys.executable, "OUT": str(out)} | environment
    return subprocess.run(
        [FOLDER / "run.sh", *arguments], capture_output=True, text=True, timeout=170, check=False, env=variables
    )


def test_it_lists_its_checks(tmp_path: Path) -> None:
    done = run(tmp_path, "--list")
    assert done.returncode == 0, done.stderr
    assert {"compiles", "attention", "models", "overlap", "workers", "transfer", "timings"} <= set(done.stdout.split())


def test_a_dry_run_computes_the_smallest_cases_in_the_interpreter(tmp_path: Path) -> None:
    done = run(tmp_path, "--dry-run", "--only", "products", "host_copies", "timings")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "gpu.md").read_text(encoding="utf-8") == done.stdout
    assert "FAILED" not in done.stdout
    assert "| linear | float16 600x70 batch-invariance | ok | equal bits |" in done.stdout
    assert "| timing | decode step, 2 sequences, defaults | measured |" in done.stdout


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(tmp_path, "--only", "sampling")
    assert done.returncode == 2
    assert done.stderr.startswith("nothing was checked: ")
    assert done.stderr.count("\n") == 1
    assert "lacks CUDA in its torch" in done.stderr or "no GPU here" in done.stderr


def test_a_python_that_lacks_something_is_told_in_one_line(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E -I "$@"\n')
    bare.chmod(0o755)
    done = run(tmp_path, "--dry-run", PYTHON=str(bare))
    assert done.returncode == 2
    assert f"{bare} lacks torch, triton, numpy" in done.stderr
    assert done.stderr.count("\n") == 1


IMPORTER = """
import sys
from importlib import import_module

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
from plan import PLAN
for one in PLAN:
    import_module(one.module)
"""


def test_it_asks_for_all_that_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU may have little else, and no way to get it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    from prerequisites import PACKAGES

    declared = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    names = {re.split("[^a-z0-9-]", one)[0].replace("-", "_") for one in declared["project"]["dependencies"]}
    refused = names - set(PACKAGES) - {"jinja2"}  # torch's
    assert "ray" in refused
    program = IMPORTER.replace("{names}", repr(refused))
    variables = os.environ | {"PYTHONPATH": str(FOLDER), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr


BROKEN = """
import os, signal, sys, time
from rows import Row

def _one(name):
    yield Row("broken", name, "ok")

def raises(context):
    yield from _one("raises")
    raise ValueError("on purpose")

def dies(context):
    yield from _one("dies")
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs(context):
    yield from _one("hangs")
    time.sleep(60)

def overruns(context):
    for _ in range(600):
        yield from _one("overruns")
        time.sleep(0.05)

def holds(context):
    print("a library's own words")
    yield from _one("holds")
"""


def test_a_check_that_fails_dies_hangs_or_overruns_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(FOLDER)]))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("OUT", str(tmp_path))
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "report.py").write_text("class Context:\n    on = classmethod(lambda cls, device: None)\n")
    import check
    from plan import Planned

    monkeypatch.setattr(check, "GRACE_S", 0.5)
    names = ("raises", "dies", "hangs", "overruns", "holds")
    planned = [Planned(name, "broken", 1.0, measures=name == "holds") for name in names]
    began = time.monotonic()
    ran = check.Run(planned, is_dry=True, limit_s=60.0)
    ran.run()
    assert time.monotonic() - began < 30
    rows = [line.split(" | ")[1:3] for line in ran.report().splitlines() if line.startswith("| ")]
    for name in names:
        assert [name, "ok"] in rows, ran.report()
    assert "3 failed, 1 skipped" in ran.report().splitlines()[-1]
    assert "ValueError: on purpose" in ran.report()
    assert "signal 11" in ran.report()
    assert "it hung" in ran.report()
    assert "| overruns | the rest | skipped | no time left |" in ran.report()
    assert (tmp_path / "gpu.md").read_text(encoding="utf-8") == ran.report()
    late = check.Run(planned, is_dry=True, limit_s=0.0)
    late.run()
    assert late.report().count("| skipped | no time left |") == len(names)
    assert not late.has_failed
