"""KV that exists already is brought, not computed: from memory, disk and peers; same tokens, no leak, any fault."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fetch_scene import (
    FAILURES,
    KEY,
    NUM_BLOCKS,
    PROMPT_LEN,
    SMALL_POOL,
    make_eager,
    num_computed_by,
    push_out,
    renamed,
)
from frame_proxy import Cut

from tandem.workers import fill
from tandem.workers.connection import connect
from tandem.workers.offload.rates import FORGETTING_S, PathSpeed
from tandem.workers.peers import Measured
from tandem.workers.protocol import Cancel, Confirm, Confirmed, Failed, Fetch, Pair, TicketPart
from tandem.workers.transfer.faulty import Delay, Fail, FaultPlan, FaultyTransfer, FlipBit, Hang, SkipBlock
from tandem.workers.types import CachedTokens, KVSource, Request

# Tiers


@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_evicted_blocks_come_back(
    bench: Any, make_request: Callable[..., Request], tmp_path: Path, tier: str
) -> None:
    tiers = {"host": {"kv_host_memory_bytes": 4 << 20}, "disk": {"kv_disk_path": tmp_path, "kv_disk_bytes": 8 << 20}}
    worker = await bench.worker("aggregated", "a0", kv_cache_memory_bytes=SMALL_POOL, **tiers[tier])
    make_eager(worker)
    gateway = await bench.gateway(worker)
    request = make_request("r", PROMPT_LEN)
    cold = await gateway.ask(request)
    assert cold.started[0].cached.total == 0
    await push_out(gateway, make_request)
    await bench.settled()
    computed = num_computed_by(worker)
    again = await gateway.ask(renamed(request, "again"))
    assert again.outcome == cold.outcome
    assert again.started[0].cached == CachedTokens(**{tier: NUM_BLOCKS * 16})
    assert computed[0] == PROMPT_LEN - NUM_BLOCKS * 16
    await bench.settled()
    assert worker.metrics.counters[f'kv_tier_bytes_total{{tier="{tier}",direction="out"}}'] == NUM_BLOCKS * 8192


async def test_disk_outlives_the_worker(bench: Any, make_request: Callable[..., Request], tmp_path: Path) -> None:
    disk = {"kv_disk_path": tmp_path, "kv_disk_bytes": 8 << 20, "kv_cache_memory_bytes": SMALL_POOL}
    first = await bench.worker("aggregated", "a0", **disk)
    make_eager(first)
    gateway = await bench.gateway(first)
    request = make_request("r", PROMPT_LEN)
    cold = await gateway.ask(request)
    await push_out(gateway, make_request)
    await bench.settled()
    bench.servers.remove(first)
    await first.stop()
    second = await bench.worker("aggregated", "a0", epoch=1, **disk)
    make_eager(second)
    await bench.settled()  # the disk is read beside the start
    again = await (await bench.gateway(second)).ask(request)
    assert again.outcome == cold.outcome
    assert again.started[0].cached == CachedTokens(disk=NUM_BLOCKS * 16)
    await bench.settled()


async def test_tiers_are_used_under_a_handover_and_by_prefill_workers(
    bench: Any, make_request: Callable[..., Request]
) -> None:
    """Both evict, both bring back: what the decode worker restores is not pulled again."""
    sizes = {"kv_cache_memory_bytes": SMALL_POOL, "kv_host_memory_bytes": 4 << 20}
    prefill, decode = await bench.worker("prefill", "p0", **sizes), await bench.worker("decode", "d0", **sizes)
    make_eager(prefill)
    make_eager(decode)
    gateway = await bench.gateway(decode)
    request = make_request("r", PROMPT_LEN)
    cold = await gateway.ask(request, prefill.address)
    for content in range(100, 103):
        await gateway.ask(make_request(f"other {content}", 700, content=content, max_tokens=2), prefill.address)
    await bench.settled()
    longer = msgspec.structs.replace(request, prompt_token_ids=request.prompt_token_ids * 3)
    computed = num_computed_by(prefill)
    pulled = decode.metrics.counters["kv_transfer_bytes_total"]
    answer = await gateway.ask(renamed(longer, "longer"), prefill.address)
    assert answer.started[0].path == "remote"
    assert answer.started[0].cached == CachedTokens(host=NUM_BLOCKS * 16)
    assert sum(computed) == 3 * PROMPT_LEN - NUM_BLOCKS * 16
    num_pulled = (decode.metrics.counters["kv_transfer_bytes_total"] - pulled) / 8192
    assert num_pulled == -(-3 * PROMPT_LEN // 16) - NUM_BLOCKS
    alone = await bench.gateway(await bench.worker("aggregated", "a0"))
    assert answer.outcome == (await alone.ask(longer)).outcome
    assert cold.outcome == (await alone.ask(renamed(request, "short"))).outcome
    await bench.settled()


async def test_what_is_restored_is_pulled_while_the_rest_is_computed(
    bench: Any, make_request: Callable[..., Request]
) -> None:
    prefill = await bench.worker("prefill", "p0", kv_cache_memory_bytes=SMALL_POOL, kv_host_memory_bytes=4 << 20)
    decode = await bench.worker("decode", "d0")
    make_eager(prefill)
    gateway, request = await bench.gateway(decode), make_request("r", PROMPT_LEN)
    other = await bench.gateway(await bench.worker("decode", "d1"))
    cold = await other.ask(request, prefill.address)
    for content in range(100, 103):
        await other.ask(make_request(f"other {content}", 700, content=content, max_tokens=2), prefill.address)
    await bench.settled()
    go_on, execute = threading.Event(), prefill.engine.runner.execute
    prefill.engine.runner.execute = lambda batch: go_on.wait(10) and execute(batch)
    asked = asyncio.create_task(gateway.ask(request, prefill.address))
    async with asyncio.timeout(5):
        while decode.metrics.counters.get("kv_transfer_bytes_total", 0) < NUM_BLOCKS * 8192:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    go_on.set()
    assert (await asked).outcome == cold.outcome
    await bench.settled()


async def test_a_tier_that_would_be_slower_is_not_used(bench: Any, make_request: Callable[..., Request]) -> None:
    worker = await bench.worker("aggregated", "a0", kv_cache_memory_bytes=SMALL_POOL, kv_host_memory_bytes=4 << 20)
    make_eager(worker, token_s=1e-9)
    gateway = await bench.gateway(worker)
    request = make_request("r", PROMPT_LEN)
    cold = await gateway.ask(request)
    await push_out(gateway, make_request)
    again = await gateway.ask(renamed(request, "again"))
    assert again.outcome == cold.outcome
    assert again.started[0].cached.total == 0


# Peers


@pytest.mark.parametrize("transfer", ["local", "nixl", "nccl"])
async def test_a_prompt_is_fetched_from_a_peer(scene: Any, transfer: str) -> None:
    await scene.build(transfer=transfer)
    assert await scene.run() == CachedTokens(peer=NUM_BLOCKS * 16)
    assert scene.computed[0] == PROMPT_LEN - NUM_BLOCKS * 16
    assert scene.failures == {}
    assert scene.reader.metrics.counters['kv_fetches_total{outcome="whole"}'] == 1


async def test_a_peer_that_holds_less_than_is_said(scene: Any) -> None:
    await scene.build()
    scene.request = msgspec.structs.replace(scene.request, prompt_token_ids=scene.request.prompt_token_ids * 2)
    scene.expected = await (await scene.bench.gateway(await scene.bench.worker("aggregated", "x"))).ask(scene.request)
    assert await scene.run(num_blocks=24) == CachedTokens(peer=NUM_BLOCKS * 16)
    assert scene.reader.metrics.counters['kv_fetches_total{outcome="part"}'] == 1
    assert scene.failures == {}


async def test_a_peer_that_holds_more_than_is_said(scene: Any) -> None:
    await scene.build()
    assert await scene.run(num_blocks=NUM_BLOCKS - 2) == CachedTokens(peer=NUM_BLOCKS * 16)
    assert scene.reader.metrics.counters['kv_fetches_total{outcome="whole"}'] == 1
    assert scene.failures == {}


async def test_a_peer_that_holds_nothing_or_other_peoples(scene: Any) -> None:
    await scene.build()
    scene.request = msgspec.structs.replace(scene.request, salt="another tenant")
    assert await scene.run() == CachedTokens()
    assert scene.reader.metrics.counters['kv_fetches_total{outcome="nothing"}'] == 1
    assert scene.failures == {}


async def test_what_is_here_is_not_fetched(scene: Any) -> None:
    await scene.build()
    short = msgspec.structs.replace(scene.request, prompt_token_ids=scene.request.prompt_token_ids[:80])
    await scene.gateway.ask(renamed(short, "short"))
    asked: list[Fetch] = []

    def note(message: Any) -> Iterable[Any]:
        asked.extend([message] if isinstance(message, Fetch) else [])
        return [message]

    scene.proxy.questions = note
    assert await scene.run() == CachedTokens(pool=80, peer=(NUM_BLOCKS - 5) * 16)
    assert [(fetch.first_block, fetch.max_blocks) for fetch in asked] == [(5, NUM_BLOCKS - 5)]


@pytest.mark.parametrize(("latency_s", "is_fetched"), [(0.8, True), (1.0, False)])
async def test_a_fetch_may_take_twice_as_long_as_computing(scene: Any, latency_s: float, is_fetched: bool) -> None:
    await scene.build(token_s=0.9 / 2 / (NUM_BLOCKS * 16))
    scene.reader.role.filler._path_to = lambda address: PathSpeed(1e9, latency_s)
    assert await scene.run() == CachedTokens(peer=NUM_BLOCKS * 16 if is_fetched else 0)
    outcome = "whole" if is_fetched else "declined"
    assert scene.reader.metrics.counters[f'kv_fetches_total{{outcome="{outcome}"}}'] == 1


@pytest.mark.parametrize(("latency_s", "is_fetched"), [(0.009, True), (0.011, False)])
async def test_some_milliseconds_are_bearable_however_fast_computing_is(
    scene: Any, latency_s: float, is_fetched: bool
) -> None:
    await scene.build(token_s=1e-9)
    scene.reader.role.filler._path_to = lambda address: PathSpeed(1e9, latency_s)
    assert await scene.run() == CachedTokens(peer=NUM_BLOCKS * 16 if is_fetched else 0)


async def test_a_path_that_met_a_bad_moment_is_not_slow_for_good(
    scene: Any, make_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it the probe's or the first fetch's: nobody would ever measure it again."""
    await scene.build(token_s=1e-9)
    filler, peer = scene.reader.role.filler, await scene.reader.role.peers.get(scene.behind_proxy)
    monkeypatch.setattr(peer, "path", Measured("local", 1e-6))  # a block of this model takes 8 s
    assert await scene.run() == CachedTokens()
    path = filler._paths[scene.behind_proxy]
    path._clock = lambda: time.monotonic() + FORGETTING_S + 1
    request = make_request("another", PROMPT_LEN, content=2)
    expected = await scene.source_gateway.ask(request)
    answer = await scene.gateway.ask(request, source=KVSource(address=scene.behind_proxy, num_blocks=NUM_BLOCKS))
    assert answer.outcome == expected.outcome
    assert answer.started[0].cached == CachedTokens(peer=NUM_BLOCKS * 16)


