"""A launcher that stops waits for everybody's requests, its own and those of gateways that follow it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster import drain as drain_module
from tandem.cluster.drain import drain
from tandem.router.config import GatewayConfig
from tandem.router.gateway import Gateway
from tandem.router.scripted_worker import ScriptedWorker

LONG_S = 3600.0


class BusyWorker(ScriptedWorker):
    """It works for some other gateway."""

    num_busy = 1

    @property
    def num_running(self) -> int:
        return self.num_busy


@pytest.fixture
async def worker() -> AsyncIterator[BusyWorker]:
    worker = BusyWorker("aggregated-0", "aggregated")
    yield worker
    await worker.stop()


@pytest.fixture
async def gateway(worker: BusyWorker) -> AsyncIterator[Gateway]:
    config = GatewayConfig(model_name="m", tokenizer_folder=Path("/m"), max_model_len=8, heartbeat_s=0.02)
    gateway = Gateway(config)
    gateway.workers.add(await worker.start())
    async with asyncio.timeout(10):
        while not any(link.snapshot for link in gateway.workers.ready()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    yield gateway
    await gateway.stop()


async def is_waiting(task: asyncio.Task[Any]) -> bool:
    await asyncio.sleep(0.3)
    return not task.done()


async def test_what_others_have_running_is_waited_for(gateway: Gateway, worker: BusyWorker) -> None:
    draining = asyncio.create_task(drain(gateway, LONG_S, is_followed=False))
    assert await is_waiting(draining)
    assert gateway.admission.is_draining
    worker.num_busy = 0
    await asyncio.wait_for(draining, 10)


async def test_but_not_for_longer_than_allowed(gateway: Gateway) -> None:
    await asyncio.wait_for(drain(gateway, 0.1, is_followed=False), 10)


async def test_gateways_that_follow_have_time_to_hear_of_it(
    gateway: Gateway, worker: BusyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_module, "FOLLOWED_S", LONG_S)
    worker.num_busy = 0
    draining = asyncio.create_task(drain(gateway, LONG_S, is_followed=True))
    assert await is_waiting(draining), "somebody may begin a request at this moment"
    draining.cancel()
