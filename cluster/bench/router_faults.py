"""`tandem bench router --faults`: what a Redis that fails adds to a routing decision.

A window of decisions with the index as it should be, one under a fault, the next one whole again, and so on: killed,
flushed, a black hole, seconds of latency, poisoned. Decisions come at `RATE` per second throughout, so that the breaker
and the watch of the gateway's own index have the time that they have in production.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tandem.cluster.bench.children import Child, child_process
from tandem.cluster.bench.router import NUM_RUNNING, RATE, RouterBenchOptions
from tandem.cluster.bench.router_scene import NAMESPACE, Scene, connected, decide, fill, publish
from tandem.cluster.bench.statistics import Percentiles, percentiles
from tandem.cluster.collector import settled_collector
from tandem.cluster.redis_server import EmbeddedRedis
from tandem.router.dispatch import Dispatcher, Generation
from tandem.router.index.reader import IndexReader
from tandem.router.index.scripts import Holder, index_prefix
from tandem.workers.errors import UserError

FAULTS = ("killed", "flushed", "black hole", "2 s latency", "poisoned")
LATENCY_S = 2.0
WINDOW_S = 4.0
RECOVERY_S = 30.0
"""So long may it take until the index counts as up again and answers of it are whole."""


@dataclass(frozen=True, slots=True)
class FaultCase:
    """One row: decisions under a fault beside those just before it, with the index whole. Seconds."""

    fault: str
    healthy: Percentiles
    under_fault: Percentiles
    share_late: float
    """Look-ups under the fault that were not answered within the budget: each costs just that."""
    recovery_s: float
    """From the fault's end until the index was asked again and said what it had said before."""

    @property
    def added_p50_s(self) -> float:
        return self.under_fault.p50 - self.healthy.p50

    @property
    def added_p99_s(self) -> float:
        return self.under_fault.p99 - self.healthy.p99


@dataclass(slots=True)
class _Times:
    healthy: list[float] = field(default_factory=list)
    under_fault: list[float] = field(default_factory=list)
    num_late: int = 0
    recovery_s: float = 0.0


async def bench_faults(
    options: RouterBenchOptions, on_progress: Callable[[str], None], *, rounds: int = 1, window_s: float = WINDOW_S
) -> list[FaultCase]:
    """The first number of workers and length of prompts that `options` names. Raises `UserError` when the index does
    not recover."""
    times = {fault: _Times() for fault in FAULTS}
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        async with child_process("tandem.cluster.bench.redis_door") as door:
            trouble = _Trouble(Path(folder), door)
            async with trouble.serving():
                with connected(trouble.server_url) as client:
                    await asyncio.to_thread(fill, client, options.num_blocks, options.seed, on_progress)
                    scene = Scene(client, options.num_workers[0], options.prompt_tokens[0], options.seed)
                    scene.publish()
                    routing = scene.routing(trouble.url, budget_s=options.budget_s, policy=options.policy)
                    async with routing as (dispatcher, index):
                        bench = _FaultBench(scene, dispatcher, index, trouble, window_s)
                        with settled_collector():
                            await bench.settle()
                            for number in range(rounds):
                                for fault in FAULTS:
                                    on_progress(f"round {number + 1}: {fault}")
                                    await bench.measure(fault, times[fault])
                        bench.close()
    return [_case(fault, measured) for fault, measured in times.items()]


def _case(fault: str, measured: _Times) -> FaultCase:
    healthy, under_fault = percentiles(measured.healthy), percentiles(measured.under_fault)
    assert healthy is not None
    assert under_fault is not None
    share_late = measured.num_late / len(measured.under_fault)
    return FaultCase(fault, healthy, under_fault, share_late, measured.recovery_s)