async def test_the_source_is_the_reader_itself(scene: Any) -> None:
    await scene.build()
    assert await scene.run(worker_id="r0") == CachedTokens()
    assert scene.failures == {}


@pytest.mark.parametrize("change", [{"epoch": 7}, {"worker_id": "nobody", "port": 1}])
async def test_a_source_that_is_not_there_is_not_asked_again_at_once(
    scene: Any, make_request: Callable[..., Request], change: dict[str, Any]
) -> None:
    await scene.build()
    assert await scene.run(**change) == CachedTokens()
    assert scene.failures == {f'{FAILURES}{{reason="disconnect"}}': 1}
    address = msgspec.structs.replace(scene.behind_proxy, **change)
    await scene.gateway.ask(make_request("r2", 200, content=2), source=KVSource(address=address, num_blocks=12))
    assert scene.failures == {f'{FAILURES}{{reason="disconnect"}}': 1}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (FlipBit(block=1, bit=12345), "digest"),
        (SkipBlock(block=0), "digest"),
        (Fail("error"), "error"),
        (Fail("disconnect", after_copy=True), "disconnect"),
        (Delay(50.0), "timeout"),
    ],
)
async def test_a_pull_that_goes_wrong(scene: Any, fault: Any, reason: str) -> None:
    await scene.build(token_s=0.003 if reason == "timeout" else 0.05)
    scene.plan.arm(fault)
    assert await scene.run() == CachedTokens()
    assert scene.failures == {f'{FAILURES}{{reason="{reason}"}}': 1}


