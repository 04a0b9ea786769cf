"""`tandem bench gateway`: what a gateway costs per token, per request and per idle stream.

    clients  ── HTTP, one connection per stream ──>  gateway  <── real protocol, one frame per step ──  workers
    gateway_load.py                            gateway_process.py                               gateway_workers.py

Three processes and this one, which gives them orders and reads the gateway's CPU time and memory from /proc. Costs are
CPU seconds of the gateway's process, so they are the gateway's own on a machine that others use, too. Latencies are
not: read them beside `others`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.cluster.bench.children import Child, child_process
from tandem.cluster.bench.cpu_use import ProcessMoment, resident_bytes
from tandem.cluster.bench.gateway_figures import Way, ways
from tandem.cluster.bench.gateway_requests import Parts, measure_parts, words
from tandem.cluster.bench.prompts import WORDS
from tandem.cluster.bench.statistics import Percentiles, percentiles
from tandem.router.tokenizer import Tokenizer
from tandem.workers.errors import UserError

HOST = "127.0.0.1"
MODEL = "bench"
MAX_MODEL_LEN = 1 << 20
STREAMED_PROMPT_TOKENS = 100
WHOLE_REQUESTS_PER_ROUND = 3
HEALTH_GAP_S = 0.02
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class GatewayBenchOptions:
    """What to measure."""

    tokenizer_folder: Path
    num_streams: int = 256
    num_workers: int = 1
    """A frame carries the tokens of `num_streams / num_workers` streams: the fewer workers, the larger the bursts."""
    rate: float = 30_000.0
    """Tokens per second, all streams together."""
    duration_s: float = 8.0
    """Of each measurement of streams."""
    prompt_tokens: tuple[int, ...] = (100, 8000)
    num_requests: int = 60
    """Whole requests per length of prompt."""
    num_idle: int = 10_000
    """Idle streams. 0: none."""
    idle_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Streaming:
    """Streams at one pace. Times in seconds."""

    num_streams: int
    num_workers: int
    offered_per_s: float
    tokens_per_s: float
    """Read by clients."""
    cpu_per_token_s: float
    """Of the gateway's process, all its threads."""
    cores: float
    """That the gateway's process used."""
    tokens_per_read: float
    latency: Percentiles
    """From the worker's sending to the client's reading, of each token."""
    others: float
    """Cores that other processes kept busy meanwhile."""

    @property
    def tokens_per_core_s(self) -> float:
        return 1.0 / self.cpu_per_token_s


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of one length, with their parts."""

    parts: Parts
    total_cpu_s: float
    """Of the gateway's process, one whole request over HTTP: everything, an answer of one token included."""
    wall_s: float


@dataclass(frozen=True, slots=True)
class Idle:
    """Streams that were begun and have nothing to say."""

    num_streams: int
    bytes_per_stream: float
    opened_per_s: float
    cores: float
    """That the gateway used while nothing was said."""
    health: Percentiles
    """Seconds to an answer of /health meanwhile."""
    health_opening: Percentiles
    """The same while the streams were opened."""


@dataclass(slots=True)
class GatewayReport:
    """All that was measured."""

    options: GatewayBenchOptions
    streaming: list[Streaming] = field(default_factory=list)
    requests: list[Requests] = field(default_factory=list)
    idle: Idle | None = None


async def bench_gateway(options: GatewayBenchOptions, on_progress: Callable[[str], None]) -> GatewayReport:
    """Raises `UserError`."""
    tokenizer = await asyncio.to_thread(Tokenizer, options.tokenizer_folder)
    report = GatewayReport(options)
    async with house(options, tokenizer) as measured:
        on_progress(f"{options.num_streams} streams at {options.rate:,.0f} tokens/s")
        await measured.stream(options.rate, min(1.0, options.duration_s))  # warm-up
        full = await measured.stream(options.rate, options.duration_s)
        half = 0.5 * full.tokens_per_core_s
        on_progress(f"the same at half of what one core can do, {half:,.0f} tokens/s")
        report.streaming += [full, await measured.stream(half, options.duration_s)]
        for count in options.prompt_tokens:
            on_progress(f"requests of {count:,} tokens")
            report.requests.append(await measured.requests(tokenizer, count))
    if options.num_idle:
        async with house(options, tokenizer) as measured:
            on_progress(f"{options.num_idle:,} idle streams")
            report.idle = await measured.idle()
    return report


@asynccontextmanager
async def house(options: GatewayBenchOptions, tokenizer: Tokenizer) -> AsyncIterator[House]:
    """A gateway with its workers and its clients."""
    key = secrets.token_hex(16)
    async with AsyncExitStack() as stack:
        start = [
            stack.enter_async_context(child_process(f"tandem.cluster.bench.{name}"))
            for name in ("gateway_workers", "gateway_load", "gateway_process")
        ]
        workers, load, gateway = [await each for each in start]
        token_ids = tokenizer.encode(" " + " ".join(WORDS), add_special_tokens=False)
        addresses = await workers.ask(
            {
                "do": "start",
                "workers": options.num_workers,
                "cluster_key": key,
                "token_ids": token_ids,
                "max_model_len": MAX_MODEL_LEN,
            }
        )
        served = await gateway.ask(
            {
                "do": "start",
                "workers": addresses,
                "model": MODEL,
                "tokenizer_folder": str(options.tokenizer_folder),
                "cluster_key": key,
                "max_model_len": MAX_MODEL_LEN,
                "max_in_flight": max(1024, 2 * options.num_idle),
            }
        )
        yield House(options, workers, load, gateway, served["port"])


