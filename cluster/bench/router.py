"""`tandem bench router`: what one routing decision costs, with everything that the gateway does for it.

    hash the prompt's blocks -> ask the index, in a real server -> choose the workers -> put it on their accounts

The workers are accounts without anybody behind them; the rest is the gateway's own code (`dispatch.Generation`). While
decisions are made snapshots come in as often as they would at `RATE` requests per second.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from tandem.cluster.bench.cpu_use import ProcessMoment
from tandem.cluster.bench.router_scene import Scene, connected, decide, fill
from tandem.cluster.bench.statistics import percentiles
from tandem.cluster.collector import settled_collector
from tandem.cluster.redis_server import EmbeddedRedis
from tandem.router.dispatch import Dispatcher, Generation
from tandem.router.index.reader import IndexReader
from tandem.router.policy import PolicyName

RATE = 99
"""Requests per second, to which CPU time is scaled."""
NUM_RUNNING = 64
"""Requests that are under way, and on the workers' accounts, at any time."""
SERVER_BYTES_PER_BLOCK = 64
"""Room for the index in the server, generously."""


@dataclass(frozen=True, slots=True)
class RouterBenchOptions:
    """What to measure: a case for each number of workers and each length of prompt."""

    num_workers: tuple[int, ...] = (1, 100, 1000)
    prompt_tokens: tuple[int, ...] = (1000, 4000, 100_000)
    num_blocks: int = 1_000_000
    """In the index besides those of the documents."""
    num_decisions: int = 500
    """Timed, per case."""
    budget_s: float = 0.005
    """For a look-up, as in the gateway."""
    policy: PolicyName = "cost"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table. Times in seconds, of one decision."""

    num_workers: int
    prompt_tokens: int
    wall_p50_s: float
    wall_p99_s: float
    cpu_mean_s: float
    """Of the gateway's process: hashing, asking, choosing, booking, and the event loop between."""
    cpu_p50_s: float
    cpu_least_s: float
    """On a machine that others use, too, CPU seconds are dearer than alone: what it can be."""
    hash_s: float
    """Of that, hashing: median, measured by itself."""
    policy_s: float
    """Of that, choosing: median, measured by itself."""
    server_cpu_s: float
    """Of the server's process, mean."""
    share_late: float
    """Of look-ups that were not answered within the budget: such a decision does without."""
    others: float
    """Cores that everybody else kept busy meanwhile."""

    @property
    def decisions_per_s(self) -> float:
        """One after another, on one core."""
        return 1.0 / self.wall_p50_s

    @property
    def cores_at_rate(self) -> float:
        return RATE * self.cpu_mean_s


@dataclass(frozen=True, slots=True)
class RouterReport:
    """All cases, and the index that they asked."""

    options: RouterBenchOptions
    index_blocks: int
    index_bytes: int
    """The server's memory in use, with all of them."""
    cases: list[Case] = field(default_factory=list)


async def bench_router(options: RouterBenchOptions, on_progress: Callable[[str], None]) -> RouterReport:
    """Start a server, fill the index, measure every case."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        max_bytes = (256 << 20) + options.num_blocks * SERVER_BYTES_PER_BLOCK
        server = EmbeddedRedis(Path(folder), max_memory_bytes=max_bytes)
        await server.start()
        try:
            with connected(server.url) as client:
                await asyncio.to_thread(fill, client, options.num_blocks, options.seed, on_progress)
                report = RouterReport(options, options.num_blocks, int(client.info("memory")["used_memory"]))
                for num_workers, prompt_tokens in itertools.product(options.num_workers, options.prompt_tokens):
                    on_progress(f"{num_workers} workers, prompts of {prompt_tokens} tokens")
                    scene = Scene(client, num_workers, prompt_tokens, options.seed)
                    with settled_collector():
                        report.cases.append(await _Bench(options, server, client, scene).run())
        finally:
            await server.stop()
    return report


class _Bench:
    """One case."""

    def __init__(self, options: RouterBenchOptions, server: EmbeddedRedis, client: redis.Redis, scene: Scene) -> None:
        self._options = options
        self._server = server
        self._client = client
        self._scene = scene

    async def run(self) -> Case:
        self._scene.publish()
        options = self._options
        routing = self._scene.routing(self._server.url, budget_s=options.budget_s, policy=options.policy)
        async with routing as (dispatcher, index):
            return await self._measure(dispatcher, index)

    async def _measure(self, dispatcher: Dispatcher, index: IndexReader) -> Case:
        workers = self._scene.workers
        wall, cpu, hashing, choosing = [], [], [], []
        running: deque[Generation] = deque()
        server_began, num_late, began = self._server_cpu_s(), 0, self._now()
        for number in range(NUM_RUNNING + self._options.num_decisions):
            if number == NUM_RUNNING:  # what was before is the warm-up
                server_began, num_late, began = self._server_cpu_s(), index.num_late, self._now()
            request = self._scene.request(number)
            workers.hear_some(RATE)
            decision = await decide(dispatcher, request)
            running.append(decision.generation)
            if len(running) > NUM_RUNNING:
                running.popleft().close()
            if number < NUM_RUNNING:
                continue
            wall.append(decision.wall_s)
            cpu.append(decision.cpu_s)
            if number % 4 == 0:
                hashing.append(_cpu_s(lambda: dispatcher.block_keys(request)))  # noqa: B023  called at once
                choosing.append(_cpu_s(decision.generation.predict))
        server_cpu_s = self._server_cpu_s() - server_began
        others = self._now().others_since(began)
        for generation in running:
            generation.close()
        walls, cpus = percentiles(wall), percentiles(cpu)
        hashes, choices = percentiles(hashing), percentiles(choosing)
        assert walls is not None and cpus is not None and hashes is not None and choices is not None  # noqa: PT018
        return Case(
            num_workers=len(workers.ready()),
            prompt_tokens=len(request.prompt_token_ids),
            wall_p50_s=walls.p50,
            wall_p99_s=walls.p99,
            cpu_mean_s=cpus.mean,
            cpu_p50_s=cpus.p50,
            cpu_least_s=min(cpu),
            hash_s=hashes.p50,
            policy_s=choices.p50,
            server_cpu_s=server_cpu_s / self._options.num_decisions,
            others=others,
            share_late=(index.num_late - num_late) / self._options.num_decisions,
        )

    def _now(self) -> ProcessMoment:
        assert self._server.pid is not None
        return ProcessMoment.of(os.getpid(), (self._server.pid,))

    def _server_cpu_s(self) -> float:
        usage: Any = self._client.info("cpu")
        return float(usage["used_cpu_user"]) + float(usage["used_cpu_sys"])


def _cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began