@pytest.mark.parametrize("has_room", [True, False])
async def test_a_pull_that_hangs_keeps_its_blocks_in_quarantine(scene: Any, has_room: bool) -> None:
    await scene.build(token_s=0.003, **({} if has_room else {"kv_cache_memory_bytes": SMALL_POOL}))
    if not has_room:  # another request owns most blocks: there are none to go on with
        scene.gateway.submit(msgspec.structs.replace(scene.request, request_id="big", prompt_token_ids=(3,) * 800))
        await asyncio.wait_for(scene.gateway.answers["big"].first_token.wait(), 10)
    scene.plan.arm(Hang())
    source = KVSource(address=scene.behind_proxy, num_blocks=NUM_BLOCKS)
    answer = await scene.gateway.ask(scene.request, source=source)
    assert answer.outcome == scene.expected.outcome
    assert scene.reader.engine.counts().quarantined == NUM_BLOCKS
    scene.plan.release()
    await scene.bench.settled()
    assert scene.failures == {f'{FAILURES}{{reason="timeout"}}': 1}


async def test_a_stale_generation(scene: Any) -> None:
    def make_stale(message: Any) -> Iterable[Any]:
        if isinstance(message, TicketPart):
            first, *rest = message.ticket.blocks
            stale = msgspec.structs.replace(first, generation=first.generation - 1)
            return [TicketPart(ticket=msgspec.structs.replace(message.ticket, blocks=(stale, *rest)))]
        return [message]

    await scene.build()
    scene.proxy.answers = make_stale
    assert await scene.run() == CachedTokens()
    assert scene.failures == {f'{FAILURES}{{reason="generation"}}': 1}


