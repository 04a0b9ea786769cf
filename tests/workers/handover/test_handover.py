"""The whole way from Submit to the last token, through two workers, compared with one that does everything itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tandem.workers.protocol import Pair
from tandem.workers.transfer.faulty import Fail, FaultPlan, FaultyTransfer
from tandem.workers.types import Choice, Request


@pytest.mark.parametrize("transfer", ["local", "nixl", "nccl"])
async def test_two_workers_say_what_one_says(bench: Any, make_request: Callable[..., Request], transfer: str) -> None:
    alone = await bench.worker("aggregated", "a0", transfer=transfer)
    prefill = await bench.worker("prefill", "p0", transfer=transfer)
    decode = await bench.worker("decode", "d0", transfer=transfer)
    one, two = await bench.gateway(alone), await bench.gateway(decode)
    requests = [make_request(f"r{length}", length, content=length) for length in (1, 17, 64, 65, 200, 333)]
    expected = [await one.ask(request) for request in requests]
    answers = await asyncio.gather(*(two.ask(request, prefill.address) for request in requests))
    for request, want, got in zip(requests, expected, answers):
        assert got.outcome == want.outcome
        is_remote = len(request.prompt_token_ids) > decode.config.local_prefill_tokens
        assert [started.path for started in got.started] == ["remote" if is_remote else "local"]
    repeated = [msgspec.structs.replace(request, request_id=f"again {request.request_id}") for request in requests]
    again = await asyncio.gather(*(two.ask(request, prefill.address) for request in repeated))
    assert [answer.outcome for answer in again] == [answer.outcome for answer in expected]
    assert again[-1].started[0].cached.total == 332  # of 333: decode holds them, and computes the last one
    await bench.settled()


async def test_choices_share_the_prompt_and_differ(bench: Any, make_request: Callable[..., Request]) -> None:
    alone = await bench.worker("aggregated", "a0")
    prefill, decode = await bench.worker("prefill", "p0"), await bench.worker("decode", "d0")
    one, two = await bench.gateway(alone), await bench.gateway(decode)
    request = make_request("r", 100, choices=3)
    want, got = await one.ask(request), await two.ask(request, prefill.address)
    assert got.outcome == want.outcome
    assert len({tuple(token_ids) for token_ids in got.token_ids.values()}) == 3
    await bench.settled()


@pytest.mark.parametrize("num_emitted", [1, 5, 11])
async def test_a_continued_request_goes_on_as_if_undisturbed(
    bench: Any, make_request: Callable[..., Request], num_emitted: int
) -> None:
    prefill, decode = await bench.worker("prefill", "p0"), await bench.worker("decode", "d0")
    gateway = await bench.gateway(decode)
    whole = await gateway.ask(make_request("whole", 90, presence_penalty=0.5), prefill.address)
    fresh = await bench.gateway(await bench.worker("decode", "d1"))
    request = make_request("rest", 90, presence_penalty=0.5)
    emitted = tuple(whole.token_ids[0][:num_emitted])
    rest = await fresh.ask(
        Request(
            request_id="rest",
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            choices=(Choice(index=0, emitted_token_ids=emitted),),
        ),
        prefill.address,
    )
    assert rest.token_ids[0] == whole.token_ids[0][num_emitted:]
    assert rest.logprobs[0] == whole.logprobs[0][num_emitted:]
    await bench.settled()


async def test_a_priority_counts_where_the_prompt_is_read_too(
    bench: Any, make_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await bench.worker("prefill", "p0"), await bench.worker("decode", "d0")
    gateway = await bench.gateway(decode)
    seen: list[int] = []
    for server in (decode, prefill):
        add = server.engine.scheduler.add
        monkeypatch.setattr(
            server.engine.scheduler, "add", lambda sequence, add=add: (seen.append(sequence.priority), add(sequence))
        )
    answer = await gateway.ask(msgspec.structs.replace(make_request("r", 200), priority=7), prefill.address)
    assert answer.started[0].path == "remote"
    assert seen == [7, 7]
    refused = await gateway.ask(msgspec.structs.replace(make_request("q", 200), priority=-1), prefill.address)
    assert refused.failed is not None
    assert refused.failed.param == "priority"


async def test_nobody_to_prefill(bench: Any, make_request: Callable[..., Request]) -> None:
    decode = await bench.worker("decode", "d0")
    gateway = await bench.gateway(decode)
    answer = await gateway.ask(make_request("r", 200))
    assert answer.started[0].path == "local"
    assert answer.started[0].prefill_worker == "d0"


async def test_long_answers_of_several_choices_are_continued(bench: Any, make_request: Callable[..., Request]) -> None:
    """Two choices with much to fetch beyond their common prompt: two handovers of one request at the same time."""
    prefill, decode = await bench.worker("prefill", "p0"), await bench.worker("decode", "d0")
    gateway = await bench.gateway(decode)
    request = make_request("whole", 50, choices=2, max_tokens=100)
    whole = await gateway.ask(request, prefill.address)
    fresh = await bench.gateway(await bench.worker("decode", "d1"))
    emitted = {index: tuple(whole.token_ids[index][: 80 + index]) for index in (0, 1)}
    choices = tuple(Choice(index=index, emitted_token_ids=token_ids) for index, token_ids in emitted.items())
    rest = await fresh.ask(msgspec.structs.replace(request, request_id="rest", choices=choices), prefill.address)
    for index in (0, 1):
        assert rest.token_ids[index] == whole.token_ids[index][80 + index :]
        assert rest.logprobs[index] == whole.logprobs[index][80 + index :]
    await bench.settled()


async def test_a_deadline_ends_a_request_on_both_workers(bench: Any, make_request: Callable[..., Request]) -> None:
    prefill, decode = await bench.worker("prefill", "p0"), await bench.worker("decode", "d0")
    gateway = await bench.gateway(decode)
    answer = await gateway.ask(make_request("r", 300, max_tokens=700), prefill.address, timeout_s=0.2)
    assert answer.failed is not None
    assert (answer.failed.code, answer.failed.retryable) == ("timeout", False)
    await bench.settled()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype differs: ours 'float32', theirs 'bfloat16'"),
        ({"block_size": 32}, "block_size differs: ours 16, theirs 32"),
        ({"max_model_len": 512}, "max_model_len differs: ours 1024, theirs 512"),
        ({"transfer": "nccl"}, "transfer differs: ours 'local', theirs 'nccl'"),
    ],
)
async def test_workers_that_differ_do_not_pair(
    bench: Any, make_request: Callable[..., Request], changes: dict[str, Any], message: str
) -> None:
    prefill, decode = await bench.worker("prefill", "p0", **changes), await bench.worker("decode", "d0")
    gateway = await bench.gateway(decode)
    gateway.connection.send(Pair(prefill=(prefill.address,)))
    paired = await asyncio.wait_for(gateway.paired.get(), 10)
    assert (paired.prefill_worker, paired.error) == ("p0", message)
    answer = await gateway.ask(make_request("r", 200), prefill.address)
    assert answer.started[0].path == "local"


async def test_a_first_pull_that_fails_is_tried_again(bench: Any) -> None:
    plan = FaultPlan({0: Fail("error")})
    prefill = await bench.worker("prefill", "p0")
    decode = await bench.worker("decode", "d0", wrap=lambda inner, pool: FaultyTransfer(inner, pool, plan))
    gateway = await bench.gateway(decode)
    gateway.connection.send(Pair(prefill=(prefill.address,)))
    paired = await asyncio.wait_for(gateway.paired.get(), 10)
    assert paired.error is None
    assert (paired.gigabytes_per_s or 0) > 0
    assert plan.injected == {"Fail": 1}


async def test_a_bug_in_the_accounting_is_not_survived(bench: Any, make_request: Callable[..., Request]) -> None:
    worker = await bench.worker("aggregated", "a0")
    gateway = await bench.gateway(worker)

    def broken(*_: Any, **__: Any) -> Any:
        raise AssertionError("a bug")

    worker.engine.scheduler.schedule = broken
    gateway.submit(make_request("r", 20))
    with pytest.raises(AssertionError, match="a bug"):
        await asyncio.wait_for(worker.run_until_failure(), 10)
