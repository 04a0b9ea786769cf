"""`tandem gateway`: one more front door of a cluster that `tandem serve` keeps, in a process of its own.

    GET /cluster of the launcher, every second  ->  the live set of this gateway      who exists
    heartbeats to each worker                   ->  who is alive                      as in any gateway

The launcher tells who exists and nothing else: when it does not answer, the workers that are known stay known, and
requests go on. No Ray here, and no torch.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import AsyncExitStack
from socket import socket

import httpx
import msgspec
import uvloop

from tandem.cluster.background import in_background
from tandem.cluster.config import ClusterConfig
from tandem.cluster.following import POLL_S, ClusterAnswer, LauncherSight, client_of, fetch, follow
from tandem.cluster.gateway_pool import bind_public, open_gateway
from tandem.cluster.http_server import StopSignals
from tandem.cluster.keys import ClusterKey
from tandem.cluster.listeners import bind, url_of
from tandem.cluster.model_source import resolve_model
from tandem.cluster.resolve import ResolvedConfig, gateway_config
from tandem.router.gateway import Gateway
from tandem.workers.errors import UserError

logger = logging.getLogger(__name__)


def run_gateway(config: ClusterConfig, cluster_url: str) -> None:
    """Serve until a signal comes. Raises `UserError`."""
    if config.cluster_key is None:
        raise UserError("--cluster-key (or TANDEM_CLUSTER_KEY) is missing: it must be the one of the launcher")
    if not cluster_url.startswith(("http://", "https://")):
        raise UserError(f"--cluster-url must be an http:// URL, but is {cluster_url!r}")
    uvloop.run(_serve(config, cluster_url.rstrip("/")))


async def _serve(config: ClusterConfig, cluster_url: str) -> None:
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        public = stack.enter_context(bind_public(config))
        admin = stack.enter_context(bind(config.admin_host, config.admin_port, flag="--admin-port"))
        client = await stack.enter_async_context(client_of(cluster_url))
        starting = asyncio.create_task(_start(config, client, public, admin, stack))
        stopping = asyncio.create_task(signals.stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        gateway = starting.result()
        sys.stdout.write(
            f"ready: {gateway.config.model_name} at {url_of(public)}/v1 (gateway; admin {url_of(admin)})\n"
        )
        sys.stdout.flush()
        await stopping
        await gateway.stop(drain_s=config.drain_timeout)


async def _start(
    config: ClusterConfig, client: httpx.AsyncClient, public: socket, admin: socket, stack: AsyncExitStack
) -> Gateway:
    """Wait for the launcher, then make the same gateway as it has, and follow its list."""
    answer = await _first_answer(client)
    model = await asyncio.to_thread(resolve_model, config.model, dtype=config.dtype)
    if model.name != answer.model:
        raise UserError(f"the cluster serves {answer.model}, but MODEL is {model.name}")
    resolved = ResolvedConfig(
        cluster=config,
        model_path=model.folder,
        model_name=model.name,
        device="cpu",
        dtype=model.dtype,
        max_model_len=answer.max_model_len,
        kv_cache_memory_bytes=0,
        num_threads=1,
    )
    key = ClusterKey.of(config.cluster_key)
    settings = gateway_config(resolved, key.secret, redis_url=config.redis_url, namespace=key.namespace)
    # ready as soon as somebody decodes: how many workers there should be is the launcher's business
    settings = msgspec.structs.replace(settings, num_prefill=0, num_decode=0, num_aggregated=0)
    gateway = await open_gateway(settings, config, public, admin, stack)
    sight = LauncherSight()
    gateway.watch_control_plane(sight.reasons, sight.is_draining)
    following = in_background(follow(client, gateway.workers, sight=sight), name="follow the launcher")
    stack.callback(following.cancel)
    if config.gateways > 1:
        await gateway.wait_ready()
    return gateway


async def _first_answer(client: httpx.AsyncClient) -> ClusterAnswer:
    is_told = False
    while True:
        try:
            return await fetch(client)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            if not is_told:
                logger.warning("waiting for the launcher at %s: %s", client.base_url, type(error).__name__)
            is_told = True
        await asyncio.sleep(POLL_S)
