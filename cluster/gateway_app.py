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

import httpx
import msgspec
import uvloop

from tandem.cluster.config import ClusterConfig
from tandem.cluster.http_server import StopSignals, running_server
from tandem.cluster.keys import ClusterKey
from tandem.cluster.listeners import bind, url_of
from tandem.cluster.model_source import resolve_model
from tandem.cluster.observe import observe
from tandem.cluster.resolve import ResolvedConfig, gateway_config
from tandem.router.gateway import Gateway
from tandem.router.workers import WorkerSet
from tandem.workers.errors import UserError
from tandem.workers.types import Role, WorkerAddress

logger = logging.getLogger(__name__)

POLL_S = 1.0
POLL_TIMEOUT_S = 3.0


class Listed(msgspec.Struct, frozen=True):
    """One worker of the answer of /cluster; other fields are not for us."""

    id: str
    role: Role
    epoch: int
    address: str

    def worker_address(self) -> WorkerAddress:
        host, _, port = self.address.rpartition(":")
        return WorkerAddress(worker_id=self.id, epoch=self.epoch, role=self.role, host=host, port=int(port))


class ClusterAnswer(msgspec.Struct, frozen=True):
    """What this gateway needs of GET /cluster."""

    model: str
    max_model_len: int
    workers: tuple[Listed, ...]


def run_gateway(config: ClusterConfig, cluster_url: str) -> None:
    """Serve until a signal comes. Raises `UserError`."""
    if config.cluster_key is None:
        raise UserError("--cluster-key (or TANDEM_CLUSTER_KEY) is missing: it must be the one of the launcher")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, cluster_url.rstrip("/")))


async def _serve(config: ClusterConfig, cluster_url: str) -> None:
    signals = StopSignals()
    async with AsyncExitStack() as stack:
        signals.install()
        stack.callback(signals.remove)
        public = stack.enter_context(bind(config.host, config.port, flag="--port"))
        admin = stack.enter_context(bind(config.admin_host, config.admin_port, flag="--admin-port"))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=cluster_url, timeout=POLL_TIMEOUT_S))
        starting = asyncio.create_task(_start(config, client))
        stopping = asyncio.create_task(signals.stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        gateway = starting.result()
        observe(gateway, config, stack)
        stack.push_async_callback(gateway.stop)
        await stack.enter_async_context(running_server(gateway.app, public))
        await stack.enter_async_context(running_server(gateway.admin_app, admin))
        following = asyncio.create_task(follow(client, gateway.workers), name="follow the launcher")
        sys.stdout.write(
            f"ready: {gateway.config.model_name} at {url_of(public)}/v1 (gateway; admin {url_of(admin)})\n"
        )
        sys.stdout.flush()
        await stopping
        await gateway.stop(drain_s=config.drain_timeout)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _start(config: ClusterConfig, client: httpx.AsyncClient) -> Gateway:
    """Wait for the launcher, then make the same gateway as it has."""
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
    gateway = Gateway(settings)
    await gateway.start()
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


async def fetch(client: httpx.AsyncClient) -> ClusterAnswer:
    """GET /cluster. Raises `httpx.HTTPError` or `msgspec.MsgspecError`."""
    answer = (await client.get("/cluster")).raise_for_status()
    return msgspec.json.decode(answer.content, type=ClusterAnswer)


async def follow(client: httpx.AsyncClient, workers: WorkerSet, *, poll_s: float = POLL_S) -> None:
    """For ever: keep the live set as the launcher lists it."""
    was_reached = True
    while True:
        try:
            listed = (await fetch(client)).workers
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            if was_reached:
                logger.warning("the launcher does not answer (%s): its workers stay listed", type(error).__name__)
            was_reached = False
        else:
            was_reached = True
            apply_list(workers, listed)
        await asyncio.sleep(poll_s)


def apply_list(workers: WorkerSet, listed: tuple[Listed, ...]) -> None:
    """Add who is new, remove who is gone or has moved."""
    wanted = {worker.id: worker.worker_address() for worker in listed}
    for link in workers.links():
        if wanted.get(link.worker_id) != link.address:
            workers.remove(link.worker_id, link.address.epoch)
    for address in wanted.values():
        workers.add(address)
