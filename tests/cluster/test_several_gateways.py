"""`tandem serve --gateways 2`: one process is killed while both stream, and then the launcher."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest
from cluster_client import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

NAMES = ("started", *(f'{{outcome="{outcome}"}}' for outcome in ("ok", "failed", "cancelled", "rejected")))


@pytest.fixture(scope="module")
def site(start_serving: Callable[..., Any]) -> Any:
    """For both tests, in the order in which they are written: the second one ends it."""
    return start_serving("smollm2-135m-instruct", "--aggregated", "1", "--gateways", "2")


async def test_a_killed_gateway_breaks_its_own_streams_and_no_others(site: Any) -> None:
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http:
        cluster = Cluster(site, http, num_workers=1)
        await cluster.until(cluster.is_whole, 60)
        bodies = [cluster.body(50_000 + number, 20, max_tokens=48) for number in range(12)]
        undisturbed = await asyncio.gather(*map(cluster.ask, bodies))
        before = counts(cluster)
        num_tokens = 0
        all_stream = asyncio.Event()

        async def note() -> None:
            nonlocal num_tokens
            num_tokens += 1
            if num_tokens == 4 * len(bodies):
                all_stream.set()

        asking = [asyncio.create_task(cluster.ask(body, on_token=note)) for body in bodies]
        await all_stream.wait()
        assert counts(cluster)["started"] == before["started"] + len(bodies)  # asked for, so it is known
        victim, survivor = site.cluster()["gateways"]
        os.kill(victim["pid"], signal.SIGKILL)
        told = await asyncio.gather(*asking, return_exceptions=True)

        broken = [each for each in told if isinstance(each, BaseException)]
        assert 0 < len(broken) < len(bodies), "connections are dealt out"
        assert all(isinstance(each, httpx.TransportError) for each in broken), broken
        for each, expected in zip(told, undisturbed):
            if not isinstance(each, BaseException):
                assert each.outcome == expected.outcome
        await cluster.until(lambda: all_ready(site, victim), 60)
        assert [each["pid"] for each in site.cluster()["gateways"]][1] == survivor["pid"]
        ended = {name: count - before[name] for name, count in counts(cluster).items()}
        assert ended["started"] == len(bodies) == sum(count for name, count in ended.items() if name != "started")
        assert ended['{outcome="failed"}'] == len(broken)
        await cluster.until(cluster.is_at_rest, 4)


def counts(cluster: Cluster) -> dict[str, float]:
    return {name: cluster.count(name) for name in NAMES}


def all_ready(site: Any, victim: dict[str, Any]) -> bool:
    gateways = site.cluster()["gateways"]
    return all(each["state"] == "ready" and each["pid"] != victim["pid"] for each in gateways)


def test_a_killed_launcher_leaves_nothing_behind(site: Any) -> None:
    assert [worker["role"] for worker in site.cluster()["workers"]] == ["aggregated"]
    assert site.complete("Hello").status_code == 200
    processes = site.descendants()
    assert {gateway["pid"] for gateway in site.cluster()["gateways"]} < {process.pid for process in processes}
    site.process.kill()
    site.process.wait()
    deadline = time.monotonic() + 10
    while any(map(is_alive, processes)):
        assert time.monotonic() < deadline, "somebody stays"
        time.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
