"""One of several gateway processes behind one port: what runs in it.

    python -m tandem.cluster.gateway_child      its settings are one line of JSON on its standard input

The public port it shares with the others. A second, private one is a Unix socket, by which its parent looks after it
and adds up what it counts (gateway_pool.py). Who exists it learns from the parent's admin port, as `tandem gateway`
does from the launcher's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.cluster.background import in_background
from tandem.cluster.collector import settled_collector
from tandem.cluster.config import ClusterConfig
from tandem.cluster.following import WORKERS_PATH, LauncherSight, client_of, follow
from tandem.cluster.http_server import StopSignals, running_server
from tandem.cluster.listeners import share
from tandem.cluster.logs import configure_logging
from tandem.cluster.merged_metrics import families_of
from tandem.cluster.observe import observe
from tandem.router.config import GatewayConfig
from tandem.router.gateway import Gateway
from tandem.router.health import missing_parts
from tandem.workers.errors import TandemError

logger = logging.getLogger(__name__)

FOLLOW_S = 0.2
"""The list is on the same machine. Until it is read, a worker that is back is not known here."""
PATIENCE_S = 3.0
"""The others answer meanwhile. If there are no workers, somebody must say so after all."""
LOOK_S = 0.05
STATE_PATH = "/state"


class ChildSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that a gateway process is told. It holds secrets: never in arguments or the environment."""

    gateway: GatewayConfig
    cluster: ClusterConfig
    host: str
    port: int
    socket_path: str
    """Of the private port."""
    cluster_url: str
    """The parent's admin port."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=str)  # paths

    @classmethod
    def decode(cls, line: bytes) -> ChildSettings:
        return msgspec.json.decode(line, type=cls, dec_hook=_path)


def _path(kind: Any, value: Any) -> Path:
    assert kind is Path, kind
    return Path(value)


def main() -> None:
    """Serve until SIGTERM, drain, end."""
    settings = ChildSettings.decode(sys.stdin.buffer.readline())
    configure_logging(settings.cluster.log_format)
    try:
        uvloop.run(_serve(settings))
    except TandemError as error:
        logger.error("a gateway process cannot go on: %s", error)
        sys.exit(1)


async def _serve(settings: ChildSettings) -> None:
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        private = stack.enter_context(_private_listener(settings.socket_path))
        gateway = Gateway(settings.gateway)
        observe(gateway, settings.cluster, stack)
        stack.push_async_callback(gateway.stop)
        is_public = asyncio.Event()
        await stack.enter_async_context(running_server(private_app(gateway, is_public), private))
        client = await stack.enter_async_context(client_of(settings.cluster_url))
        await gateway.start()
        stack.enter_context(settled_collector())
        sight = LauncherSight()
        gateway.watch_control_plane(sight.reasons, sight.is_draining)
        following = in_background(
            follow(client, gateway.workers, path=WORKERS_PATH, poll_s=FOLLOW_S, sight=sight), name="follow the parent"
        )
        stack.callback(following.cancel)
        stopping = asyncio.create_task(signals.stop.wait())
        await _until_useful(gateway, stopping)
        # only now: whoever listens gets its share of the connections
        public = stack.enter_context(share(settings.host, settings.port, flag="--port"))
        await stack.enter_async_context(running_server(gateway.app, public))
        is_public.set()
        await stopping
        await gateway.stop(drain_s=settings.cluster.drain_timeout)


async def _until_useful(gateway: Gateway, stopping: asyncio.Task[bool]) -> None:
    """Until it is ready, or has tried for long enough."""
    end = time.monotonic() + PATIENCE_S
    while not stopping.done() and time.monotonic() < end:
        if not missing_parts(gateway.config, gateway.workers, is_draining=False):
            return
        await asyncio.sleep(LOOK_S)


def private_app(gateway: Gateway, is_public: asyncio.Event) -> Starlette:
    """The admin application, and what this process has counted, for the parent."""

    async def state(request: Request) -> Response:
        return Response(msgspec.msgpack.encode(families_of(gateway.metrics)))

    return Starlette(
        routes=[
            Route(STATE_PATH, state),
            Route("/ready", _OncePublic(gateway.admin_app, is_public)),
            Mount("/", app=gateway.admin_app),
        ]
    )


class _OncePublic:
    """The application's answer, once the public port is served as well."""

    def __init__(self, app: ASGIApp, is_public: asyncio.Event) -> None:
        self._app = app
        self._is_public = is_public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        closed = JSONResponse({"status": "not ready", "reasons": ["the public port is not open yet"]}, 503)
        await (self._app if self._is_public.is_set() else closed)(scope, receive, send)


def _private_listener(path: str) -> socket.socket:
    Path(path).unlink(missing_ok=True)  # of the process before this one
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(64)
    listener.setblocking(False)
    return listener


if __name__ == "__main__":
    main()
