"""All ways in which a pull can go wrong: found, counted, recovered by recomputing; no wrong token, no leak."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

import msgspec
import pytest
from frame_proxy import Cut, FrameProxy

from tandem.workers.batch import Batch, SampledToken
from tandem.workers.protocol import Confirm, Prefill, Renew, TicketPart
from tandem.workers.steps import Runner
from tandem.workers.transfer.faulty import Delay, Fail, FaultPlan, FaultyTransfer, FlipBit, Hang, SkipBlock
from tandem.workers.types import Request

PROMPT_LEN = 200  # four chunks of 64: four parts of a ticket, the last with a partly filled block
FAILURES = "kv_transfer_failures_total"


class Paced:
    """A runner that computes no chunk before the last one is being pulled: chunks that wait are pulled together."""

    def __init__(self, runner: Runner, plan: FaultPlan) -> None:
        self._runner = runner
        self._plan = plan
        self._num_pulls: int | None = None

    def execute(self, batch: Batch) -> SequenceOf[SampledToken | None]:
        patience = time.monotonic() + 0.3  # nobody pulls any more where something went wrong
        while self._plan.num_pulls == self._num_pulls and time.monotonic() < patience:
            time.sleep(0.001)
        self._num_pulls = self._plan.num_pulls
        return self._runner.execute(batch)


class Scene:
    """A worker that says what is right, a decode worker under test, a prefill worker behind a proxy, and another."""

    def __init__(self, bench: Any, make_request: Callable[..., Request]) -> None:
        self.bench, self.make_request = bench, make_request
        self.plan = FaultPlan()
        self.proxy = FrameProxy()

    async def build(self, **changes: Any) -> None:
        wrap = lambda transfer, pool: FaultyTransfer(transfer, pool, self.plan)  # noqa: E731
        self.alone = await self.bench.gateway(await self.bench.worker("aggregated", "a0"))
        self.prefill = await self.bench.worker("prefill", "p0", **changes.pop("prefill", {}))
        self.prefill.engine.runner = Paced(self.prefill.engine.runner, self.plan)
        self.other = await self.bench.worker("prefill", "p1")
        self.decode = await self.bench.worker("decode", "d0", wrap=wrap, **changes)
        self.gateway = await self.bench.gateway(self.decode)
        self.behind_proxy = await self.proxy.start(self.prefill.address)
        await self.decode.role.peers.get(self.behind_proxy)  # pairing is not part of what is counted
        self.plan.arm()

    async def run(self, content: int = 1) -> Any:
        request = self.make_request("r", PROMPT_LEN, content=content)
        answer = await self.gateway.ask(request, self.behind_proxy)
        expected = await self.alone.ask(request)
        assert answer.outcome == expected.outcome
        assert len(answer.started) == 1
        await self.bench.settled(4.0)
        return answer

    @property
    def failures(self) -> dict[str, float]:
        counters = self.decode.metrics.counters
        return {name: value for name, value in counters.items() if name.startswith(FAILURES)}


@pytest.fixture
async def scene(bench: Any, make_request: Callable[..., Request]) -> Any:
    scene = Scene(bench, make_request)
    yield scene
    await scene.proxy.stop()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (FlipBit(block=1, bit=12345), "digest"),
        (SkipBlock(block=0), "digest"),
        (Fail("error"), "error"),
        (Fail("disconnect", after_copy=True), "disconnect"),
        (Fail("refused"), "refused"),
        (Delay(5.0), "timeout"),
    ],
)
@pytest.mark.parametrize("position", [0, 2])
async def test_a_pull_that_goes_wrong(scene: Any, fault: Any, reason: str, position: int) -> None:
    await scene.build(pull_timeout_s=0.5)
    scene.plan.arm(*[Delay(0.0)] * position, fault)
    answer = await scene.run()
    assert scene.failures == {f'{FAILURES}{{reason="{reason}"}}': 1}
    assert answer.started[0].path == "local"


async def test_a_pull_that_hangs_keeps_its_blocks_in_quarantine(scene: Any) -> None:
    await scene.build(pull_timeout_s=0.3)
    scene.plan.arm(Hang())
    request = scene.make_request("r", PROMPT_LEN)
    answer = await scene.gateway.ask(request, scene.behind_proxy)
    assert answer.outcome == (await scene.alone.ask(request)).outcome
    assert scene.decode.engine.counts().quarantined == 4
    scene.plan.release()
    await scene.bench.settled()
    assert scene.failures == {f'{FAILURES}{{reason="timeout"}}': 1}


async def test_a_worker_stops_though_a_pull_hangs(scene: Any) -> None:
    await scene.build(pull_timeout_s=0.3)
    scene.plan.arm(Hang())
    await scene.gateway.ask(scene.make_request("r", PROMPT_LEN), scene.behind_proxy)
    scene.bench.servers.remove(scene.decode)
    async with asyncio.timeout(10):
        await scene.decode.stop()


async def test_parts_that_come_twice(scene: Any) -> None:
    scene.proxy.answers = lambda message: [message] * (2 if isinstance(message, TicketPart) else 1)
    await scene.build()
    assert (await scene.run()).started[0].path == "remote"
    assert scene.failures == {}


async def test_parts_in_reverse_order(scene: Any) -> None:
    held: list[Any] = []

    def reverse(message: Any) -> Iterable[Any]:
        if not isinstance(message, TicketPart):
            return [message]
        held.insert(0, message)
        return held if message.ticket.last else []

    scene.proxy.answers = reverse
    await scene.build()
    assert (await scene.run()).started[0].path == "remote"
    assert scene.failures == {}


async def test_a_stale_generation(scene: Any) -> None:
    def make_stale(message: Any) -> Iterable[Any]:
        if isinstance(message, TicketPart) and message.ticket.part == 1:
            first, *rest = message.ticket.blocks
            stale = msgspec.structs.replace(first, generation=first.generation - 1)
            return [TicketPart(ticket=msgspec.structs.replace(message.ticket, blocks=(stale, *rest)))]
        return [message]

    scene.proxy.answers = make_stale
    await scene.build()
    assert (await scene.run()).started[0].path == "local"
    assert scene.failures == {f'{FAILURES}{{reason="generation"}}': 1}


async def test_a_lease_that_ended(scene: Any) -> None:
    scene.proxy.questions = lambda message: [] if isinstance(message, Renew) else [message]
    await scene.build(prefill={"lease_s": 0.4}, heartbeat_s=30.0)
    scene.plan.arm(Delay(0.0), Delay(0.0), Delay(0.0), Delay(1.5))
    assert (await scene.run()).started[0].path == "local"
    assert scene.failures == {f'{FAILURES}{{reason="lease"}}': 1}


@pytest.mark.parametrize("moment", ["asked", "first part", "last part", "confirm"])
@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_prefill_worker_that_is_lost(scene: Any, moment: str, is_replaced: bool) -> None:
    def cut(message: Any) -> Iterable[Any]:
        is_part = isinstance(message, TicketPart)
        if (
            (moment == "asked" and isinstance(message, Prefill))
            or (moment == "first part" and is_part)
            or (moment == "last part" and is_part and message.ticket.last)
            or (moment == "confirm" and isinstance(message, Confirm))
        ):
            raise Cut
        return [message]

    await scene.build()
    scene.proxy.answers = scene.proxy.questions = cut
    if is_replaced:
        scene.gateway.replacements = [scene.other.address]
    answer = await scene.run()
    assert [need.failed_worker for need in answer.need_prefill] == ["p0"]
    assert answer.started[0].path == ("remote" if is_replaced else "local")
    assert answer.started[0].prefill_worker == ("p1" if is_replaced else "d0")
    assert scene.failures == {f'{FAILURES}{{reason="disconnect"}}': 1}


async def test_a_prefill_worker_that_falls_silent(scene: Any) -> None:
    await scene.build(heartbeat_s=0.1)
    scene.proxy.answers = lambda message: []
    assert (await scene.run()).started[0].path == "local"
    assert scene.failures == {f'{FAILURES}{{reason="disconnect"}}': 1}


@pytest.mark.parametrize("moment_s", [0.0, 0.002, 0.01, 0.02, 0.04, 0.08])
async def test_a_cancel_frees_both_workers(scene: Any, moment_s: float) -> None:
    await scene.build(prefill={"lease_s": 60.0})
    scene.plan.arm(*[Delay(0.02)] * 4)
    for number in range(3):
        scene.gateway.submit(scene.make_request(f"r{number}", 600, content=number, choices=2), scene.behind_proxy)
    await asyncio.sleep(moment_s)
    for number in range(3):
        scene.gateway.cancel(f"r{number}")
    await scene.bench.settled(1.0)


async def test_a_gateway_that_is_lost_frees_both_workers(scene: Any) -> None:
    await scene.build()
    answer = scene.gateway.submit(scene.make_request("r0", 600), scene.behind_proxy)
    scene.gateway.submit(scene.make_request("r1", 20, max_tokens=900))
    await scene.gateway.close()
    await scene.bench.settled(1.0)
    assert not answer.finish