async def test_a_lease_that_ended(scene: Any) -> None:
    await scene.build(source={"lease_s": 0.2}, heartbeat_s=30.0)
    scene.plan.arm(Delay(0.8))
    assert await scene.run() == CachedTokens()
    assert scene.failures == {f'{FAILURES}{{reason="lease"}}': 1}
    assert scene.source.metrics.counters["leases_expired_total"] == 1


async def test_a_lease_is_renewed_while_blocks_are_pulled(scene: Any) -> None:
    await scene.build(source={"lease_s": 1.2}, heartbeat_s=0.4)
    scene.plan.arm(Delay(2.0))
    assert await scene.run() == CachedTokens(peer=NUM_BLOCKS * 16)


@pytest.mark.parametrize("moment", ["asked", "part", "confirm", "confirmed"])
async def test_a_source_that_is_lost(scene: Any, moment: str) -> None:
    def cut(message: Any) -> Iterable[Any]:
        kinds = {"asked": Fetch, "part": TicketPart, "confirm": Confirm}
        if isinstance(message, kinds.get(moment, ())) or type(message).__name__.lower() == moment:
            raise Cut
        return [message]

    await scene.build()
    scene.proxy.answers = scene.proxy.questions = cut
    assert await scene.run() == CachedTokens()
    assert scene.failures == {f'{FAILURES}{{reason="disconnect"}}': 1}


async def test_a_source_that_refuses(scene: Any) -> None:
    await scene.build()
    scene.proxy.answers = lambda message: (
        [Failed(request_id=message.ticket.request_id, message="no", retryable=True)]
        if isinstance(message, TicketPart)
        else [message]
    )
    assert await scene.run() == CachedTokens()
    assert scene.failures == {f'{FAILURES}{{reason="refused"}}': 1}


async def test_a_source_that_does_not_answer_costs_no_more_than_computing(scene: Any) -> None:
    await scene.build(token_s=0.002)
    scene.proxy.answers = lambda message: [] if isinstance(message, TicketPart) else [message]
    started = asyncio.get_running_loop().time()
    assert await scene.run() == CachedTokens()
    assert asyncio.get_running_loop().time() - started < 2.0
    assert scene.failures == {f'{FAILURES}{{reason="timeout"}}': 1}


