"""A live set that follows somebody else's list of workers: GET /cluster of an admin port, again and again.

The list says who exists and nothing else: while it cannot be read, the workers that are known stay known.
"""

from __future__ import annotations

import asyncio
import logging

import httpx
import msgspec

from tandem.router.gateway import Gateway
from tandem.router.workers import WorkerSet
from tandem.workers.types import Role, WorkerAddress

logger = logging.getLogger(__name__)

POLL_S = 1.0
POLL_TIMEOUT_S = 3.0
CLUSTER_PATH = "/cluster"
WORKERS_PATH = "/workers"
"""The same list with nothing else in it, for those who ask often (gateway_pool.py has it)."""


class Listed(msgspec.Struct, frozen=True):
    """One worker of the answer of /cluster; other fields are not for us."""

    id: str
    role: Role
    epoch: int
    address: str
    state: str = "ready"
    """As the launcher sees it."""

    def worker_address(self) -> WorkerAddress:
        host, _, port = self.address.rpartition(":")
        return WorkerAddress(worker_id=self.id, epoch=self.epoch, role=self.role, host=host, port=int(port))


class ClusterAnswer(msgspec.Struct, frozen=True):
    """What this gateway needs of GET /cluster."""

    model: str
    max_model_len: int
    workers: tuple[Listed, ...]
    degraded: tuple[str, ...] = ()
    draining: bool = False

    @classmethod
    def of(cls, gateway: Gateway) -> ClusterAnswer:
        """The same of a live set of ours."""
        workers = [(link.address, link.state) for link in gateway.workers.links()]
        listed = [Listed(at.worker_id, at.role, at.epoch, f"{at.host}:{at.port}", state) for at, state in workers]
        config, degraded = gateway.config, tuple(gateway.shortcomings())
        is_draining = gateway.admission.is_draining
        return cls(config.model_name, config.max_model_len, tuple(listed), degraded, is_draining)


class LauncherSight:
    """What is missing at the launcher, as far as its follower knows. A gateway tells it in /ready and in metrics."""

    def __init__(self) -> None:
        self.missing: tuple[str, ...] = ()
        self.draining = False

    def reasons(self) -> list[str]:
        return list(self.missing)

    def is_draining(self) -> bool:
        """It is about to stop, and its workers with it."""
        return self.draining


def client_of(url: str) -> httpx.AsyncClient:
    """For the admin port at `url`; never by way of a proxy that the environment names for the rest of the world."""
    return httpx.AsyncClient(base_url=url, timeout=POLL_TIMEOUT_S, trust_env=False)


async def fetch(client: httpx.AsyncClient, path: str = CLUSTER_PATH) -> ClusterAnswer:
    """Raises `httpx.HTTPError` or `msgspec.MsgspecError`."""
    answer = (await client.get(path)).raise_for_status()
    return msgspec.json.decode(answer.content, type=ClusterAnswer)


async def follow(
    client: httpx.AsyncClient,
    workers: WorkerSet,
    *,
    path: str = CLUSTER_PATH,
    poll_s: float = POLL_S,
    sight: LauncherSight | None = None,
) -> None:
    """For ever: keep the live set as the launcher lists it, and `sight` as it is."""
    was_reached = True
    sight = sight or LauncherSight()
    while True:
        try:
            answer = await fetch(client, path)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            if was_reached:
                logger.warning("the launcher does not answer (%s): its workers stay listed", type(error).__name__)
            was_reached = False
            sight.missing = ("the launcher does not answer: lost workers are not replaced",)
            sight.draining = False  # it has ended, and who lives serves
        else:
            was_reached = True
            sight.missing = answer.degraded
            sight.draining = answer.draining
            apply_list(workers, answer.workers)
        await asyncio.sleep(poll_s)


def apply_list(workers: WorkerSet, listed: tuple[Listed, ...]) -> None:
    """Add who is new, remove who is gone or has moved, or is refused there: all gateways take the same workers."""
    wanted = {worker.id: worker.worker_address() for worker in listed if worker.state != "refused"}
    for link in workers.links():
        if wanted.get(link.worker_id) != link.address:
            workers.remove(link.worker_id, link.address.epoch)
    for address in wanted.values():
        workers.add(address)
