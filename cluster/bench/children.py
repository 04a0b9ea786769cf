"""Processes that a benchmark starts and gives orders to: one JSON object a line each way, over their pipes.

    child = await stack.enter_async_context(child_process("tandem.cluster.bench.gateway_load"))
    answer = await child.ask({"do": "open", "streams": 256})

and in the child:

    asyncio.run(obey({"open": open_streams, "close": close_streams}))
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from tandem.workers.errors import UserError

MAX_LINE_BYTES = 1 << 28
"""A line may hold the times of a million tokens."""
STOP_TIMEOUT_S = 10.0

Order = Callable[[dict[str, Any]], Awaitable[Any]]


class Child:
    """A running child. One order at a time."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, order: Mapping[str, Any]) -> Any:
        """Give an order and wait for its answer. Raises `UserError` with the child's complaint, or if it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        if not line:
            raise UserError(f"{self._name} ended with exit code {await self._process.wait()}")
        answer = msgspec.json.decode(line)
        if "error" in answer:
            raise UserError(f"{self._name}: {answer['error']}")
        return answer["is"]


@asynccontextmanager
async def child_process(module: str) -> AsyncIterator[Child]:
    """This module as a program, until the end of the block: it ends when its orders do."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
        start_new_session=True,  # Ctrl-C is for the benchmark, which then ends its children in its own time
    )
    try:
        yield Child(module.rpartition(".")[2], process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def obey(orders: Mapping[str, Order]) -> None:
    """In the child: carry out orders by their "do" until there are no more. A `UserError` is the answer to its order;
    anything else ends the child, with its traceback where the benchmark's messages go."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        order = msgspec.json.decode(line)
        try:
            answer = {"is": await orders[order.pop("do")](order)}
        except UserError as error:
            answer = {"error": str(error)}
        await asyncio.to_thread(_write, msgspec.json.encode(answer) + b"\n")


def _write(content: bytes) -> None:
    while content:
        content = content[os.write(sys.stdout.fileno(), content) :]
