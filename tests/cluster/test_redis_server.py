"""The embedded Redis: reached only by its socket, and started again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from tandem.cluster import redis_server
from tandem.cluster.redis_server import EmbeddedRedis
from tandem.workers.errors import TandemError


async def ping(url: str) -> bool:
    async with Redis.from_url(url) as client:
        return bool(await client.ping())


async def test_the_embedded_redis_answers_only_through_its_socket(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    await server.start()
    try:
        assert await ping(server.url)
        assert server.pid is not None
        assert psutil.Process(server.pid).net_connections("inet") == []
        assert (tmp_path / "redis.sock").stat().st_mode & 0o077 == 0
    finally:
        await server.stop()
    assert not psutil.pid_exists(server.pid)


async def test_the_embedded_redis_is_started_again(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    await server.start()
    first = server.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    try:
        async with asyncio.timeout(10):
            while server.pid == first:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        assert await ping(server.url)
    finally:
        await server.stop()


async def test_one_that_hangs_is_ended_so_that_another_can_be_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\nexec sleep 100\n")
    mute.chmod(0o700)
    monkeypatch.setattr(redis_server, "get_binary_path", lambda: mute)
    monkeypatch.setattr(redis_server, "START_TIMEOUT_S", 0.1)
    server = EmbeddedRedis(tmp_path)
    with pytest.raises(TandemError, match="does not answer: no message"):
        await server.start()
    assert server._process is not None
    assert await asyncio.to_thread(server._process.wait, 10) == -signal.SIGKILL
    await server.stop()
