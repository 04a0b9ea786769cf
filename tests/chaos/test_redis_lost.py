"""Redis fails under load, in every way: it only ever gave hints, so nobody notices, and its index is whole again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import redis

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

FREEZE_S = 4.0
"""Nothing answers, then all of it does: a black hole first, seconds of latency behind it."""


def server_of(cluster: Any) -> psutil.Process | None:
    servers = [process for process in cluster.serving.descendants() if process.name().startswith("valkey")]
    return servers[0] if servers else None


def client_of(cluster: Any) -> redis.Redis:
    server = server_of(cluster)
    assert server is not None
    return redis.Redis(unix_socket_path=f"{server.cwd()}/redis.sock")


def num_entries(cluster: Any) -> int:
    """Blocks that the index knows of; 0 while it cannot be asked."""
    try:
        with client_of(cluster) as client:
            buckets = list(client.scan_iter("pfx:*:b:*", count=10_000))
            return sum(client.hlen(bucket) for bucket in buckets if client.type(bucket) == b"hash")
    except (redis.RedisError, AssertionError, psutil.NoSuchProcess):
        return 0


async def kill(cluster: Any) -> None:
    server = server_of(cluster)
    assert server is not None
    server.kill()
    await cluster.until(lambda: (now := server_of(cluster)) is not None and now.pid != server.pid, 30)


async def flush(cluster: Any) -> None:
    with client_of(cluster) as client:
        client.flushall()


async def freeze(cluster: Any) -> None:
    server = server_of(cluster)
    assert server is not None
    server.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(FREEZE_S)
    finally:
        server.send_signal(signal.SIGCONT)


async def poison(cluster: Any) -> None:
    """Half of the entries say nonsense, the other half are of another type; so is everything else."""
    with client_of(cluster) as client:
        for number, name in enumerate(client.scan_iter("pfx:*", count=10_000)):
            if client.type(name) == b"hash" and number % 2:
                for field in client.hkeys(name):
                    client.hset(name, field, b"\xff" * 35)
            else:
                with client.pipeline() as both:  # at once: somebody may write in between
                    both.delete(name).lpush(name, b"nonsense").execute()


@pytest.mark.parametrize("fault", [kill, flush, freeze, poison])
async def test_redis_fails_in_mid_load(cluster: Any, fault: Callable[[Any], Any]) -> None:
    bodies = [cluster.body(30_000 + number, 20 + 40 * number, max_tokens=16) for number in range(8)]
    expected = [told.outcome for told in await asyncio.gather(*map(cluster.ask, bodies))]
    await cluster.until(lambda: num_entries(cluster) >= 25, 10)
    num_before = num_entries(cluster)
    asking = [asyncio.create_task(cluster.ask(body)) for body in bodies * 2]
    await asyncio.sleep(0.3)
    await fault(cluster)
    asking += [asyncio.create_task(cluster.ask(body)) for body in bodies]
    assert [told.outcome for told in await asyncio.gather(*asking)] == expected * 3
    await cluster.until(lambda: cluster.serving.cluster()["redis"] == {"up": True}, 30)
    await cluster.until(lambda: num_entries(cluster) >= num_before, 30)
