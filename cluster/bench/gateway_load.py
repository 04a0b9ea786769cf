"""The clients of `tandem bench gateway`: many streams at once, read at the least cost, each read with its time.

A stream is a connection of its own. Nothing is parsed but the first bytes: an event ends with an empty line, and JSON
has none. So one core reads several times what a gateway writes.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any, cast

import msgspec
import uvloop

from tandem.cluster.bench.children import obey
from tandem.cluster.http_server import raise_file_limit
from tandem.workers.errors import UserError

START_TIMEOUT_S = 60.0
_ID = re.compile(rb'"id":"[a-z]+-([0-9A-Za-z-]+)"')
_LINE_FEED = 10


class Stream(asyncio.Protocol):
    """One request, and when what of its answer was read."""

    def __init__(self, request: bytes, first_events: int) -> None:
        loop = asyncio.get_running_loop()
        self.name: str | None = None
        """As the workers know it."""
        self.reads: list[tuple[float, int]] = []
        """(time, events that were whole by then, of this read)."""
        self.num_events = 0
        self.begun: asyncio.Future[None] = loop.create_future()
        """Done once `first_events` events were read."""
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when the answer is whole, or the connection ends."""
        self._request = request
        self._first_events = first_events
        self._head = b""
        self._ends_in_line = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        count = data.count(b"\n\n") + (self._ends_in_line and data[0] == _LINE_FEED)
        self._ends_in_line = data[-1] == _LINE_FEED and data[-2:] != b"\n\n"
        self.reads.append((now, count))
        self.num_events += count
        if self.name is None:
            self._read_head(data)
        if not self.begun.done() and self.num_events >= self._first_events:
            self.begun.set_result(None)
        if data.endswith(b"0\r\n\r\n") and not self.ended.done():
            self.ended.set_result(None)

    def _read_head(self, data: bytes) -> None:
        self._head += data
        found = _ID.search(self._head)
        if found is not None:
            self.name = found[1].decode()
        elif len(self._head) > 12 and b" 200 " not in self._head[:13]:
            self._fail(self._head[:300].decode(errors="replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the connection has ended")

    def _fail(self, reason: str) -> None:
        if not self.begun.done():
            self.begun.set_exception(UserError(f"a stream did not begin: {reason}"))
        if not self.ended.done():
            self.ended.set_result(None)

    def leave(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def chat_request(host: str, model: str, words: str, max_tokens: int, extras: dict[str, Any], *, stream: bool) -> bytes:
    """A whole HTTP request."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": words}],
        "stream": stream,
        "temperature": 0,
        "max_tokens": max_tokens,
        **extras,
    }
    content = msgspec.json.encode(body)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nuser-agent: tandem-bench\r\naccept: */*\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class Load:
    """The streams that are open now."""

    def __init__(self) -> None:
        self._streams: list[Stream] = []

    async def open(self, order: dict[str, Any]) -> dict[str, Any]:
        """Open streams, `at_once` at a time; returns when all have begun."""
        host, port = order["host"], order["port"]
        extras = order.get("extras", {})
        request = chat_request(
            f"{host}:{port}", order["model"], order["words"], order["max_tokens"], extras, stream=True
        )
        gate = asyncio.Semaphore(order["at_once"])

        async def open_one() -> None:
            async with gate:
                _, stream = await asyncio.get_running_loop().create_connection(
                    lambda: Stream(request, order["first_events"]), host, port
                )
                self._streams.append(stream)
                async with asyncio.timeout(START_TIMEOUT_S):
                    await stream.begun

        began = time.monotonic()
        tasks = [asyncio.create_task(open_one()) for _ in range(order["streams"])]
        try:
            await asyncio.gather(*tasks)
        except OSError as error:
            raise UserError(f"{host}:{port} cannot be reached: {error}") from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return {"seconds": time.monotonic() - began}

    async def wait(self, order: dict[str, Any]) -> None:
        """Until every answer is whole."""
        await asyncio.gather(*(stream.ended for stream in self._streams))

    async def close(self, order: dict[str, Any]) -> dict[str, list[tuple[float, int]]]:
        """Hang up. Returns what was read, by name."""
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.leave()
        await asyncio.sleep(0)
        return {stream.name: stream.reads for stream in streams if stream.name is not None}

    async def repeat(self, order: dict[str, Any]) -> dict[str, Any]:
        """Whole requests one after another on one connection."""
        host, port = order["host"], order["port"]
        extras = order.get("extras", {})
        request = chat_request(f"{host}:{port}", order["model"], order["words"], 1, extras, stream=False)
        reader, writer = await asyncio.open_connection(host, port)
        began = time.monotonic()
        for _ in range(order["requests"]):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: *([0-9]+)", head, re.IGNORECASE)
            if length is None or b" 200 " not in head[:13]:
                raise UserError(f"a request was refused: {head[:60].decode()}")
            await reader.readexactly(int(length[1]))
        seconds = time.monotonic() - began
        writer.close()
        return {"seconds": seconds}


async def _main() -> None:
    load = Load()
    await obey({"open": load.open, "wait": load.wait, "close": load.close, "repeat": load.repeat})


if __name__ == "__main__":
    raise_file_limit()
    uvloop.run(_main())