@pytest.mark.parametrize("change", ["index", "gap", "twice", "worker"])
async def test_a_ticket_that_does_not_fit(scene: Any, change: str) -> None:
    def spoil(message: Any) -> Iterable[Any]:
        if not isinstance(message, TicketPart):
            return [message]
        ticket, blocks = message.ticket, message.ticket.blocks
        match change:
            case "index":
                blocks = (*blocks[:-1], msgspec.structs.replace(blocks[-1], index=NUM_BLOCKS))
            case "gap":
                blocks = (*blocks[:3], *blocks[4:])
            case "twice":
                return [message, TicketPart(ticket=msgspec.structs.replace(ticket, part=1))]
            case "worker":
                ticket = msgspec.structs.replace(ticket, worker_id="somebody")
        return [TicketPart(ticket=msgspec.structs.replace(ticket, blocks=blocks))]

    await scene.build()
    scene.proxy.answers = spoil
    cached = await scene.run()
    if change == "twice":  # the first part was the last one: what follows is not waited for
        assert cached == CachedTokens(peer=NUM_BLOCKS * 16)
    else:
        assert cached == CachedTokens()
        assert scene.failures == {f'{FAILURES}{{reason="refused"}}': 1}


@pytest.mark.parametrize("moment_s", [0.0, 0.003, 0.02, 0.08])
async def test_a_cancel_frees_both_sides(scene: Any, moment_s: float) -> None:
    await scene.build(source={"lease_s": 60.0})
    scene.plan.arm(Delay(0.05))
    source = KVSource(address=scene.behind_proxy, num_blocks=NUM_BLOCKS)
    scene.gateway.submit(scene.request, source=source)
    await asyncio.sleep(moment_s)
    scene.gateway.cancel("r")
    await scene.bench.settled(1.0)


async def test_a_promise_belongs_to_who_asked(scene: Any) -> None:
    await scene.build()
    tokens = scene.request.prompt_token_ids
    question = Fetch(request_id="f", token_ids=tokens, salt="", first_block=2, max_blocks=8)
    mine, other = [await connect(scene.source.address, key=KEY, peer=name) for name in ("mine", "other")]
    mine.send(question)
    ticket = (await mine.receive_expected(TicketPart)).ticket
    assert [block.index for block in ticket.blocks] == list(range(2, 10))
    assert ticket.first_token is None
    pairs = tuple((block.block_id, block.generation) for block in ticket.blocks)
    other.send(Cancel(request_id="f"))
    other.send(Confirm(request_id="f", blocks=pairs))
    assert (await other.receive_expected(Confirmed)).broken == "lease"
    other.send(question)
    assert "in use" in (await other.receive_expected(Failed)).message
    assert scene.source.engine.counts().used == 10, "whoever holds a block holds its whole path"
    await mine.close()
    await scene.bench.settled(1.0)
    await other.close()


async def test_a_block_that_waits_to_be_saved_is_saved_before_a_pull_overwrites_it(
    scene: Any, make_request: Callable[..., Request]
) -> None:
    await scene.build(kv_cache_memory_bytes=SMALL_POOL, kv_host_memory_bytes=4 << 20)
    other = make_request("other", 1000, content=5)
    expected = await scene.gateway.ask(other)
    go_on, save = asyncio.Event(), scene.reader.tiers._save_waiting

    async def save_later() -> None:
        await go_on.wait()
        await save()

    scene.reader.tiers._save_waiting = save_later
    source = KVSource(address=scene.behind_proxy, num_blocks=NUM_BLOCKS)
    answer = await scene.gateway.ask(scene.request, source=source)
    assert answer.outcome == scene.expected.outcome
    assert answer.started[0].cached == CachedTokens(peer=NUM_BLOCKS * 16)
    go_on.set()
    await scene.bench.settled()
    again = await scene.gateway.ask(renamed(other, "again"))
    assert again.outcome == expected.outcome
    assert again.started[0].cached.host > 0
    await scene.bench.settled()


# A conversation


