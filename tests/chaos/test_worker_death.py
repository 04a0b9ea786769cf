"""Workers are killed and stopped while they serve: every request ends once, with the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def bodies(cluster: Any, first: int, **fields: Any) -> list[dict[str, Any]]:
    lengths = (5, 90, 130, 260, 410, 640)
    return [
        cluster.body(first + index, length, n=2 if index % 3 == 0 else 1, **fields)
        for index, length in enumerate(lengths)
    ]


def kill(cluster: Any, *worker_ids: str, number: int = signal.SIGKILL) -> dict[str, int]:
    """Signal these workers; returns their epochs."""
    state = cluster.state()
    for worker_id in worker_ids:
        os.kill(state[worker_id]["pid"], number)
    return {worker_id: state[worker_id]["epoch"] for worker_id in worker_ids}


def busy_worker(cluster: Any, role: str) -> str:
    """One that serves somebody at this moment, as far as its snapshot of a moment ago knows."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        for worker in cluster.state().values():
            if worker["role"] == role and worker["running"] > 0:
                return str(worker["id"])
        time.sleep(0.02)
    raise AssertionError(f"no {role} worker was seen at work")


async def undisturbed(cluster: Any, requests: list[dict[str, Any]]) -> list[Any]:
    return [told.outcome for told in await asyncio.gather(*(cluster.ask(body) for body in requests))]


async def disturbed(cluster: Any, requests: list[dict[str, Any]], num_events: int, disturb: Any) -> list[Any]:
    """Ask everything at once; `disturb` once `num_events` events have arrived (0: while the prompts are read)."""
    num_seen = 0

    async def on_token() -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen == num_events:
            await asyncio.to_thread(disturb)

    asking = [cluster.ask(body, on_token=on_token) for body in requests]
    if num_events == 0:
        tasks = [asyncio.create_task(request) for request in asking]
        await asyncio.sleep(0.4)
        await asyncio.to_thread(disturb)
        return list(await asyncio.gather(*tasks))
    return list(await asyncio.gather(*asking))


async def test_a_decode_worker_dies_in_mid_stream(cluster: Any) -> None:
    requests = bodies(cluster, 1000, max_tokens=240)
    expected = await undisturbed(cluster, requests)
    migrations = cluster.metric("tandem_migrations_total")
    epochs: dict[str, int] = {}

    def kill_one_that_decodes() -> None:
        time.sleep(1.5)  # until snapshots speak of these requests, not of those before
        epochs.update(kill(cluster, busy_worker(cluster, "decode")))

    told = await disturbed(cluster, requests, 50, kill_one_that_decodes)
    assert [answer.outcome for answer in told] == expected
    assert cluster.metric("tandem_migrations_total") > migrations
    await cluster.until(cluster.is_whole, 60)
    assert all(cluster.state()[worker_id]["epoch"] == epoch + 1 for worker_id, epoch in epochs.items())


async def test_a_prefill_worker_dies_while_it_reads(cluster: Any) -> None:
    # unread and long: the prefill workers are busy when one of them dies
    fresh = [cluster.body(2100 + number, 1400 + number) for number in range(8)]
    told = await disturbed(cluster, fresh, 0, lambda: kill(cluster, busy_worker(cluster, "prefill")))
    outcomes = [answer.outcome for answer in told]
    await cluster.until(cluster.is_whole, 60)
    assert await undisturbed(cluster, fresh) == outcomes


async def test_a_prefill_worker_that_hangs(cluster: Any) -> None:
    fresh = bodies(cluster, 3000)
    told = await disturbed(cluster, fresh, 0, lambda: kill(cluster, "prefill-1", number=signal.SIGSTOP))
    outcomes = [answer.outcome for answer in told]
    kill(cluster, "prefill-1", number=signal.SIGCONT)
    await cluster.until(cluster.is_whole, 30)
    assert await undisturbed(cluster, fresh) == outcomes


async def test_without_prefill_workers_decode_workers_read(cluster: Any) -> None:
    body = cluster.body(4000, 400)
    kill(cluster, "prefill-0", "prefill-1")
    alone = await cluster.ask(body)
    assert alone.headers["x-tandem-prefill-path"] == "local"
    await cluster.until(cluster.is_whole, 60)
    assert await rounds_until_remote(cluster) > 0
    assert (await cluster.ask(body)).outcome == alone.outcome


async def rounds_until_remote(cluster: Any) -> int:
    """How many rounds of long prompts it takes until a prefill worker reads one: more than one where the handovers that
    were learned in bad moments have to be forgotten first, which takes half a minute. 0: in vain."""
    for attempt in range(1, 31):
        bodies = [cluster.body(4000 + 10 * attempt + number, 1400, max_tokens=4) for number in range(3)]
        told = await asyncio.gather(*map(cluster.ask, bodies))
        if "remote" in {answer.headers["x-tandem-prefill-path"] for answer in told}:
            return attempt
        await asyncio.sleep(1.0)
    return 0


async def test_without_decode_workers_there_is_a_clean_error(cluster: Any) -> None:
    running = bodies(cluster, 5000, max_tokens=200)
    told = await disturbed(cluster, running, 40, lambda: kill(cluster, "decode-0", "decode-1"))
    for answer in told:
        if answer.status == 200:
            assert answer.error is not None, "a stream that was cut must not look complete"
            assert answer.ended == ["[DONE]"]
        else:
            assert answer.status == 503
    with pytest.raises(openai.InternalServerError):
        async with openai.AsyncOpenAI(base_url=f"{cluster.serving.url}/v1", api_key="none", max_retries=0) as client:
            await client.completions.create(model=cluster.serving.model, prompt="Hello", max_tokens=4)
    refused = await cluster.ask(cluster.body(5100, 20))
    assert refused.status == 503
    assert int(refused.headers["retry-after"]) >= 1
    await cluster.until(cluster.is_whole, 60)
    assert (await cluster.ask(cluster.body(5100, 20))).status == 200