class House:
    """The processes, and what is measured on them."""

    def __init__(self, options: GatewayBenchOptions, workers: Child, load: Child, gateway: Child, port: int) -> None:
        self._options = options
        self._workers = workers
        self._load = load
        self._gateway = gateway
        self.port = port

    @property
    def pid(self) -> int:
        """Of the gateway."""
        return self._gateway.pid

    async def pace(self, rate: float | None) -> None:
        """Tokens per second, for all streams together. None: silence."""
        step_s = None if rate is None else self._options.num_streams / rate
        await self._workers.ask({"do": "pace", "step_s": step_s})

    def _now(self) -> ProcessMoment:
        return ProcessMoment.of(self._gateway.pid, (self._workers.pid, self._load.pid))

    async def stream(self, rate: float, duration_s: float) -> Streaming:
        """All streams at `rate` tokens per second together, for so long."""
        options = self._options
        await self._workers.ask({"do": "stamps"})  # what was before is no longer of interest
        await self._open(options.num_streams, first_events=2)
        await self.pace(rate)
        await asyncio.sleep(min(0.3, duration_s))
        began = self._now()
        await asyncio.sleep(duration_s)
        ended = self._now()
        await self.pace(None)
        await asyncio.sleep(min(0.3, duration_s))
        stamps = await self._workers.ask({"do": "stamps"})
        way = ways(stamps, await self._close(), began.wall_s, ended.wall_s)
        return self._streaming(rate, way, began, ended)

    def _streaming(self, rate: float, way: Way, began: ProcessMoment, ended: ProcessMoment) -> Streaming:
        latency = percentiles(way.latencies)
        if latency is None:
            raise UserError("no token reached a client")
        wall_s = ended.wall_s - began.wall_s
        return Streaming(
            num_streams=self._options.num_streams,
            num_workers=self._options.num_workers,
            offered_per_s=rate,
            tokens_per_s=way.num_tokens / wall_s,
            cpu_per_token_s=(ended.cpu_s - began.cpu_s) / way.num_tokens,
            cores=(ended.cpu_s - began.cpu_s) / wall_s,
            tokens_per_read=way.num_tokens / way.num_reads,
            latency=latency,
            others=ended.others_since(began),
        )

    async def requests(self, tokenizer: Tokenizer, prompt_tokens: int) -> Requests:
        """Whole requests of this length, beside the parts that they are made of."""
        rounds = self._options.num_requests
        order = {"do": "repeat", "host": HOST, "port": self.port, "model": MODEL, "words": words(prompt_tokens)}
        await self._load.ask(order | {"requests": max(1, rounds // 10)})
        cpu_s, wall_s = [], []
        for _ in range(WHOLE_REQUESTS_PER_ROUND):
            began = self._now()
            done = await self._load.ask(order | {"requests": rounds})
            cpu_s.append((self._now().cpu_s - began.cpu_s) / rounds)
            wall_s.append(done["seconds"] / rounds)
        parts = await asyncio.to_thread(
            measure_parts, tokenizer, self._options.tokenizer_folder, prompt_tokens, min(rounds, 50)
        )
        return Requests(parts, min(cpu_s), min(wall_s))

    async def idle(self) -> Idle:
        """Many streams with one token each and then silence."""
        count = self._options.num_idle
        # what a gateway needs once, however many streams there are, is not theirs
        await self._open(min(200, count), first_events=2)
        await self._close()
        await asyncio.sleep(SETTLE_S)
        before = resident_bytes(self._gateway.pid)
        opened_s = 0.0

        async def open_all() -> None:
            nonlocal opened_s
            opened_s = (await self._open(count, first_events=2))["seconds"]

        opening = await self._health_while(open_all())
        await asyncio.sleep(SETTLE_S)
        began = self._now()
        health = await self._health_while(asyncio.sleep(self._options.idle_s))
        ended = self._now()
        bytes_per_stream = (resident_bytes(self._gateway.pid) - before) / count
        await self._close()
        return Idle(
            num_streams=count,
            bytes_per_stream=bytes_per_stream,
            opened_per_s=count / opened_s,
            cores=(ended.cpu_s - began.cpu_s) / (ended.wall_s - began.wall_s),
            health=health,
            health_opening=opening,
        )

    async def _open(self, count: int, *, first_events: int) -> Any:
        return await self._load.ask(
            {
                "do": "open",
                "host": HOST,
                "port": self.port,
                "model": MODEL,
                "words": words(STREAMED_PROMPT_TOKENS),
                "max_tokens": MAX_MODEL_LEN // 2,
                "streams": count,
                "at_once": 64,
                "first_events": first_events,
            }
        )

    async def _close(self) -> Any:
        """Hang up; the gateway has noticed when this returns."""
        reads = await self._load.ask({"do": "close"})
        await self._gateway.ask({"do": "rest"})
        return reads

    async def _health_while(self, work: Any) -> Percentiles:
        """Ask for /health again and again until `work` is done; at least once."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        task = asyncio.ensure_future(work)
        taken: list[float] = []
        try:
            while not task.done() or not taken:
                began = time.monotonic()
                writer.write(b"GET /health HTTP/1.1\r\nhost: bench\r\n\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readuntil(b"}")
                if b" 200 " not in head[:13]:
                    raise UserError(f"/health says {head[:40].decode()}")
                taken.append(time.monotonic() - began)
                await asyncio.sleep(HEALTH_GAP_S)
            await task
        finally:
            task.cancel()
            writer.close()
        found = percentiles(taken)
        assert found is not None
        return found
