"""A child process: a door in front of a Redis server that holds answers up, or lets nothing out. See children.py.

{"do": "open", "server": PATH, "door": PATH}     two Unix sockets
{"do": "hold", "seconds": 2.0}                   each answer, from now on; null: for ever
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from tandem.cluster.bench.children import obey

PORTION = 1 << 16


class Door:
    """Answers keep their order: each is held up for as long as was asked when it came."""

    def __init__(self) -> None:
        self._server = ""
        self._held_s: float | None = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, order: dict[str, Any]) -> None:
        self._server = order["server"]
        await asyncio.start_unix_server(self._enter, order["door"])

    async def hold(self, order: dict[str, Any]) -> None:
        self._held_s = order["seconds"]

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            server_reader, server_writer = await asyncio.open_unix_connection(self._server)
            there = self._spawn(self._pass_on(reader, server_writer))
            await self._pass_back(server_reader, writer)
            there.cancel()
            server_writer.close()
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PORTION):
                writer.write(data)
        writer.close()

    async def _pass_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(PORTION):
            if self._held_s == 0.0:
                writer.write(data)
            elif self._held_s is not None:
                loop.call_later(self._held_s, writer.write, data)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


if __name__ == "__main__":
    door = Door()
    asyncio.run(obey({"open": door.open, "hold": door.hold}))
