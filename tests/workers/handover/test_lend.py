"""What a peer fetches may lie in the source's lower tiers: brought back there, then pulled; same tokens, no leak."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fetch_scene import KEY, NUM_BLOCKS, PROMPT_LEN, SMALL_POOL, Scene, make_eager, push_out, renamed

from tandem.workers.connection import connect
from tandem.workers.offload.tiers import Tiers
from tandem.workers.protocol import Cancel, Confirm, Confirmed, Fetch, TicketPart
from tandem.workers.transfer.faulty import FlipBit
from tandem.workers.types import CachedTokens, KVSource, Request

WHOLE = CachedTokens(peer=NUM_BLOCKS * 16)
HOST = {"kv_cache_memory_bytes": SMALL_POOL, "kv_host_memory_bytes": 4 << 20}


async def build(scene: Scene, make_request: Callable[..., Request], source: dict[str, Any], **changes: Any) -> None:
    """The source has read the prompt, and then so much else that none of it is in its pool."""
    await scene.build(source=source, **changes)
    await push_out(scene.source_gateway, make_request)
    await scene.bench.settled()
    scene.source.metrics.counters.clear()


def num_restored(scene: Scene, tier: str = "host") -> float:
    return scene.source.metrics.counters[f'kv_tier_bytes_total{{tier="{tier}",direction="out"}}'] / 8192


@pytest.mark.parametrize(
    ("tier", "transfer"), [("host", "local"), ("disk", "local"), ("host", "nixl"), ("disk", "nixl")]
)
async def test_a_prompt_is_fetched_from_a_peers_tiers(
    scene: Scene, make_request: Callable[..., Request], tmp_path: Path, tier: str, transfer: str
) -> None:
    disk = {"kv_cache_memory_bytes": SMALL_POOL, "kv_disk_path": tmp_path, "kv_disk_bytes": 8 << 20}
    await build(scene, make_request, HOST if tier == "host" else disk, transfer=transfer)
    assert await scene.run() == WHOLE
    assert num_restored(scene, tier) == NUM_BLOCKS
    assert scene.reader.metrics.counters['kv_fetches_total{outcome="whole"}'] == 1
    assert scene.failures == {}


async def test_the_pools_part_goes_first(scene: Scene, make_request: Callable[..., Request]) -> None:
    await build(scene, make_request, HOST)
    short = msgspec.structs.replace(scene.request, prompt_token_ids=scene.request.prompt_token_ids[:90], request_id="s")
    make_eager(scene.source, token_s=1e-9)  # it computes the beginning, so the rest stays below
    await scene.source_gateway.ask(short)
    assert await scene.run() == WHOLE
    assert num_restored(scene) == NUM_BLOCKS - 5


async def test_a_prefill_worker_lends_too(bench: Any, make_request: Callable[..., Request]) -> None:
    prefill, decode = await bench.worker("prefill", "p0", **HOST), await bench.worker("decode", "d0")
    gateway, request = await bench.gateway(decode), make_request("r", PROMPT_LEN)
    cold = await gateway.ask(request, prefill.address)
    for content in range(100, 103):
        await gateway.ask(make_request(f"other {content}", 700, content=content, max_tokens=2), prefill.address)
    await bench.settled()
    reader = await bench.worker("aggregated", "r0")
    make_eager(reader)
    source = KVSource(address=prefill.address, num_blocks=NUM_BLOCKS)
    answer = await (await bench.gateway(reader)).ask(renamed(request, "again"), source=source)
    assert answer.outcome == cold.outcome
    assert answer.started[0].cached == WHOLE
    await bench.settled()


async def test_only_what_comes_in_time_is_brought_back(scene: Scene, make_request: Callable[..., Request]) -> None:
    await build(scene, make_request, HOST, token_s=0.005)  # 0.96 s to compute: twice that, of which tiers may take half
    assert scene.source.tiers is not None
    scene.source.tiers.seconds = lambda keys: 0.21 * len(keys)  # type: ignore[method-assign]
    assert await scene.run() == CachedTokens(peer=4 * 16)
    assert scene.reader.metrics.counters['kv_fetches_total{outcome="part"}'] == 1


async def test_running_requests_keep_their_room(scene: Scene, make_request: Callable[..., Request]) -> None:
    """The source's pool is taken: it lends nothing, and the reader computes."""
    await build(scene, make_request, HOST)
    big = msgspec.structs.replace(scene.request, request_id="big", prompt_token_ids=(3,) * 800, salt="other")
    long = msgspec.structs.replace(big, sampling=msgspec.structs.replace(big.sampling, max_tokens=220))
    scene.source_gateway.submit(long)
    await asyncio.wait_for(scene.source_gateway.answers["big"].first_token.wait(), 10)
    await push_out_rest(scene, make_request)
    source = KVSource(address=scene.behind_proxy, num_blocks=NUM_BLOCKS)
    answer = await scene.gateway.ask(scene.request, source=source)
    assert answer.outcome == scene.expected.outcome
    assert answer.started[0].cached.peer <= 72 * 16 - 800
    scene.source_gateway.cancel("big")
    await scene.bench.settled()


async def push_out_rest(scene: Scene, make_request: Callable[..., Request]) -> None:
    await scene.source_gateway.ask(make_request("rest", 150, content=77, max_tokens=2))


