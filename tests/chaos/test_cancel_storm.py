"""500 requests, of which 40 % are dropped by their clients at random moments: nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import httpx
import pytest
from cluster_client import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


async def test_500_requests_of_which_40_percent_are_cancelled(cluster: Any) -> None:
    chooser = random.Random(5)
    limit = asyncio.Semaphore(48)
    names = ("started", *(f'{{outcome="{outcome}"}}' for outcome in ("ok", "failed", "cancelled", "rejected")))
    num_cancelled = 0

    async def ask(number: int) -> str:
        nonlocal num_cancelled
        length = chooser.choice((3, 20, 70, 100, 200))
        body = cluster.body(10_000 + number, length, max_tokens=chooser.randint(1, 6), n=chooser.choice((1, 1, 1, 2)))
        patience_s = chooser.expovariate(1.0) if chooser.random() < 0.4 else None
        async with limit:
            if patience_s is None:
                return "error" if (await cluster.ask(body)).error else "ok"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await cluster.ask(body)
                    return "ok"
            num_cancelled += 1
            return "cancelled"

    before = {name: cluster.count(name) for name in names}
    outcomes = await asyncio.gather(*map(ask, range(500)))
    await cluster.until(cluster.is_at_rest, 2)
    assert outcomes.count("error") == 0
    assert num_cancelled > 100
    counts = {name: cluster.count(name) - before[name] for name in names}
    assert counts["started"] == sum(count for name, count in counts.items() if name != "started")
    assert counts['{outcome="failed"}'] == counts['{outcome="rejected"}'] == 0
    assert 50 < counts['{outcome="cancelled"}'] <= num_cancelled
    probe = cluster.body(99, 100)
    assert (await cluster.ask(probe)).outcome == (await cluster.ask(probe)).outcome


@pytest.mark.parametrize("patience_s", [0.05, 0.3, 1.5])
async def test_a_client_that_leaves_frees_both_workers_within_a_second(serving: Any, patience_s: float) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        cluster = Cluster(serving, http)
        body = cluster.body(20_000 + round(100 * patience_s), 900, max_tokens=500)
        task = asyncio.create_task(cluster.ask(body))
        await asyncio.sleep(patience_s)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await cluster.until(cluster.is_at_rest, 2)  # one second, and one more for the snapshot that shows it
