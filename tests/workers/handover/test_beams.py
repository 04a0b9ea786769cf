"""Beam search: Hugging Face's answers, and the same bits wherever, with whomever and in however small a pool it ran."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from tandem.workers.types import Request

EOS = (2, 17, 40)
SEARCHES: list[dict[str, Any]] = [
    {"beam_width": 2, "choices": 2, "max_tokens": 12},
    {"beam_width": 4, "choices": 3, "max_tokens": 20, "num_logprobs": None},
    {"beam_width": 3, "choices": 1, "max_tokens": 30, "length_penalty": 2.0},
    {"beam_width": 5, "choices": 5, "max_tokens": 18, "early_stopping": True},
    {"beam_width": 3, "choices": 3, "max_tokens": 25, "length_penalty": 0.0, "early_stopping": "never"},
    {"beam_width": 1, "choices": 1, "max_tokens": 9},
]


@pytest.fixture
def requests(make_request: Callable[..., Request]) -> list[Request]:
    lengths = [5, 31, 32, 70, 130, 17]
    return [
        make_request(f"r{index}", length, content=index, stop_token_ids=EOS, **search)
        for index, (length, search) in enumerate(zip(lengths, SEARCHES, strict=True))
    ]


async def ask(gateway: Any, prefill: Any, requests: list[Request], name: str) -> list[Any]:
    named = [msgspec.structs.replace(request, request_id=f"{name} {request.request_id}") for request in requests]
    answers = await asyncio.gather(*(gateway.ask(request, prefill) for request in named))
    return [answer.outcome for answer in answers]


async def test_every_way_gives_hugging_faces_answers(bench: Any, requests: list[Request], tiny_model: Path) -> None:
    whole = await bench.gateway(await bench.worker("aggregated", "whole", max_num_batched_tokens=512))
    expected = [(await ask(whole, None, [request], "alone"))[0] for request in requests]
    assert_as_transformers_says(tiny_model, requests, expected)
    assert await ask(whole, None, requests, "together") == expected
    prefill = await bench.worker("prefill", "p")
    decode = await bench.gateway(await bench.worker("decode", "d", block_size=16))
    for name in ("handed over", "again"):
        assert await ask(decode, prefill.address, requests, name) == expected
    await bench.settled()


def assert_as_transformers_says(model: Path, requests: list[Request], given: list[Any]) -> None:
    reference = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for request, (tokens, logprobs, finish) in zip(requests, given, strict=True):
        params = request.sampling
        expected = reference.generate(
            torch.tensor([request.prompt_token_ids]),
            attention_mask=torch.ones(1, len(request.prompt_token_ids), dtype=torch.int64),
            num_beams=params.beam_width,
            num_return_sequences=len(request.choices),
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=list(EOS),
            pad_token_id=0,
            do_sample=False,
        )
        for choice in request.choices:
            answer = tokens[choice.index]
            row = expected[choice.index, len(request.prompt_token_ids) :].tolist()
            assert answer == row[: len(answer)]
            assert set(row[len(answer) :]) <= {0, EOS[0]}  # padding
            assert finish[choice.index] == ("stop" if answer[-1] in EOS else "length")
            if params.num_logprobs is not None:
                assert len(logprobs[choice.index]) == len(answer)
                assert all(len(one.top_token_ids) == params.num_logprobs for one in logprobs[choice.index])


async def test_a_pool_that_is_too_small_for_all_makes_them_wait_for_each_other(
    bench: Any, make_request: Callable[..., Request]
) -> None:
    """Three searches of six beams where seven sequences run, beside others: none may keep another from going on."""
    searches = [
        make_request(f"s{index}", 20, content=index, beam_width=6, choices=2, max_tokens=16) for index in range(3)
    ]
    roomy = await bench.gateway(await bench.worker("aggregated", "roomy", kv_cache_memory_bytes=32 << 20))
    expected = await ask(roomy, None, searches, "roomy")
    worker = await bench.worker(
        *("aggregated", "small"), kv_cache_memory_bytes=44 << 13, max_num_seqs=7, max_model_len=512
    )
    gateway = await bench.gateway(worker)
    others = [gateway.ask(make_request(f"o{index}", 40, content=index, max_tokens=40)) for index in range(2)]
    given, *answers = await asyncio.gather(ask(gateway, None, searches, "small"), *others)
    assert given == expected
    assert all(len(answer.token_ids[0]) == 40 for answer in answers)
    assert worker.engine.scheduler.num_preemptions > 0
    await bench.settled()


async def test_a_search_that_is_cancelled_leaves_nothing(bench: Any, make_request: Callable[..., Request]) -> None:
    worker = await bench.worker("aggregated", "a")
    gateway = await bench.gateway(worker)
    gateway.submit(make_request("r", 50, beam_width=4, max_tokens=400, choices=2))
    while worker.engine.num_running < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    gateway.cancel("r")
    await bench.settled()
    assert not gateway.answers["r"].token_ids


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 65}, "beam_width"),
        ({"beam_width": 9}, "beam_width"),  # of which each would wait for one that is never run
        ({"beam_width": 2, "choices": 3}, "beam_width"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "logit_bias": ((5, 1.0),)}, "beam_width"),
        ({"beam_width": 2, "presence_penalty": 1.0}, "beam_width"),
        ({"beam_width": 2, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"beam_width": 8, "max_tokens": 900}, "max_tokens"),
        ({"beam_width": 2, "choices": 2, "max_tokens": 300, "num_logprobs": 2000}, "logprobs"),  # no frame is so large
        ({"beam_width": 8, "max_tokens": 480}, "max_tokens"),  # 32 blocks each, half of 504 in all
    ],
)
async def test_what_cannot_be_searched_is_refused(
    bench: Any, make_request: Callable[..., Request], changes: dict[str, Any], param: str
) -> None:
    worker = await bench.worker("aggregated", "a", max_num_seqs=8)
    gateway = await bench.gateway(worker)
    answer = await gateway.ask(make_request("r", 20, **changes))
    assert answer.failed is not None
    assert (answer.failed.param, answer.failed.retryable) == (param, False)