class _Trouble:
    """A server behind a door, and everything that can happen to them."""

    def __init__(self, folder: Path, door: Child) -> None:
        self._folder = folder
        self._door = door
        self._server: EmbeddedRedis | None = None
        self.url = f"unix://{folder}/door.sock"
        self.server_url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        await self._start_server()
        await self._door.ask(
            {"do": "open", "server": f"{self._folder}/redis.sock", "door": f"{self._folder}/door.sock"}
        )
        try:
            yield
        finally:
            if self._server is not None:
                await self._server.stop()

    async def begin(self, fault: str) -> None:
        match fault:
            case "killed":
                assert self._server is not None
                if self._server.pid is not None:
                    os.kill(self._server.pid, signal.SIGKILL)
                await self._server.stop()
                self._server = None
            case "flushed":
                await asyncio.to_thread(self._flush)
            case "black hole":
                await self._door.ask({"do": "hold", "seconds": None})
            case "2 s latency":
                await self._door.ask({"do": "hold", "seconds": LATENCY_S})
            case "poisoned":
                await asyncio.to_thread(self._poison)

    async def end(self) -> None:
        """The server answers again, and holds nothing."""
        if self._server is None:
            await self._start_server()
        await self._door.ask({"do": "hold", "seconds": 0.0})
        await asyncio.to_thread(self._flush)

    def publish(self, holder: Holder, blocks: list[bytes]) -> None:
        with connected(self.server_url) as client:
            publish(client, holder, blocks)

    async def _start_server(self) -> None:
        self._server = EmbeddedRedis(self._folder)
        await self._server.start()
        self.server_url = self._server.url

    def _flush(self) -> None:
        with connected(self.server_url) as client:
            client.flushall()

    def _poison(self) -> None:
        """Half of the buckets say nonsense, the others and all else are of another type."""
        with connected(self.server_url) as client, client.pipeline(transaction=False) as pipeline:
            for number, name in enumerate(client.scan_iter(index_prefix(NAMESPACE) + "*", count=10_000)):
                if client.type(name) == b"hash" and number % 2:
                    for entry in client.hkeys(name):
                        pipeline.hset(name, entry, b"\xff" * 35)
                else:
                    pipeline.delete(name)
                    pipeline.lpush(name, b"nonsense")
            pipeline.execute()


class _FaultBench:
    def __init__(
        self, scene: Scene, dispatcher: Dispatcher, index: IndexReader, trouble: _Trouble, window_s: float
    ) -> None:
        self._scene = scene
        self._dispatcher = dispatcher
        self._index = index
        self._trouble = trouble
        self._window_s = window_s
        self._number = 0
        self._running: deque[Generation] = deque()

    async def settle(self) -> None:
        """The first decisions are dearer than all others."""
        await self._decide_for(self._window_s / 2)

    async def measure(self, fault: str, times: _Times) -> None:
        times.healthy += await self._decide_for(self._window_s)
        num_late = self._index.num_late
        beginning = asyncio.create_task(self._trouble.begin(fault))  # decisions go on meanwhile
        times.under_fault += await self._decide_for(self._window_s)
        await beginning
        times.num_late += self._index.num_late - num_late
        began = time.perf_counter()
        await self._trouble.end()
        await asyncio.to_thread(self._scene.publish)  # the client connects again by itself
        while not await self._is_whole():
            if time.perf_counter() - began > RECOVERY_S:
                raise UserError(f"the index was not whole {RECOVERY_S:.0f} s after {fault} ended")
            await self._decide_for(0.2)
        times.recovery_s = max(times.recovery_s, time.perf_counter() - began)

    def close(self) -> None:
        for generation in self._running:
            generation.close()

    async def _is_whole(self) -> bool:
        """It is asked, and knows a block that a worker has just told of and that nobody was ever sent."""
        block, holders = random.randbytes(16), self._dispatcher.workers.holders()
        await asyncio.to_thread(self._trouble.publish, holders[0], [block])
        return self._index.is_up and bool(await self._index.longest_prefix([block], holders))

    async def _decide_for(self, seconds: float) -> list[float]:
        """Seconds that each decision took; one every 1 / RATE, however long the one before took."""
        taken: list[float] = []
        begins = time.perf_counter()
        end = begins + seconds
        while begins < end:
            self._number += 1
            self._scene.workers.hear_some(RATE)
            request = self._scene.request(self._number)
            decision = await decide(self._dispatcher, request)
            taken.append(decision.wall_s)
            self._running.append(decision.generation)
            if len(self._running) > NUM_RUNNING:
                self._running.popleft().close()
            begins += 1 / RATE
            await asyncio.sleep(max(0.0, begins - time.perf_counter()))
        return taken