async def test_damage_on_the_disk_costs_what_is_behind_it(
    scene: Scene, make_request: Callable[..., Request], tmp_path: Path
) -> None:
    disk = {"kv_cache_memory_bytes": SMALL_POOL, "kv_disk_path": tmp_path, "kv_disk_bytes": 8 << 20}
    await build(scene, make_request, disk)
    tiers = scene.source.tiers
    assert tiers is not None
    reads, read = [], tiers._read_disk

    async def third_is_damaged(block: Any) -> bool:
        reads.append(block)
        return len(reads) != 3 and await read(block)

    tiers._read_disk = third_is_damaged  # type: ignore[method-assign]
    assert await scene.run() == CachedTokens(peer=2 * 16)


async def test_a_block_that_arrives_wrong_is_found(scene: Scene, make_request: Callable[..., Request]) -> None:
    await build(scene, make_request, HOST)
    scene.plan.arm(FlipBit(block=1, bit=12345))
    assert await scene.run() == CachedTokens()
    assert scene.failures == {'kv_transfer_failures_total{reason="digest"}': 1}


# Ends in the middle


class Gate:
    """Holds a worker's tiers up after so many blocks."""

    def __init__(self, tiers: Tiers | None, after: int) -> None:
        assert tiers is not None
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        read, num_read = tiers._read_host, 0

        async def held_up(entries: list[Any], block_ids: list[int]) -> None:
            nonlocal num_read
            if num_read >= after:
                self.reached.set()
                await self.open.wait()
            num_read += len(entries)
            await read(entries, block_ids)

        tiers._read_host = held_up  # type: ignore[method-assign]


@pytest.fixture
async def held_up(scene: Scene, make_request: Callable[..., Request]) -> AsyncIterator[Gate]:
    await build(scene, make_request, {**HOST, "lease_s": 60.0})
    gate = Gate(scene.source.tiers, after=8)
    yield gate
    gate.open.set()


@pytest.mark.parametrize("after", [0, 8])
async def test_the_reader_is_cancelled(scene: Scene, make_request: Callable[..., Request], after: int) -> None:
    await build(scene, make_request, {**HOST, "lease_s": 60.0})
    gate = Gate(scene.source.tiers, after)
    scene.gateway.submit(scene.request, source=KVSource(address=scene.behind_proxy, num_blocks=NUM_BLOCKS))
    await asyncio.wait_for(gate.reached.wait(), 5)
    assert scene.source.engine.counts().incoming == NUM_BLOCKS - after
    scene.gateway.cancel("r")
    await scene.bench.settled(1.0)


async def test_the_reader_is_lost(scene: Scene, held_up: Gate) -> None:
    reader = await connect(scene.source.address, key=KEY, peer="reader")
    tokens = scene.request.prompt_token_ids
    reader.send(Fetch(request_id="f", token_ids=tokens, salt="", first_block=0, max_blocks=NUM_BLOCKS, timeout_s=10.0))
    part = (await reader.receive_expected(TicketPart)).ticket
    assert len(part.blocks) == 8
    assert not part.last
    await asyncio.wait_for(held_up.reached.wait(), 5)
    reader.abort()
    await scene.bench.settled(1.0)


async def test_a_reader_that_cannot_wait_computes(scene: Scene, held_up: Gate) -> None:
    """The tiers take longer than they were expected to."""
    make_eager(scene.reader, token_s=0.004)
    assert await scene.run() == CachedTokens()
    assert scene.failures == {'kv_transfer_failures_total{reason="timeout"}': 1}


async def test_the_source_stops_in_the_middle(scene: Scene, held_up: Gate) -> None:
    source = KVSource(address=scene.behind_proxy, num_blocks=NUM_BLOCKS)
    asked = asyncio.create_task(scene.gateway.ask(scene.request, source=source))
    await asyncio.wait_for(held_up.reached.wait(), 5)
    scene.bench.servers.remove(scene.source)
    held_up.open.set()
    await scene.source.stop()
    answer = await asked
    assert answer.outcome == scene.expected.outcome
    await scene.bench.settled()


async def test_nothing_in_the_end_is_an_empty_ticket_and_no_promise(scene: Scene, held_up: Gate) -> None:
    """What tiers said they held is gone when it is asked for."""
    assert scene.source.tiers is not None
    scene.source.tiers._held_in_host = lambda wanted: []  # type: ignore[method-assign]
    assert await scene.run() == CachedTokens()
    assert scene.reader.metrics.counters['kv_fetches_total{outcome="nothing"}'] == 1
    assert scene.failures == {}


async def test_a_confirmation_before_the_end_ends_the_promise(scene: Scene, held_up: Gate) -> None:
    reader = await connect(scene.source.address, key=KEY, peer="reader")
    tokens = scene.request.prompt_token_ids
    reader.send(Fetch(request_id="f", token_ids=tokens, salt="", first_block=0, max_blocks=NUM_BLOCKS, timeout_s=10.0))
    part = (await reader.receive_expected(TicketPart)).ticket
    pairs = tuple((block.block_id, block.generation) for block in part.blocks)
    await asyncio.wait_for(held_up.reached.wait(), 5)
    reader.send(Confirm(request_id="f", blocks=pairs))
    assert (await reader.receive_expected(Confirmed)).broken is None
    reader.send(Cancel(request_id="f"))
    await scene.bench.settled(1.0)
    await reader.close()
