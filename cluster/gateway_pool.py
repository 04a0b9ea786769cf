"""One public port: served by this process, or by several of their own.

    open_gateway ── --gateways 1 ── a Gateway here, on both ports
                 └─ --gateways N ── GatewayPool: N processes that share the public port (SO_REUSEPORT),
                                    and here the admin port, which answers for all of them

Whoever calls it fills the live set of what it returns; the processes read that at our admin port, as `tandem gateway`
reads the launcher's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from socket import socket
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message

from tandem.cluster.background import in_background
from tandem.cluster.collector import settled_collector
from tandem.cluster.config import ClusterConfig
from tandem.cluster.following import CLUSTER_PATH, WORKERS_PATH, ClusterAnswer
from tandem.cluster.gateway_child import ChildSettings
from tandem.cluster.gateway_process import LOOK_S, GatewayProcess
from tandem.cluster.http_server import running_server
from tandem.cluster.listeners import bind, reserve, url_of
from tandem.cluster.merged_metrics import MergedMetrics
from tandem.cluster.observe import observe
from tandem.router.config import GatewayConfig
from tandem.router.gateway import Gateway
from tandem.router.openai.endpoint import LAST_WORDS_S
from tandem.workers.errors import TandemError

logger = logging.getLogger(__name__)

MAX_FOLDER_LEN = 60
"""A Unix socket's path may have 107 characters."""


def bind_public(config: ClusterConfig) -> socket:
    """The public port. Raises `UserError`."""
    return (bind if config.gateways == 1 else reserve)(config.host, config.port, flag="--port")


async def open_gateway(
    config: GatewayConfig,
    cluster: ClusterConfig,
    public: socket,
    admin: socket,
    stack: AsyncExitStack,
    *,
    folder: Path | None = None,
) -> Gateway:
    """A gateway that is started and served until the stack is left. Raises `ModelError`. `folder`: for sockets, which
    only this user may enter; by default a temporary one."""
    if cluster.gateways > 1:
        return await _open_pool(config, cluster, public, admin, stack, folder)
    gateway = Gateway(config)
    observe(gateway, cluster, stack)
    stack.push_async_callback(gateway.stop)
    await stack.enter_async_context(running_server(gateway.app, public))
    await stack.enter_async_context(running_server(gateway.admin_app, admin))
    await gateway.start()
    stack.enter_context(settled_collector())
    return gateway


async def _open_pool(
    config: GatewayConfig,
    cluster: ClusterConfig,
    public: socket,
    admin: socket,
    stack: AsyncExitStack,
    folder: Path | None,
) -> GatewayPool:
    if folder is None:
        parent = tempfile.gettempdir()
        parent = parent if len(parent) <= MAX_FOLDER_LEN else "/tmp"
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-", dir=parent)))
    host, port = public.getsockname()[:2]
    settings = [
        ChildSettings(
            gateway=config,
            cluster=cluster,
            host=host,
            port=port,
            socket_path=str(folder / f"gateway-{number}.sock"),
            cluster_url=url_of(admin),
        )
        for number in range(cluster.gateways)
    ]
    pool = GatewayPool(config, settings)
    await stack.enter_async_context(running_server(pool.admin_app, admin))
    stack.push_async_callback(pool.stop)  # the processes first: they read at the admin port
    await pool.start()
    return pool


class GatewayPool(Gateway):
    """A gateway that serves nobody itself: it knows the workers, and sees to the processes that do."""

    def __init__(self, config: GatewayConfig, settings: Sequence[ChildSettings]) -> None:
        super().__init__(config)
        cluster = settings[0].cluster
        self._merged = MergedMetrics(
            self.metrics,
            lambda: [process.latest for process in self.processes],
            usual_names=config.model_name if cluster.metrics_compat == "vllm" else None,
        )
        self.processes = [GatewayProcess(number, each, self._merged.bury) for number, each in enumerate(settings)]
        self._running: list[asyncio.Task[None]] = []
        self.admin_app = self._merged_admin_app(self.admin_app)

    async def start(self) -> None:
        await super().start()
        self._running = [in_background(process.run(), name=f"gateway {process.number}") for process in self.processes]

    async def wait_ready(self) -> None:
        """Until all workers and all processes are there. Raises `TandemError` for a process that cannot be started."""
        await super().wait_ready()
        while not all(process.is_ready for process in self.processes):
            for process in self.processes:
                if process.num_ends:
                    raise TandemError(f"gateway {process.number} ended while it started: {process.last_end}")
            await asyncio.sleep(LOOK_S)

    async def drain(self, drain_s: float) -> None:
        """All processes drain at the same time, and end; what has not ended after that is killed."""
        self.admission.close_door()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for process in self.processes:
            process.terminate()
        ends = [asyncio.create_task(process.wait_ended()) for process in self.processes]
        await asyncio.wait(ends, timeout=drain_s + 2 * LAST_WORDS_S)
        for end in ends:
            end.cancel()
        for process in self.processes:
            await process.close()

    def _merged_admin_app(self, own: ASGIApp) -> Starlette:
        async def metrics(request: Request) -> Response:
            await asyncio.gather(*(process.refresh() for process in self.processes if process.is_ready))
            return Response(self._merged.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

        async def cluster(request: Request) -> Response:
            status, shown = await _answered(own, request)
            await asyncio.gather(*(process.look() for process in self.processes))
            return JSONResponse(shown | {"gateways": self._described()}, status)

        async def workers(request: Request) -> Response:
            return Response(msgspec.json.encode(ClusterAnswer.of(self)), media_type="application/json")

        async def trace(request: Request) -> Response:
            name = request.path_params["request_id"]
            answers = await asyncio.gather(
                *(process.find_trace(name) for process in self.processes if process.is_ready)
            )
            found: list[Any] = [answer for answer in answers if answer is not None]
            if not found:
                return JSONResponse({"error": "no such request, or it was long ago"}, 404)
            return JSONResponse(max(found, key=lambda journey: journey["arrived_at"]))

        async def ready(request: Request) -> Response:
            status, shown = await _answered(own, request)
            if not any(process.is_ready for process in self.processes):
                reasons = [*shown.get("reasons", ()), "no gateway process is ready"]
                return JSONResponse({"status": "not ready", "reasons": reasons}, 503)
            return JSONResponse(shown, status)

        return Starlette(
            routes=[
                Route("/metrics", metrics),
                Route(CLUSTER_PATH, cluster),
                Route(WORKERS_PATH, workers),
                Route("/trace/{request_id}", trace),
                Route("/ready", ready),
                Mount("/", app=own),
            ]
        )

    def _described(self) -> list[dict[str, Any]]:
        return [
            {"id": process.number, "pid": process.pid, "state": process.state, "restarts": process.num_ends}
            for process in self.processes
        ]


async def _answered(app: ASGIApp, request: Request) -> tuple[int, dict[str, Any]]:
    """(status, body) of an application's answer in JSON."""
    messages: list[Message] = []

    async def note(message: Message) -> None:
        messages.append(message)

    await app(request.scope, request.receive, note)
    body = b"".join(message.get("body", b"") for message in messages)
    return messages[0]["status"], json.loads(body)
