"""A place for one worker, with an actor that is not Ray's: what is heard of it while it starts, and when it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from tandem.cluster import worker_slot
from tandem.cluster.actors import WorkerFailure
from tandem.cluster.placement import Placement
from tandem.cluster.worker_logs import WarningCollector, WorkerProcess
from tandem.cluster.worker_slot import WorkerEnd, WorkerSlot
from tandem.workers.config import WorkerConfig
from tandem.workers.errors import WorkerUnavailable

HERE = "node-1"


class Method:
    """`actor.method.remote()`."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer

    async def remote(self) -> Any:
        return self._answer()


class FakeActor:
    """Answers as it is told to; a call that raises is one to a process that has died."""

    def __init__(self, process: WorkerProcess, outcome: Callable[[], Any]) -> None:
        self.collector = WarningCollector()
        self.begun = asyncio.Event()
        self.going = asyncio.Event()
        self._outcome = outcome
        self.process, self.phase = Method(lambda: process), Method(lambda: "loading")
        self.run_until_stopped = Method(outcome)
        self.start, self.take_warnings = self, _Remote(self.collector.take)

    async def remote(self) -> Any:
        self.begun.set()
        await self.going.wait()
        return self._outcome()


class _Remote:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function


class FakeContext:
    def get_node_id(self) -> str:
        return HERE


def die() -> None:
    raise RayActorError


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Callable[[], Any]], tuple[WorkerSlot, Any]]:
    file = tmp_path / "worker.err"
    file.write_text("loading\nFatal Python error: Segmentation fault\n")
    monkeypatch.setattr(ray, "get_runtime_context", FakeContext)

    def make(outcome: Callable[[], Any]) -> tuple[WorkerSlot, Any]:
        actor = FakeActor(WorkerProcess(node_id=HERE, stderr_file=str(file)), outcome)
        config = WorkerConfig(model_path=Path("/m"), model_name="m", role="decode", worker_id="decode-0", epoch=7)
        slot = WorkerSlot(config, None, Placement(), None, 0)
        monkeypatch.setattr(slot, "_create_actor", lambda: actor)
        return slot, actor

    return make


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_process_that_dies_while_it_starts_is_quoted(place: Any, caplog: pytest.LogCaptureFixture) -> None:
    slot, actor = place(die)
    starting = asyncio.create_task(slot.start(lambda phase: None))
    await actor.begun.wait()
    await asyncio.sleep(0.01)  # it has said where it is
    actor.going.set()
    with pytest.raises(WorkerUnavailable, match="decode-0: The actor"):
        await starting
    (told,) = messages(caplog)
    assert told.startswith("decode-0 epoch 7 has ended: decode-0: The actor")
    assert told.endswith("\n  | loading\n  | Fatal Python error: Segmentation fault")


async def test_warnings_are_heard_while_it_starts(place: Any, caplog: pytest.LogCaptureFixture) -> None:
    slot, actor = place(lambda: WorkerFailure(message="no room", traceback="Traceback\nno room\n"))
    starting = asyncio.create_task(slot.start(lambda phase: None))
    await actor.begun.wait()
    source = logging.Logger("tandem.workers.backend")
    source.addHandler(actor.collector)
    source.warning("plain torch computes")
    async with asyncio.timeout(5):
        while not messages(caplog):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert messages(caplog) == ["decode-0 epoch 7: plain torch computes"]
    actor.going.set()
    with pytest.raises(WorkerUnavailable, match="decode-0: no room"):
        await starting
    assert messages(caplog)[1:] == ["decode-0 could not be started\nTraceback\nno room"]


async def test_a_bug_that_ends_it_is_told_by_itself(place: Any) -> None:
    slot, actor = place(lambda: WorkerFailure(message="KeyError: 3", traceback="Traceback"))
    slot._actor = actor
    assert await slot.wait_end() == WorkerEnd("KeyError: 3", traceback="Traceback")


async def test_last_lines_of_a_lost_machine_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Task:
        def options(self, **_: Any) -> Any:
            return _Remote(lambda file: asyncio.Event().wait())

    monkeypatch.setattr(ray, "get_runtime_context", FakeContext)
    monkeypatch.setattr(ray, "remote", lambda function: Task())
    monkeypatch.setattr(worker_slot, "LAST_LINES_TIMEOUT_S", 0.02)
    config = WorkerConfig(model_path=Path("/m"), model_name="m", role="decode", worker_id="decode-0")
    lost = WorkerProcess(node_id="ab" * 28, stderr_file="/x")
    await worker_slot.tell_end(config, WorkerEnd("gone", process=lost))
    assert messages(caplog) == ["decode-0 epoch 0 has ended: gone\n  | (its machine does not say)"]