@pytest.mark.parametrize("transfer", ["local", "nixl"])
async def test_a_second_turn_costs_the_prefill_worker_the_new_tokens(
    bench: Any, make_request: Callable[..., Request], transfer: str
) -> None:
    """Its history, the answer included, is on the decode worker; this prefill worker has never seen it."""
    first = await bench.worker("prefill", "p0", transfer=transfer)
    second = await bench.worker("prefill", "p1", transfer=transfer)
    decode = await bench.worker("decode", "d0", transfer=transfer)
    make_eager(second)
    gateway = await bench.gateway(decode)
    request = make_request("turn 1", 150, max_tokens=60)
    answer = await gateway.ask(request, first.address)
    history = (*request.prompt_token_ids, *answer.token_ids[0])
    new = make_request("new", 90, content=9).prompt_token_ids
    turn = msgspec.structs.replace(request, request_id="turn 2", prompt_token_ids=history + new)
    computed = num_computed_by(second)
    got = await gateway.ask(turn, second.address)
    assert got.started[0].path == "remote"
    assert got.started[0].prefill_worker == "p1"
    assert got.started[0].cached.peer == (len(history) - 1) // 16 * 16
    assert sum(computed) <= len(new) + 16
    alone = await bench.gateway(await bench.worker("aggregated", "a0"))
    assert got.outcome == (await alone.ask(turn)).outcome
    await bench.settled()


@pytest.mark.parametrize("are_acquainted", [True, False])
async def test_a_short_answer_is_not_computed_again_by_the_prefill_worker(
    bench: Any, make_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch, are_acquainted: bool
) -> None:
    """It read the turn before, so the decode worker holds one block more: the answer. A fetch of it takes 5 ms,
    computing it 3. In a house so large that the two are strangers, they become acquainted for the next turn."""
    monkeypatch.setattr(fill, "LEAST_FETCH_S", 10.0)  # whether it is asked for is the question, not how busy we are
    prefill, decode = await bench.worker("prefill", "p0"), await bench.worker("decode", "d0")
    make_eager(prefill, token_s=0.0002)
    filler = prefill.role.filler  # which takes a measured path for a usual one: this machine may be busy
    filler._path_to = lambda address: fill.USUAL_PEER if filler.peers.path_to(address) else fill.UNKNOWN_PEER

    async def acquainted() -> None:
        async with asyncio.timeout(5):
            while prefill.role.peers.path_to(decode.address) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    gateway = await bench.gateway(decode)
    if are_acquainted:
        (await bench.gateway(prefill)).connection.send(Pair(sources=(decode.address,)))
        await acquainted()
    computed = num_computed_by(prefill)
    prompt, history_len = make_request("turn", 150, content=20).prompt_token_ids, 0
    for turn in range(4):
        del computed[:]
        request = msgspec.structs.replace(make_request(f"turn {turn}", 1, max_tokens=17), prompt_token_ids=prompt)
        answer = await gateway.ask(request, prefill.address)
        assert answer.started[0].path == "remote"
        if turn == 1 and not are_acquainted:
            assert sum(computed) <= len(prompt) - history_len + 17 + 16  # strangers: the answer is computed, once
            await acquainted()
        elif turn:
            assert sum(computed) <= len(prompt) - history_len + 16
        history = (*prompt, *answer.token_ids[0])
        history_len = len(history)
        prompt = history + make_request("new", 40, content=30 + turn).prompt_token_ids
    await bench.settled()


@pytest.mark.parametrize("moment", ["asking", "pulling"])
async def test_a_prefill_worker_that_fetches_is_cancelled(
    scene: Any, make_request: Callable[..., Request], moment: str
) -> None:
    await scene.build()
    plan, bench = FaultPlan(), scene.bench
    decode = await bench.worker("decode", "d0")
    prefill = await bench.worker("prefill", "p0", wrap=lambda inner, pool: FaultyTransfer(inner, pool, plan))
    make_eager(prefill)
    await prefill.role.peers.get(scene.behind_proxy)
    gateway = await bench.gateway(decode)
    if moment == "asking":  # nothing comes before the deadline of 10 s
        scene.proxy.answers = lambda message: [] if isinstance(message, TicketPart) else [message]
    plan.arm(Delay(0.2))
    hint = KVSource(address=scene.behind_proxy, num_blocks=NUM_BLOCKS)
    gateway.submit(renamed(scene.request, "cancelled"), prefill.address, source=hint)
    async with asyncio.timeout(5):
        while prefill.engine.counts().incoming == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    gateway.cancel("cancelled")
    await bench.settled(2.0)
    scene.proxy.answers = lambda message: [message]
    answer = await gateway.ask(renamed(scene.request, "again"), prefill.address, source=hint)
    assert answer.outcome == scene.expected.outcome
    assert answer.started[0].cached == CachedTokens(peer=NUM_BLOCKS * 16)
    await bench.settled(2.0)
