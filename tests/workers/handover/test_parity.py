"""40 requests and every way of serving them: one worker or two, alone or crowded, cold or cached, chunk sizes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.workers.types import KVSource, Request, WorkerSpeeds

LENGTHS = [*range(1, 8), 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 80, 96, 97, 111, 112, 127, 128, 129, 150, 192]
LENGTHS += [200, 255, 256, 257, 300, 333, 400, 450, 500, 513, 640, 700]
VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"choices": 2},
    {"max_tokens": 1},
    {"top_k": 20, "min_p": 0.02, "frequency_penalty": 0.6, "num_logprobs": 5},
    {"repetition_penalty": 1.3, "stop_token_ids": tuple(range(3, 12))},
    {"num_logprobs": None, "presence_penalty": -0.5},
    {"grammar": "start: /[a-f]{3,9}(-[0-9]{2}){2,5}/", "max_tokens": 30},
    {"num_prompt_logprobs": 3, "choices": 2},
    {"beam_width": 2, "choices": 2},
    {"logit_bias": ((40, 3.0), (41, -100.0)), "min_tokens": 4, "bad_token_ids": ((44,), (60, 61))},
]
MOST_FOR_BEAMS = 280
"""Tokens: all beams together may have half of the pool, which is small in one of the tests."""


@pytest.fixture
def requests(make_request: Callable[..., Request]) -> list[Request]:
    made = []
    for index, length in enumerate(LENGTHS):
        variant = VARIANTS[index % len(VARIANTS)]
        num_tokens = min(length, MOST_FOR_BEAMS) if "beam_width" in variant else length
        made.append(make_request(f"r{index}", num_tokens, content=index, seed=index, **variant))
    return made


def told(answer: Any) -> Any:
    """What must not depend on the way."""
    return answer.outcome, answer.started[0].prompt_logprobs


async def ask_all(gateway: Any, prefill: Any, requests: list[Request], concurrency: int, round_: str) -> list[Any]:
    limit = asyncio.Semaphore(concurrency)

    async def ask(request: Request) -> Any:
        async with limit:
            named = msgspec.structs.replace(request, request_id=f"{round_} {request.request_id}")
            return await gateway.ask(named, prefill)

    order = list(range(len(requests)))
    random.Random(round_).shuffle(order)
    answers = await asyncio.gather(*(ask(requests[index]) for index in order))
    by_index = dict(zip(order, answers))
    return [told(by_index[index]) for index in range(len(requests))]


async def test_every_way_gives_the_same(bench: Any, requests: list[Request]) -> None:
    assert len(requests) == 40
    expected: list[Any] | None = None
    for chunk in (64, 512):
        for mode in ("aggregated", "disaggregated"):
            for concurrency in (1, 16):
                name = f"{mode}-{chunk}-{concurrency}"
                sizes = {"max_num_batched_tokens": chunk, "kv_cache_memory_bytes": 16 << 20}
                prefill = await bench.worker("prefill", f"p-{name}", **sizes) if mode == "disaggregated" else None
                role = "decode" if prefill else "aggregated"
                gateway = await bench.gateway(await bench.worker(role, f"d-{name}", **sizes))
                for temperature_of_cache in ("cold", "cached"):
                    outcomes = await ask_all(
                        gateway, prefill and prefill.address, requests, concurrency, f"{name}-{temperature_of_cache}"
                    )
                    expected = outcomes if expected is None else expected
                    assert outcomes == expected, name
    sizes = {"max_num_batched_tokens": 64, "kv_cache_memory_bytes": 16 << 20}
    for mode in ("aggregated", "disaggregated"):  # steps that overlap, on both workers
        workers = [await bench.worker("aggregated" if mode == "aggregated" else "decode", f"o-{mode}", **sizes)]
        if mode == "disaggregated":
            workers.append(await bench.worker("prefill", "o-prefill", **sizes))
        for worker in workers:
            worker.engine.overlaps = True
        gateway = await bench.gateway(workers[0])
        prefill = None if mode == "aggregated" else workers[1].address
        for temperature_of_cache in ("cold", "cached"):
            assert await ask_all(gateway, prefill, requests, 16, f"{mode} {temperature_of_cache}") == expected, mode
        assert all(worker.engine.step_orders["ahead"] > 5 for worker in workers), "they did not overlap"
    await bench.settled()


async def test_every_source_of_kv_gives_the_same(bench: Any, requests: list[Request], tmp_path: Path) -> None:
    """A pool for a request and a half over host memory for three and a disk for all; then a peer for everything."""
    sizes = {"max_num_batched_tokens": 64, "kv_cache_memory_bytes": 16 << 20}
    whole = await bench.worker("aggregated", "whole", **sizes)
    expected = await ask_all(await bench.gateway(whole), None, requests, 16, "cold")

    tiers = {"kv_host_memory_bytes": 1 << 20, "kv_disk_path": tmp_path, "kv_disk_bytes": 16 << 20}
    small = await bench.worker("aggregated", "small", **sizes | tiers | {"kv_cache_memory_bytes": 80 * 8192})
    small.role.filler._speeds = lambda: WorkerSpeeds(prefill_token_s=0.05)
    gateway = await bench.gateway(small)
    for round_ in ("first", "second", "third"):
        assert await ask_all(gateway, None, requests, 16, round_) == expected, round_
    await bench.settled()
    for tier in ("host", "disk"):
        assert small.metrics.counters[f'kv_tier_bytes_total{{tier="{tier}",direction="out"}}'] > 0

    for transfer in ("local", "nixl"):  # the second one as several aggregated workers are served
        source = whole
        if transfer == "nixl":
            source = await bench.worker("aggregated", "whole nixl", transfer=transfer, **sizes)
            assert await ask_all(await bench.gateway(source), None, requests, 16, "nixl") == expected
        reader = await bench.worker("aggregated", f"reader {transfer}", transfer=transfer, **sizes)
        reader.role.filler._speeds = small.role.filler._speeds
        gateway = await bench.gateway(reader)
        answers = await asyncio.gather(
            *(
                gateway.ask(r, source=KVSource(address=source.address, num_blocks=len(r.prompt_token_ids) // 16))
                for r in requests
            )
        )
        assert [told(answer) for answer in answers] == expected, transfer
        assert reader.metrics.counters['kv_fetches_total{outcome="whole"}'] > 20
        await bench.settled()

    # a peer that has it in its host memory and on its disk
    reader = await bench.worker("aggregated", "reader of tiers", **sizes)
    reader.role.filler._speeds = small.role.filler._speeds
    gateway = await bench.gateway(reader)
    small.metrics.counters.clear()
    for request in requests:
        source_of = KVSource(address=small.address, num_blocks=len(request.prompt_token_ids) // 16)
        answer = await gateway.ask(request, source=source_of)
        assert told(answer) == expected[int(request.request_id[1:])]
    for tier in ("host", "disk"):
        assert small.metrics.counters[f'kv_tier_bytes_total{{tier="{tier}",direction="out"}}'] > 0
    await bench.settled()
