"""What workers warn of, brought to the launcher's log: their own files go when Ray's session goes.

    worker: WarningCollector (a logging handler) -> bounded list -> take()          one Ray call that waits
    launcher: relay(records)                     -> the same loggers, with worker and epoch, in the launcher's format
    a death: last_lines(file)                    -> what the process said last, Python or not

Bounded on the side of the worker: a warning in a loop costs the launcher nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

PERIOD_S = 60.0
MAX_PER_PERIOD = 5
"""Of one kind (the same words, with whatever was filled in) in one period; the rest is counted."""
MAX_OF_ALL_KINDS = 100
"""Together, in one period: words that are never the same twice."""
MAX_KINDS = 200
MAX_WAITING = 100
"""Records that nobody has fetched; the oldest go first."""
MAX_TEXT_LEN = 4000
TAIL_BYTES = 4000
TAIL_LINES = 12

Kind = tuple[str, str]
EVERYTHING: Kind = ("", "")


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a worker's log. `time` is the worker's, in seconds since 1970."""

    time: float
    level: int
    logger: str
    message: str
    traceback: str | None = None
    num_left_out: int = 0
    """Of this kind, in the period before."""


class WorkerProcess(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker runs, and where its standard error goes. `node_id` is Ray's."""

    node_id: str
    stderr_file: str


class WarningCollector(logging.Handler):
    """Keeps WARNING and above until somebody takes it. Records may come from any thread; `take` is for one loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._records: deque[WorkerRecord] = deque(maxlen=MAX_WAITING)
        self._kinds: dict[Kind, tuple[float, int]] = {}
        """When the kind's present period began, and how many of it came since."""
        self._mutex = threading.Lock()
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        with self._mutex:
            num_left_out = self._admit((record.name, str(record.msg)))
            if num_left_out is None:
                return
            self._records.append(_worker_record(record, num_left_out))
            waiting = self._waiting
        if waiting is not None:
            loop, arrived = waiting
            loop.call_soon_threadsafe(arrived.set)

    async def take(self) -> list[WorkerRecord]:
        """What came since the last call; waits until there is something."""
        arrived = asyncio.Event()
        with self._mutex:
            self._waiting = (asyncio.get_running_loop(), arrived)
            if self._records:
                arrived.set()
        await arrived.wait()
        with self._mutex:
            self._waiting = None
            taken = list(self._records)
            self._records.clear()
        return taken

    def _admit(self, kind: Kind) -> int | None:
        """None: too many of the kind, or of all. Otherwise how many were left out of the period that is over."""
        of_kind = self._count(kind, MAX_PER_PERIOD)
        of_all = None if of_kind is None else self._count(EVERYTHING, MAX_OF_ALL_KINDS)
        return None if of_kind is None or of_all is None else of_kind + of_all

    def _count(self, kind: Kind, limit: int) -> int | None:
        """One more of it: None beyond the limit. Otherwise how many were beyond it in a period that has just ended."""
        now = self._clock()
        since, count = self._kinds.get(kind, (now, 0))
        is_new_period = now - since >= PERIOD_S
        self._kinds.pop(kind, None)  # to the end: the first is the one that was not seen for longest
        self._kinds[kind] = (now, 1) if is_new_period else (since, count + 1)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.pop(next(iter(self._kinds)))
        if is_new_period:
            return max(0, count - limit)
        return 0 if count < limit else None


def _worker_record(record: logging.LogRecord, num_left_out: int) -> WorkerRecord:
    traceback = None if record.exc_info is None else logging.Formatter().formatException(record.exc_info)
    return WorkerRecord(
        time=record.created,
        level=record.levelno,
        logger=record.name,
        message=record.getMessage()[:MAX_TEXT_LEN],
        traceback=None if traceback is None else traceback[-MAX_TEXT_LEN:],
        num_left_out=num_left_out,
    )


def relay(worker_id: str, epoch: int, records: Sequence[WorkerRecord]) -> None:
    """Log them here, at their own time, under their own logger's name."""
    for record in records:
        left_out = f" ({record.num_left_out} more like it before)" if record.num_left_out else ""
        told = logging.makeLogRecord(
            {
                "name": record.logger,
                "levelno": record.level,
                "levelname": logging.getLevelName(record.level),
                "msg": "%s epoch %d: %s%s",
                "args": (worker_id, epoch, record.message, left_out),
                "created": record.time,
                "msecs": (record.time % 1) * 1000,
                "exc_text": record.traceback,
                "fields": {"worker": worker_id, "epoch": epoch},
            }
        )
        logger = logging.getLogger(record.logger)
        if logger.isEnabledFor(record.level):
            logger.handle(told)


def last_lines(file: str) -> list[str]:
    """The end of a process' standard error; empty when there is nothing to read."""
    try:
        with Path(file).open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - TAIL_BYTES))
            end = stream.read()
    except OSError:
        return []
    return [line for line in end.decode(errors="replace").splitlines() if line.strip()][-TAIL_LINES:]
