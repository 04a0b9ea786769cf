"""Workers that pair with each other, at once or after a first pull that failed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.workers.errors import WorkerUnavailable
from tandem.workers.protocol import Pair
from tandem.workers.transfer.faulty import Delay, Fail, FaultPlan, FaultyTransfer


async def test_workers_that_probe_each_other_at_once(bench: Any) -> None:
    """Each one's first pull reads what the other one shows, however late."""
    plans = [FaultPlan({0: Delay(0.05)}), FaultPlan({0: Delay(0.1), 1: Delay(0.1)})]
    one, other = [
        await bench.worker(
            "aggregated", f"a{index}", wrap=lambda inner, pool, plan=plan: FaultyTransfer(inner, pool, plan)
        )
        for index, plan in enumerate(plans)
    ]
    peers = await asyncio.gather(one.role.peers.get(other.address), other.role.peers.get(one.address))
    assert [peer.address for peer in peers] == [other.address, one.address]


async def test_a_first_pull_that_failed_is_nothing_to_others(bench: Any) -> None:
    plan = FaultPlan({0: Fail("timeout")})
    unlucky = await bench.worker("prefill", "p0", wrap=lambda inner, pool: FaultyTransfer(inner, pool, plan))
    lost = await bench.worker("decode", "d0")
    decode = await bench.worker("decode", "d1")
    with pytest.raises(WorkerUnavailable, match="first pull failed"):
        await unlucky.role.peers.get(lost.address)
    assert (await decode.role.peers.get(unlucky.address)).is_alive


async def test_a_worker_that_pairs_need_not_be_waited_for(bench: Any) -> None:
    decode = await bench.worker("decode", "d0")

    async def never(address: object) -> None:
        await asyncio.Event().wait()

    decode.role.peers.get = never
    decode.role.handle(None, Pair(prefill=(decode.address,)))
    bench.servers.remove(decode)
    async with asyncio.timeout(10):
        await decode.stop()
