"""Fixtures for tests of the whole: a running cluster, started as a user starts it and shared by all who only look."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

DEMO_MODEL = "smollm2-135m-instruct"
READY = re.compile(r"ready: (?P<model>\S+) at (?P<url>http://\S+)/v1 .*admin (?P<admin_url>http://[^)]+)\)")
START_TIMEOUT_S = 150.0
TANDEM = (sys.executable, "-P", "-c", "from tandem.cluster.cli import main; main()")
"""The command, for the interpreter that runs the tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes share the tests (`--dist loadgroup`) file by file, as fixtures of a module are dear. All that
    starts Ray is one group: one cluster is shared, and what kills workers or measures how they die wants no second one
    beside it."""
    for item in items:
        is_cluster = item.get_closest_marker("cluster") or "start_serving" in getattr(item, "fixturenames", ())
        group = "cluster" if is_cluster else str(item.path.relative_to(item.config.rootpath))
        item.add_marker(pytest.mark.xdist_group(group))


@dataclass
class Serving:
    """A `tandem serve` of ours. `url` has no /v1 at its end."""

    process: subprocess.Popen[str]
    model: str
    url: str
    admin_url: str
    lines: list[str] = field(default_factory=list)
    """What it has written to standard error so far."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def cluster(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.admin_url}/cluster", timeout=10).raise_for_status().json()
        return answer

    def worker(self, worker_id: str) -> dict[str, Any] | None:
        return next((worker for worker in self.cluster()["workers"] if worker["id"] == worker_id), None)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def complete(self, prompt: str, **fields: Any) -> httpx.Response:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)


def launch(*arguments: str, cwd: Path) -> Serving:
    """Start `tandem serve` and wait for its ready line. `pytest.fail` with what it said when that does not come."""
    tuning = ("--tuning-deadline", "0")  # who runs the tests need not wait for it
    process = subprocess.Popen(
        [*TANDEM, "serve", *(arguments or (DEMO_MODEL,)), "--port", "0", "--admin-port", "0", *tuning],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        start_new_session=True,
    )
    lines: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    listening = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
    listening.start()
    giving_up = threading.Timer(START_TIMEOUT_S, process.kill)
    giving_up.start()
    ready = READY.match(process.stdout.readline())
    giving_up.cancel()
    if ready is None:
        process.kill()
        process.wait()
        listening.join()
        process.stdout.close()
        process.stderr.close()
        pytest.fail("tandem serve did not get ready:\n" + "".join(lines))
    return Serving(process, ready["model"], ready["url"], ready["admin_url"], lines)


def end(serving: Serving) -> None:
    """Stop it if it still runs, kindly at first."""
    if serving.process.poll() is None:
        serving.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            serving.process.wait(timeout=20)
    serving.process.kill()
    serving.process.wait()
    for pipe in (serving.process.stdout, serving.process.stderr):
        assert pipe is not None
        pipe.close()


@pytest.fixture(scope="session")
def start_serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Serving]]:
    """Starts a cluster that the test may break: `start_serving(MODEL, *flags)`, the demo model by default."""
    started: list[Serving] = []
    # Files that must not get in the way of modules of that name, in us or in what we start.
    folder = tmp_path_factory.mktemp("current-folder")
    for name in ("msgspec", "kernels", "workers", "numpy"):
        (folder / f"{name}.py").write_text("raise SystemExit('a file of the current folder was imported')\n")

    def start(*arguments: str) -> Serving:
        started.append(launch(*arguments, cwd=folder))
        return started[-1]

    yield start
    for serving in started:
        end(serving)


@pytest.fixture(scope="session")
def serving(start_serving: Callable[..., Serving]) -> Serving:
    """One prefill and one decode worker on the demo model, shared: leave it as you found it."""
    return start_serving()
