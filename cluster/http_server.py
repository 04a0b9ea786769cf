"""Around the applications of a process that serves HTTP: a server on a bound socket, and the signals that stop it."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from socket import AF_UNIX, socket

import uvicorn
from starlette.types import ASGIApp

from tandem.router.http_protocol import HttpLimits, limited_protocol


class StopSignals:
    """While this context lasts SIGINT or SIGTERM sets `stop`; a second one ends us, and all below us, at once."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> StopSignals:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)

    def install(self) -> None:
        """Again, when somebody else has put handlers of his own in their place."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.stop.is_set():
            os._exit(130)  # the guard ends the rest
        self.stop.set()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: ours decide."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def raise_file_limit() -> None:
    """As many open files as this process may have without asking anybody: each connection is one, and the usual limit
    of 1,024 is for interactive shells."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@asynccontextmanager
async def running_server(app: ASGIApp, listener: socket) -> AsyncIterator[None]:
    """Serves the application on a bound socket while this context lasts. At its end running answers have a second."""
    raise_file_limit()
    server = _Server(
        uvicorn.Config(
            app,
            # a Unix socket is for processes of ours: no limits, and no options of TCP
            http="httptools" if listener.family == AF_UNIX else limited_protocol(HttpLimits()),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving
