"""Redis is killed under load: it only ever gave hints, so nobody notices, and it comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def redis_of(cluster: Any) -> list[psutil.Process]:
    return [process for process in cluster.serving.descendants() if process.name().startswith("valkey")]


async def test_redis_dies_in_mid_load(cluster: Any) -> None:
    bodies = [cluster.body(30_000 + number, 20 + 40 * number, max_tokens=16) for number in range(8)]
    expected = [told.outcome for told in await asyncio.gather(*map(cluster.ask, bodies))]
    (redis,) = redis_of(cluster)
    asking = [asyncio.create_task(cluster.ask(body)) for body in bodies * 2]
    await asyncio.sleep(0.3)
    redis.kill()
    told = await asyncio.gather(*asking)
    assert [answer.outcome for answer in told] == expected * 2
    await cluster.until(lambda: [process.pid for process in redis_of(cluster)] not in ([], [redis.pid]), 30)
    await cluster.until(lambda: cluster.serving.cluster()["redis"] == {"up": True}, 30)
    assert (await cluster.ask(bodies[0])).outcome == expected[0]
