"""Workers' warnings on their way to the launcher's log: what is kept, what is bounded, how it reads."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from pathlib import Path

import pytest

from tandem.cluster import worker_logs
from tandem.cluster.logs import JsonFormatter
from tandem.cluster.worker_logs import MAX_PER_PERIOD, PERIOD_S, WarningCollector, WorkerRecord, last_lines, relay


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def logger_with(collector: WarningCollector) -> logging.Logger:
    logger = logging.Logger("tandem.workers.some", logging.DEBUG)
    logger.addHandler(collector)
    return logger


async def test_warnings_are_kept_until_somebody_takes_them() -> None:
    collector = WarningCollector()
    logger = logger_with(collector)
    logger.info("all is well")
    logger.warning("the disk tier is off: %s", "No space left on device")
    try:
        raise ValueError("what now")
    except ValueError:
        logger.exception("a step failed")
    first, second = await collector.take()
    assert (first.level, first.logger) == (logging.WARNING, "tandem.workers.some")
    assert first.message == "the disk tier is off: No space left on device"
    assert first.traceback is None
    assert second.traceback is not None
    assert second.traceback.endswith("ValueError: what now")


async def test_who_waits_is_woken_from_another_thread() -> None:
    collector = WarningCollector()
    waiting = asyncio.create_task(collector.take())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    threading.Thread(target=logger_with(collector).error, args=("from a thread",)).start()
    assert [record.message for record in await asyncio.wait_for(waiting, 5)] == ["from a thread"]


async def test_a_warning_in_a_loop_is_counted_and_hides_no_other() -> None:
    clock = Clock()
    collector = WarningCollector(clock)
    logger = logger_with(collector)
    for number in range(1000):
        logger.warning("request %d is odd", number)
    logger.warning("the house burns")
    messages = [record.message for record in await collector.take()]
    assert messages == [*(f"request {number} is odd" for number in range(MAX_PER_PERIOD)), "the house burns"]
    clock.now = PERIOD_S
    logger.warning("request %d is odd", 1000)
    (again,) = await collector.take()
    assert (again.message, again.num_left_out) == ("request 1000 is odd", 1000 - MAX_PER_PERIOD)


async def test_words_that_are_never_the_same_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_logs, "MAX_KINDS", 10)
    clock = Clock()
    collector = WarningCollector(clock)
    logger = logger_with(collector)
    for number in range(500):
        logger.warning(f"never the same twice: {number}")
    assert len(collector._kinds) <= 10
    assert len(await collector.take()) == worker_logs.MAX_OF_ALL_KINDS
    clock.now = PERIOD_S
    logger.warning("at last")
    assert [(record.message, record.num_left_out) for record in await collector.take()] == [("at last", 400)]


async def test_nobody_listens_and_memory_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_logs, "MAX_OF_ALL_KINDS", 10_000)
    collector = WarningCollector()
    logger = logger_with(collector)
    for number in range(500):
        logger.warning(f"never the same twice: {number}")
    taken = await collector.take()
    assert len(taken) == worker_logs.MAX_WAITING
    assert taken[-1].message == "never the same twice: 499"


@pytest.mark.parametrize("is_json", [True, False])
def test_it_reads_as_if_it_had_been_logged_here(is_json: bool) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if is_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("tandem.tests.relayed")
    logger.addHandler(handler)
    logger.propagate = False
    told = WorkerRecord(
        time=1_700_000_000.25, level=40, logger="tandem.tests.relayed", message="no room", traceback="Traceback: x",
        num_left_out=7,
    )  # fmt: skip
    try:
        relay("decode-1", 3, [told])
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    written = stream.getvalue()
    if is_json:
        entry = json.loads(written)
        assert (entry["worker"], entry["epoch"], entry["level"]) == ("decode-1", 3, "error")
        assert entry["time"] == "2023-11-14T22:13:20.250+00:00"
        assert entry["traceback"] == "Traceback: x"
    else:
        assert ",250 ERROR decode-1 epoch 3: no room (7 more like it before)\nTraceback: x" in written


def test_the_end_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "worker.err"
    assert last_lines(str(file)) == []
    file.write_bytes(b"first\n" + b"x" * 10_000 + b"\n\xff odd \n\nFatal Python error: Segmentation fault\n")
    assert last_lines(str(file))[1:] == ["\ufffd odd ", "Fatal Python error: Segmentation fault"]
    file.write_text("".join(f"line {number}\n" for number in range(100)))
    assert last_lines(str(file)) == [f"line {number}" for number in range(88, 100)]
