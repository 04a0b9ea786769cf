"""A worker that holds a prompt, another one that may fetch it from there, and what is asked of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from frame_proxy import FrameProxy

from tandem.workers.server import WorkerServer
from tandem.workers.transfer.faulty import FaultPlan, FaultyTransfer
from tandem.workers.types import CachedTokens, KVSource, Request, WorkerSpeeds

KEY = b"test key"
PROMPT_LEN = 200  # 12 whole blocks and half a one
NUM_BLOCKS = 12
SMALL_POOL = 80 * 8192  # 72 blocks of the tiny model, and the probe's
FAILURES = "kv_transfer_failures_total"


def make_eager(server: WorkerServer, token_s: float = 0.05) -> None:
    """The tiny model computes faster than anything is brought: say that it does not."""
    server.role.filler._speeds = lambda: WorkerSpeeds(prefill_token_s=token_s)  # type: ignore[attr-defined]


def renamed(request: Request, request_id: str) -> Request:
    return msgspec.structs.replace(request, request_id=request_id)


def num_computed_by(server: WorkerServer) -> list[int]:
    """From now on, how many tokens each step of this worker computes."""
    computed: list[int] = []
    execute = server.engine.runner.execute

    def counting(batch: Any) -> Any:
        computed.append(sum(len(item.token_ids) for item in batch.items))
        return execute(batch)

    server.engine.runner.execute = counting  # type: ignore[method-assign]
    return computed


async def push_out(gateway: Any, make_request: Callable[..., Request]) -> None:
    """Prompts enough to evict everything from a small pool."""
    for content in range(100, 103):
        await gateway.ask(make_request(f"other {content}", 700, content=content, max_tokens=2))


class Scene:
    """A source that holds a prompt, behind a proxy; a reader under test; and one that says what is right."""

    def __init__(self, bench: Any, make_request: Callable[..., Request]) -> None:
        self.bench = bench
        self.plan = FaultPlan()
        self.proxy = FrameProxy()
        self.request = make_request("r", PROMPT_LEN)

    async def build(self, *, source: dict[str, Any] | None = None, token_s: float = 0.05, **changes: Any) -> None:
        wrap = lambda transfer, pool: FaultyTransfer(transfer, pool, self.plan)  # noqa: E731
        transfer = {"transfer": changes["transfer"]} if "transfer" in changes else {}
        self.source = await self.bench.worker("decode", "s0", **transfer, **(source or {}))
        self.source_gateway = await self.bench.gateway(self.source)
        self.expected = await self.source_gateway.ask(self.request)
        self.reader = await self.bench.worker("aggregated", "r0", wrap=wrap, **changes)
        make_eager(self.reader, token_s)
        self.gateway = await self.bench.gateway(self.reader)
        self.behind_proxy = await self.proxy.start(self.source.address)
        await self.reader.role.peers.get(self.behind_proxy)  # pairing is not part of what is counted
        self.computed = num_computed_by(self.reader)

    async def run(self, num_blocks: int = NUM_BLOCKS, **address: Any) -> CachedTokens:
        """Where the prompt's tokens came from."""
        source = KVSource(address=msgspec.structs.replace(self.behind_proxy, **address), num_blocks=num_blocks)
        answer = await self.gateway.ask(self.request, source=source)
        assert answer.outcome == self.expected.outcome
        await self.bench.settled(4.0)
        return answer.started[0].cached

    @property
    def failures(self) -> dict[str, float]:
        counters = self.reader.metrics.counters
        return {name: value for name, value in counters.items() if name.startswith(FAILURES)}
