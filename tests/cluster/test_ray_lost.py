"""The launcher's own Ray dies: the launcher says so and goes, and whoever asked it something hears the end of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

if TYPE_CHECKING:
    from conftest import Serving
else:
    Serving = Any

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def doomed(start_serving: Callable[..., Serving]) -> Serving:
    return start_serving("smollm2-135m-instruct", "--aggregated", "1", "--log-format", "json")


def records(serving: Serving) -> list[dict[str, Any]]:
    """Whatever is not JSON fails here: the log is for machines, from the first line to the last."""
    return [json.loads(line) for line in serving.lines]


def wait_until(question: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not question():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_what_a_worker_warns_of_is_in_the_log(doomed: Serving) -> None:
    host, _, port = doomed.cluster()["workers"][0]["address"].rpartition(":")

    def told() -> list[dict[str, Any]]:
        return [record for record in records(doomed) if record.get("logger") == "tandem.workers.server"]

    with socket.create_connection((host, int(port)), timeout=5) as stranger, contextlib.suppress(OSError):
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        wait_until(lambda: bool(told()), 10)
    assert told()[0]["level"] == "warning"
    assert (told()[0]["worker"], told()[0]["epoch"]) == ("aggregated-0", 0)
    assert told()[0]["message"].startswith("aggregated-0 epoch 0: a peer broke the protocol")


def test_the_launcher_says_so_and_goes(doomed: Serving) -> None:
    events: list[str] = []
    streaming = threading.Thread(target=lambda: events.extend(stream(doomed)))
    streaming.start()
    wait_until(lambda: doomed.cluster()["workers"][0]["running"] > 0, 10)
    everybody = doomed.descendants()
    folders = {process.cwd() for process in everybody if "tandem-" in process.cwd()}
    (raylet,) = [process for process in everybody if process.name() == "raylet"]
    os.kill(raylet.pid, signal.SIGKILL)
    assert doomed.process.wait(timeout=20) == 1
    streaming.join(timeout=10)
    assert events[-1] == "[DONE]"
    assert "error" in json.loads(events[-2])
    wait_until(lambda: not any(is_running(process) for process in everybody), 5)
    assert len(folders) == 1
    assert not any(os.path.exists(folder) for folder in folders)
    assert [record["message"] for record in records(doomed) if record["level"] in ("error", "critical")][-1] == (
        "Ray's raylet on this machine is gone; this process ends, so that it is started anew"
    )


def stream(serving: Serving) -> list[str]:
    """The events of an answer that takes its time."""
    body = {"model": serving.model, "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{serving.url}/v1/completions", json=body, timeout=60) as answer:
        return [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]


def is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
