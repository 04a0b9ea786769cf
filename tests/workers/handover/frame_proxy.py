"""A man in the middle between a decode and a prefill worker: passes frames on, or does to them what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from tandem.workers import protocol
from tandem.workers.connection import Connection
from tandem.workers.errors import WorkerUnavailable
from tandem.workers.types import WorkerAddress


class Cut(Exception):
    """Raised by a transform: both sides lose the connection now."""


Transform = Callable[[Any], Iterable[Any]]


def unchanged(message: Any) -> Iterable[Any]:
    return [message]


class FrameProxy:
    """Listens for decode workers on behalf of a prefill worker. `answers` and `questions` transform each direction."""

    def __init__(self, *, answers: Transform = unchanged, questions: Transform = unchanged) -> None:
        self.answers = answers
        self.questions = questions
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, target: WorkerAddress) -> WorkerAddress:
        self._target = target
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return msgspec.structs.replace(target, port=self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = Connection(reader, writer)
        server = Connection(*await asyncio.open_connection(self._target.host, self._target.port))
        for source, sink, transform in ((client, server, "questions"), (server, client, "answers")):
            task = asyncio.create_task(self._pass_on(source, sink, transform))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: Connection, sink: Connection, direction: str) -> None:
        with contextlib.suppress(WorkerUnavailable, Cut):
            try:
                while True:
                    message: protocol.AnyMessage = await source.receive()
                    for changed in getattr(self, direction)(message):
                        sink.send(changed)
            finally:
                source.abort()
                sink.abort()
