"""Requests with constraints, each served every way: alone or crowded, aggregated or handed over, whole or continued."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tandem.workers import masks
from tandem.workers.protocol import Failed, Prefill, TicketPart
from tandem.workers.types import Choice, Request

EOS = 2
PATTERN = r"[a-f]{3,9}(-[0-9]{2}){2,5}"
GRAMMAR = f"start: /{PATTERN}/"
OBJECT = 'start: %json {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
VARIANTS: list[dict[str, Any]] = [
    {"grammar": GRAMMAR, "max_tokens": 40},
    {"grammar": GRAMMAR, "max_tokens": 40, "temperature": 0.0, "num_logprobs": None, "choices": 3},
    {"grammar": OBJECT, "max_tokens": 30, "top_k": 5, "frequency_penalty": 0.4},
    {"logit_bias": ((40, 3.0), (41, -100.0)), "temperature": 0.0},
    {"logit_bias": ((50, 2.0),), "allowed_token_ids": tuple(range(30, 60)), "choices": 2},
    {"min_tokens": 9, "logit_bias": tuple((token_id, 12.0) for token_id in range(2, 40, 3))},
    {"bad_token_ids": ((44,), (60, 61), tuple(range(70, 75))), "allowed_token_ids": (44, 60, 61, 62)},
    {"grammar": 'start: "no" | "yes" | "yesterday"', "num_logprobs": None},
]
CHARACTERS = {index: chr(29 + index) for index in range(3, 97)}


@pytest.fixture
def requests(make_request: Callable[..., Request]) -> list[Request]:
    lengths = [5, 40, 70, 130, 17, 33, 200, 64]
    return [
        make_request(f"r{index}", length, content=index, seed=index, stop_token_ids=(EOS,), **VARIANTS[index])
        for index, length in enumerate(lengths)
    ]


async def outcomes(gateway: Any, prefill: Any, requests: list[Request], name: str) -> list[Any]:
    named = [msgspec.structs.replace(request, request_id=f"{name} {request.request_id}") for request in requests]
    answers = await asyncio.gather(*(gateway.ask(request, prefill) for request in named))
    return [answer.outcome for answer in answers]


def check_honoured(requests: list[Request], results: list[Any]) -> None:
    for request, (tokens, _, finish) in zip(requests, results):
        params = request.sampling
        for choice, ids in tokens.items():
            text = "".join(CHARACTERS.get(token_id, "") for token_id in ids)
            if params.grammar == GRAMMAR:
                assert finish[choice] == "stop"
                assert re.fullmatch(PATTERN, text), text
            if params.grammar is not None and "yes" in params.grammar:
                assert text in ("no", "yes", "yesterday")
            if params.allowed_token_ids is not None:
                assert set(ids) <= set(params.allowed_token_ids)
            if params.min_tokens:
                assert finish[choice] == "stop"
                assert len(ids) >= params.min_tokens
            if params.bad_token_ids:
                assert 44 not in ids
                assert (60, 61) not in itertools.pairwise(ids)
    assert not any(41 in ids for ids in results[3][0].values())


async def test_every_way_gives_the_same(bench: Any, requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = await bench.gateway(await bench.worker("aggregated", "whole", max_num_batched_tokens=512))
    expected = [(await outcomes(whole, None, [request], "alone"))[0] for request in requests]
    check_honoured(requests, expected)
    assert await outcomes(whole, None, requests, "together") == expected
    prefill = await bench.worker("prefill", "p")
    decode = await bench.worker("decode", "d")
    gateway = await bench.gateway(decode)
    assert await outcomes(gateway, prefill.address, requests, "handed over") == expected
    assert await outcomes(gateway, prefill.address, requests, "again") == expected
    monkeypatch.setattr(masks, "PATIENCE_S", 0.0)  # now many a mask is late
    scored = [msgspec.structs.replace(one.sampling, num_prompt_logprobs=1) for one in requests]
    late = [msgspec.structs.replace(one, sampling=sampling) for one, sampling in zip(requests, scored)]
    assert await outcomes(gateway, prefill.address, late, "late") == expected
    await bench.settled()


async def test_a_continued_answer_goes_on_as_if_nothing_had_happened(bench: Any, requests: list[Request]) -> None:
    gateway = await bench.gateway(await bench.worker("aggregated", "a"))
    single = [request for request in requests if len(request.choices) == 1]
    expected = await outcomes(gateway, None, single, "whole")
    prefill = await bench.worker("prefill", "p")
    other = await bench.gateway(await bench.worker("decode", "d"))
    for cut in (1, 4):
        continued = [
            msgspec.structs.replace(
                request, choices=(Choice(index=0, emitted_token_ids=tuple(tokens[0][: min(cut, len(tokens[0]) - 1)])),)
            )
            for request, (tokens, _, _) in zip(single, expected)
        ]
        for whose, address in ((gateway, None), (other, prefill.address)):
            results = await outcomes(whose, address, continued, f"{cut} {address is None}")
            for request, (rest, _, finish), (tokens, _, expected_finish) in zip(continued, results, expected):
                assert [*request.choices[0].emitted_token_ids, *rest[0]] == tokens[0]
                assert finish == expected_finish
    await bench.settled()


async def test_what_cannot_be_compiled_or_followed_fails_alone(
    bench: Any, make_request: Callable[..., Request]
) -> None:
    prefill = await bench.worker("prefill", "p")
    decode = await bench.worker("decode", "d")
    gateway = await bench.gateway(decode)
    fine = gateway.ask(make_request("fine", 80, max_tokens=60), prefill.address)
    bad = gateway.ask(make_request("bad", 40, grammar="start: /(/"), prefill.address)
    # "a" is the only thing that the grammar allows, and the only thing that the request does not
    stuck = gateway.ask(make_request("stuck", 40, grammar='start: "aaa"', bad_token_ids=((68,),)), prefill.address)
    later = make_request("later", 40, grammar='start: "aaa"', bad_token_ids=((68, 68),))
    answers = await asyncio.gather(fine, bad, stuck, gateway.ask(later, prefill.address))
    assert answers[0].failed is None
    assert len(answers[0].token_ids[0]) == 60
    for answer in answers[1:]:
        assert answer.failed is not None
        assert not answer.failed.retryable
    assert answers[1].failed.param == "grammar"
    for answer in answers[2:]:
        assert "constraints exclude" in answer.failed.message
        assert answer.failed.code == "invalid_request"  # a 400, for the client to mend
    assert answers[3].token_ids[0] == [68]
    await bench.settled()


async def test_a_request_may_leave_while_its_grammar_is_compiled(
    bench: Any, make_request: Callable[..., Request]
) -> None:
    prefill = await bench.worker("prefill", "p")
    decode = await bench.worker("decode", "d")
    gateway = await bench.gateway(decode)
    for index in range(4):
        text = f'start: "{"ab" * (index + 1)}"'
        gateway.submit(make_request(f"r{index}", 40, grammar=text), prefill.address if index % 2 else None)
        gateway.cancel(f"r{index}")
    answer = await gateway.ask(make_request("last", 40, grammar='start: "ab"'), prefill.address)
    assert answer.outcome[0] == {0: [68, 69]}
    assert not gateway.answers["r0"].token_ids
    await bench.settled()


@pytest.mark.parametrize("leaves_by", ["cancel", "connection"])
async def test_a_prefill_worker_forgets_what_it_was_still_compiling_for(
    bench: Any, make_request: Callable[..., Request], leaves_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = await bench.worker("prefill", "p")
    decode = await bench.worker("decode", "d")
    gateway = await bench.gateway(decode)
    asked, may_end = asyncio.Event(), asyncio.Event()
    prepare = prefill.engine.grammars.prepare

    async def prepare_slowly(text: str) -> None:
        asked.set()
        await may_end.wait()
        await prepare(text)

    monkeypatch.setattr(prefill.engine.grammars, "prepare", prepare_slowly)
    gateway.submit(make_request("r", 40, grammar='start: "ab"'), prefill.address)
    async with asyncio.timeout(10):
        await asked.wait()
    if leaves_by == "cancel":
        gateway.cancel("r")
    else:
        for connection in list(prefill._connections):
            connection.abort()
    async with asyncio.timeout(10):
        while prefill.role._preparing:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    may_end.set()
    if leaves_by == "connection":  # the decode worker reads the prompt itself
        while not gateway.answers["r"].finish:
            await gateway.answers["r"].done.wait()
    await bench.settled()
    assert prefill.engine.is_idle


class Hearer:
    """A connection, as far as a role says anything to it."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def post(self, message: Any) -> bool:
        self.heard.append(message)
        return True


async def test_a_prompt_that_is_asked_for_twice_while_its_grammar_is_compiled(
    bench: Any, make_request: Callable[..., Request]
) -> None:
    """A peer's mistake: the second one is refused, and nothing breaks here."""
    prefill = await bench.worker("prefill", "p")
    request = make_request("r", 40, grammar='start: "ab"')
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    peer = Hearer()
    question = Prefill(
        request_id=request.request_id,
        token_ids=request.prompt_token_ids,
        num_prompt_tokens=len(request.prompt_token_ids),
        sampling=request.sampling,
        choice=0,
        salt="",
    )
    prefill.role.handle(peer, question)
    prefill.role.handle(peer, question)
    async with asyncio.timeout(10):
        while not any(isinstance(heard, TicketPart) and heard.ticket.last for heard in peer.heard):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert [message.message for message in peer.heard if isinstance(message, Failed)] == ["request id 'r' is in use"]
    prefill.role.connection_lost(peer)
    await bench.settled()
    assert errors == []
