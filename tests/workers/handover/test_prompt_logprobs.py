"""How likely the model finds a prompt: Hugging Face's numbers, and the same bits wherever and however it was read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from tandem.workers.types import Choice, Request, TokenLogprobs

LENGTHS = [1, 2, 17, 64, 65, 200]


@pytest.fixture
def requests(make_request: Callable[..., Request]) -> list[Request]:
    return [
        make_request(f"r{index}", length, content=index, choices=1 + index % 2, num_prompt_logprobs=index % 4)
        for index, length in enumerate(LENGTHS)
    ]


async def scores(gateway: Any, prefill: Any, request: Request, name: str) -> tuple[tuple[TokenLogprobs, ...], Any]:
    named = msgspec.structs.replace(request, request_id=f"{name} {request.request_id}")
    answer = await gateway.ask(named, prefill)
    (started,) = answer.started
    assert started.cached.total == 0
    return started.prompt_logprobs, answer.outcome


async def test_every_way_gives_the_same(bench: Any, requests: list[Request], tiny_model: Path) -> None:
    whole = await bench.gateway(await bench.worker("aggregated", "whole", max_num_batched_tokens=512))
    expected = [await scores(whole, None, request, "whole") for request in requests]
    assert_as_transformers_says(tiny_model, requests, [logprobs for logprobs, _ in expected])
    chunked = await bench.gateway(await bench.worker("aggregated", "chunked", max_num_batched_tokens=32))
    prefill = await bench.worker("prefill", "p")
    decode = await bench.gateway(await bench.worker("decode", "d"))
    for name in ("cold", "cached"):
        for gateway, address in ((chunked, None), (decode, prefill.address), (decode, None)):
            given = [await scores(gateway, address, request, f"{name} {address is None}") for request in requests]
            assert given == expected
    # those who do not ask are told nothing, and their answers are the same
    plain = [
        msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, num_prompt_logprobs=None))
        for request in requests
    ]
    for request, (_, outcome) in zip(plain, expected):
        answer = await decode.ask(request, prefill.address)
        assert answer.started[0].prompt_logprobs == ()
        assert answer.outcome == outcome
    await bench.settled()


def assert_as_transformers_says(model: Path, requests: list[Request], given: list[tuple[TokenLogprobs, ...]]) -> None:
    reference = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for request, logprobs in zip(requests, given, strict=True):
        tokens = torch.tensor(request.prompt_token_ids)
        with torch.no_grad():
            expected = torch.log_softmax(reference(tokens[None]).logits[0, :-1], -1)
        chosen = torch.tensor([one.logprob for one in logprobs])
        torch.testing.assert_close(chosen, expected.gather(-1, tokens[1:, None])[:, 0], rtol=0, atol=1e-4)
        num_top = request.sampling.num_prompt_logprobs
        for one, row in zip(logprobs, expected, strict=True):
            assert len(one.top_logprobs) == num_top
            torch.testing.assert_close(torch.tensor(one.top_logprobs), row.topk(num_top).values, rtol=0, atol=1e-4)


async def test_a_continued_request_is_not_told_again(bench: Any, make_request: Callable[..., Request]) -> None:
    gateway = await bench.gateway(await bench.worker("aggregated", "a"))
    request = make_request("new", 70, num_prompt_logprobs=1)
    answer = await gateway.ask(request)
    continued = msgspec.structs.replace(
        request, request_id="later", choices=(Choice(index=0, emitted_token_ids=tuple(answer.token_ids[0][:4])),)
    )
    later = await gateway.ask(continued)
    assert later.started[0].prompt_logprobs == ()
    assert later.token_ids[0] == answer.token_ids[0][4:]
    await bench.settled()


async def test_a_reading_that_is_broken_off_begins_anew(bench: Any, make_request: Callable[..., Request]) -> None:
    """Two that decode beside it grow into a pool that is too small; the youngest gives way in the middle of it."""
    kv_cache_bytes = 84 * 16 * 2 * 2 * 2 * 16 * 4  # 76 blocks, and those of the probe
    worker = await bench.worker("aggregated", "small", kv_cache_memory_bytes=kv_cache_bytes, max_num_batched_tokens=32)
    gateway = await bench.gateway(worker)
    wanted = make_request("wanted", 900, content=99, num_prompt_logprobs=2)
    expected = await scores(await bench.gateway(await bench.worker("aggregated", "roomy")), None, wanted, "alone")
    others = [gateway.submit(make_request(f"o{index}", 100, content=index, max_tokens=150)) for index in range(2)]
    assert await scores(gateway, None, wanted, "crowded") == expected
    assert worker.engine.scheduler.num_preemptions > 0
    for answer in others:
        while not answer.finish:
            await answer.done.wait()
    await bench.settled()


async def test_a_prefill_worker_that_leaves_takes_no_scores_along(
    bench: Any, make_request: Callable[..., Request]
) -> None:
    """What it had told of half a prompt is told anew by whoever reads it instead."""
    prefill = await bench.worker("prefill", "p", max_num_batched_tokens=32)
    gateway = await bench.gateway(await bench.worker("decode", "d"))
    request = make_request("r", 700, num_prompt_logprobs=1)
    expected = await scores(gateway, None, request, "here")
    answer = gateway.submit(request, prefill.address)
    while not prefill.engine.num_running:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    await prefill.stop()
    bench.servers.remove(prefill)
    while not answer.finish and answer.failed is None:
        await answer.done.wait()
    assert (answer.started[0].prompt_logprobs, answer.outcome) == expected
    await bench.settled()
