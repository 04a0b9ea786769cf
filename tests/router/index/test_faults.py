"""Redis killed, flushed, frozen, slow and poisoned in the middle of a load of look-ups and publications.

Whatever happens: nothing is raised, no look-up waits longer than the budget, what was routed lately is still known, and
the index is whole again soon after Redis is.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis

from tandem.router.index import reader as reader_module
from tandem.router.index.publisher import IndexPublisher
from tandem.router.index.reader import IndexReader

BUDGET_S = 0.005
SLACK_S = 0.095
"""For a machine on which others run, too. What is beyond it is not ours."""
PROMPTS = [[random.Random(f"{prompt} {block}").randbytes(16) for block in range(30)] for prompt in range(8)]
HOLDERS = [("w0", 0), ("w1", 0)]


class Proxy:
    """A door in front of Redis that holds everything up for `delay_s` each way."""

    def __init__(self, port: int) -> None:
        self._inner_port = port
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._inner_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pipe(reader, inner_writer), self._pipe(inner_reader, writer))

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    if self.delay_s:
                        await asyncio.sleep(self.delay_s)
                    writer.write(data)
        finally:
            writer.close()


class Load:
    """Two workers that store and remove, and a router that looks up and routes, without a pause."""

    def __init__(self, reader: IndexReader, publishers: list[IndexPublisher]) -> None:
        self._reader = reader
        self._publishers = publishers
        self._random = random.Random(1)
        self._held = [dict.fromkeys(range(len(PROMPTS)), 0) for _ in publishers]
        self.seconds: list[float] = []
        self.num_unknown = 0
        """Look-ups that knew nothing of a prompt that was routed just before."""

    async def run(self) -> None:
        while True:
            self._change()
            prompt = self._random.choice(PROMPTS)
            self._reader.note_routed(prompt, HOLDERS[:1])
            began = time.perf_counter()
            lengths = await self._reader.longest_prefix(prompt, HOLDERS)
            self.seconds.append(time.perf_counter() - began)
            assert all(0 < length <= len(prompt) for length in lengths.values())
            self.num_unknown += lengths.get("w0") != len(prompt)
            await asyncio.sleep(0.002)

    def _change(self) -> None:
        worker, prompt = self._random.randrange(2), self._random.randrange(len(PROMPTS))
        target, length = self._random.randint(0, 30), self._held[worker][prompt]
        for block in range(length, target):
            self._publishers[worker].record("stored", PROMPTS[prompt][block])
        for block in range(length - 1, target - 1, -1):
            self._publishers[worker].record("removed", PROMPTS[prompt][block])
        self._held[worker][prompt] = target

    def expected(self, prompt: int) -> dict[str, int]:
        return {f"w{worker}": held[prompt] for worker, held in enumerate(self._held) if held[prompt]}


@pytest.fixture
async def proxy(server: Any) -> AsyncIterator[Proxy]:
    proxy = Proxy(server.port)
    await proxy.start()
    yield proxy
    await proxy.stop()


def kill(server: Any, proxy: Proxy) -> Callable[[], None]:
    server.kill()
    return lambda: server.start()  # type: ignore[no-any-return]


def flush(server: Any, proxy: Proxy) -> Callable[[], None]:
    server.execute("FLUSHALL")
    return lambda: None


def freeze(server: Any, proxy: Proxy) -> Callable[[], None]:
    server.freeze()
    return lambda: server.thaw()  # type: ignore[no-any-return]


def slow_down(server: Any, proxy: Proxy) -> Callable[[], None]:
    proxy.delay_s = 1.0  # each way

    def speed_up() -> None:
        proxy.delay_s = 0.0

    return speed_up


def poison(server: Any, proxy: Proxy) -> Callable[[], None]:
    """Garbage, other types, and claims that are not true, wherever the index looks."""
    commands: list[tuple[Any, ...]] = []
    for number, key in enumerate(key for prompt in PROMPTS for key in prompt):
        bucket = b"pfx:{n}:b:" + key[:2]
        if number % 3 == 0:
            commands += [("DEL", bucket), ("SET", bucket, "garbage")]
        elif number % 3 == 1:
            commands += [("HSET", bucket, key[2:10], b"\xff" * (number % 7 + 1))]
    for name in server.execute("KEYS", "pfx:{n}:[!b]*"):
        commands += [("DEL", name), ("SADD", name, "garbage")]
    with redis.Redis(port=server.port) as client, client.pipeline(transaction=True) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        pipeline.execute()
    return lambda: None


@pytest.mark.parametrize("fault", [kill, flush, freeze, slow_down, poison])
async def test_a_fault_in_mid_load(
    server: Any,
    proxy: Proxy,
    publishing: Any,
    reading: Any,
    until: Any,
    monkeypatch: Any,
    fault: Callable[[Any, Proxy], Callable[[], None]],
) -> None:
    url = f"redis://127.0.0.1:{proxy.port}/0"
    publishers = [await publishing(f"w{number}", 0, url=url, max_batch=64, beat_s=0.2) for number in range(2)]
    reader = await reading(url, budget_s=BUDGET_S)
    load = Load(reader, publishers)
    running = asyncio.create_task(load.run())
    await asyncio.sleep(0.2)
    mend = await asyncio.to_thread(fault, server, proxy)
    await asyncio.sleep(0.5)
    await asyncio.to_thread(mend)
    await asyncio.sleep(0.2)
    assert not running.done()  # raises nothing
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    load.seconds.sort()
    assert load.seconds[int(0.99 * len(load.seconds)) - 1] < BUDGET_S + SLACK_S
    assert load.num_unknown == 0

    await until(lambda: reader.is_up and all(each.is_up and each.is_settled for each in publishers), timeout_s=15)
    monkeypatch.setattr(reader_module, "BRIDGE_S", 0.0)  # the index alone
    monkeypatch.setattr(reader_module, "MEMORY_S", 0.0)
    reader._budget_s = 1.0
    async with asyncio.timeout(15):
        for prompt, keys in enumerate(PROMPTS):
            while await reader.longest_prefix(keys, HOLDERS) != load.expected(prompt):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
