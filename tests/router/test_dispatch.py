"""The life of a request when workers die, refuse, or lose their partners, and when clients leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tandem.router import workers
from tandem.router.scripted_worker import Conversation, ScriptedWorker, answering
from tandem.workers.block_key import block_keys, root_key
from tandem.workers.protocol import Cancel, FinishChoice, Pair, Submit, UsePrefill
from tandem.workers.types import CachedTokens

from_user = [{"role": "user", "content": "Tell me a long story about foxes and dogs."}]
TEXT = "Once upon a time there was a quick brown fox; 🙂 it jumped."


def submits(worker: ScriptedWorker) -> list[Submit]:
    return [message for message in worker.received if isinstance(message, Submit)]


async def chat(house: Any, **fields: Any) -> Any:
    return await house.client.chat.completions.create(model="tiny", messages=from_user, **fields)


async def streamed_text(house: Any, **fields: Any) -> str:
    stream = await chat(house, stream=True, **fields)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


@pytest.mark.parametrize("die_after", [1, 3, 6])
@pytest.mark.parametrize("frame_len", [1, 3])
async def test_decode_worker_dies_and_another_goes_on(
    open_house: Any, saying: Any, die_after: int, frame_len: int
) -> None:
    house = await open_house(saying(TEXT, frame_len=frame_len, die_after=die_after), decode=2)
    answer = await chat(house, extra_body={"return_token_ids": True}, logprobs=True)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(answer.choices[0].token_ids) == len(answer.choices[0].logprobs.content)
    first, second = sorted((w for w in house.workers.values() if submits(w)), key=lambda w: len(w.received))
    emitted = max(len(submits(w)[0].request.choices[0].emitted_token_ids) for w in (first, second))
    assert emitted == frame_len * die_after  # all that was said was taken, and is not said again
    assert house.gateway.metrics.registry.get_sample_value("tandem_migrations_total", {"reason": "decode_lost"}) == 1
    assert house.gateway.metrics.registry.get_sample_value("tandem_prompt_tokens_total") == answer.usage.prompt_tokens
    assert await house.outcomes() == {"ok": 1}


@pytest.mark.parametrize("has_started", [False, True])
async def test_what_a_lost_attempt_computed_is_not_called_cached(
    open_house: Any, saying: Any, has_started: bool
) -> None:
    """A prompt that nobody held is a cold one, though the second worker finds what the first had it computed for."""
    killed: list[str] = []

    async def die_once(conversation: Conversation) -> None:
        if not killed:
            killed.append(conversation.worker.worker_id)
            if has_started:
                conversation.start()
                await asyncio.sleep(0.05)
            conversation.worker.kill()
            return
        conversation.start(cached=CachedTokens(pool=4, peer=2))
        conversation.start = lambda **_: None  # type: ignore[method-assign]
        await saying(TEXT)(conversation)

    house = await open_house(die_once, decode=2)
    answer = await chat(house)
    assert answer.choices[0].message.content == TEXT
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    for source in ("prefill", "decode", "peer"):
        value = house.gateway.metrics.registry.get_sample_value("tandem_cached_tokens_total", {"source": source})
        assert not value, source


async def test_stream_goes_on_without_a_seam(open_house: Any, saying: Any) -> None:
    house = await open_house(saying([TEXT, "Two.", TEXT[::-1]], die_after=9), decode=2)
    stream = await chat(house, stream=True, n=3)
    texts = ["", "", ""]
    finished = []
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        if chunk.choices[0].finish_reason:
            finished.append(chunk.choices[0].index)
    assert texts == [TEXT, "Two.", TEXT[::-1]]
    assert sorted(finished) == [0, 1, 2]
    continued = [s for w in house.workers.values() for s in submits(w) if s.request.choices[0].emitted_token_ids]
    assert [choice.index for choice in continued[0].request.choices] == [0, 2]  # the finished one is not asked again


async def test_nobody_left_before_the_first_token(open_house: Any) -> None:
    async def die(conversation: Conversation) -> None:
        conversation.worker.kill()

    house = await open_house(die)
    with pytest.raises(openai.InternalServerError) as caught:
        await chat(house)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"
    assert "x-request-id" in caught.value.response.headers
    assert await house.outcomes() == {"failed": 1}


async def test_nobody_left_in_the_middle(open_house: Any, saying: Any) -> None:
    house = await open_house(saying(TEXT, die_after=3))
    request = {"model": "tiny", "messages": from_user, "stream": True}
    response = await house.http.post("/v1/chat/completions", json=request)
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert response.status_code == 200
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "service_unavailable"
    assert events.count("[DONE]") == 1
    with pytest.raises(openai.APIError):
        await streamed_text(house)
    assert await house.outcomes() == {"failed": 2}


async def test_migrations_are_bounded(open_house: Any) -> None:
    async def refuse(conversation: Conversation) -> None:
        conversation.fail(retryable=True)

    house = await open_house(refuse, decode=5, max_migrations=2)
    with pytest.raises(openai.InternalServerError):
        await chat(house)
    assert sum(len(submits(worker)) for worker in house.workers.values()) == 3


async def test_each_attempt_has_a_name_of_its_own(open_house: Any) -> None:
    async def refuse(conversation: Conversation) -> None:
        conversation.fail(retryable=True)

    house = await open_house(refuse, decode=3)
    with pytest.raises(openai.InternalServerError):
        await chat(house)
    names = [submit.request.request_id for worker in house.workers.values() for submit in submits(worker)]
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    ("code", "status", "text"), [("internal_error", 500, None), ("context_length_exceeded", 400, "scripted failure")]
)
async def test_final_failure(open_house: Any, code: str, status: int, text: str | None) -> None:
    async def fail(conversation: Conversation) -> None:
        conversation.fail(retryable=False, code=code)

    house = await open_house(fail, decode=2)
    with pytest.raises(openai.APIStatusError) as caught:
        await chat(house)
    assert caught.value.status_code == status
    assert ("scripted failure" in caught.value.message) == (text is not None)  # internals stay inside
    assert sum(len(submits(worker)) for worker in house.workers.values()) == 1
    assert await house.outcomes() == {"failed" if status == 500 else "rejected": 1}


async def test_lost_prefill_worker_is_replaced(open_house: Any, saying: Any) -> None:
    given = []

    async def ask_twice(conversation: Conversation) -> None:
        for _ in range(2):
            given.append(await conversation.ask_for_prefill())
            conversation.submit = Submit(request=conversation.request, prefill=given[-1])
        await saying(TEXT)(conversation)

    house = await open_house(ask_twice, prefill=2)
    assert (await chat(house)).choices[0].message.content == TEXT
    first = submits(house.workers["decode-0"])[0].prefill
    assert first is not None
    assert given[0] is not None
    assert {first.worker_id, given[0].worker_id} == {"prefill-0", "prefill-1"}
    assert given[1] is None
    assert house.gateway.metrics.registry.get_sample_value("tandem_migrations_total", {"reason": "prefill_lost"}) == 2


async def test_short_prompts_and_no_prefill_worker_are_local(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes."), local_prefill_tokens=1000)
    raw = await house.client.chat.completions.with_raw_response.create(model="tiny", messages=from_user)
    assert raw.headers["x-tandem-prefill-path"] == "local"
    assert submits(house.workers["decode-0"])[0].prefill is None

    lonely = await open_house(saying("Yes."), prefill=0)
    raw = await lonely.client.chat.completions.with_raw_response.create(model="tiny", messages=from_user)
    assert raw.headers["x-tandem-prefill-path"] == "local"
    value = lonely.gateway.metrics.registry.get_sample_value
    assert value("tandem_prefills_total", {"path": "local"}) == 1


# Leaving


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["before the start", "after the start", "in the middle"])
async def test_client_leaves(open_house: Any, saying: Any, stream: bool, phase: str) -> None:
    async def script(conversation: Conversation) -> None:
        if phase != "before the start":
            conversation.start()
        if phase == "in the middle":
            conversation.say(conversation.chunk(0, [40]))
        await asyncio.sleep(60)

    house = await open_house(script)
    worker = house.workers["decode-0"]
    request = asyncio.create_task(
        house.http.post("/v1/chat/completions", json={"model": "tiny", "messages": from_user, "stream": stream})
    )
    await house.until(lambda: worker.num_running == 1)
    await asyncio.sleep(0.02)
    request.cancel()
    await house.until(lambda: worker.num_running == 0, timeout_s=1)
    assert [type(message) for message in worker.received if isinstance(message, Cancel)] == [Cancel]
    assert await house.outcomes() == {"cancelled": 1}
    link = house.gateway.workers.get("decode-0")
    assert link.account.num_sequences == 0
    assert house.gateway.workers.get("prefill-0").account.num_prefill_tokens == 0


async def test_deadline(open_house: Any) -> None:
    async def hang(conversation: Conversation) -> None:
        await asyncio.sleep(60)

    house = await open_house(hang, request_timeout_s=0.3)
    with pytest.raises(openai.InternalServerError) as caught:
        await chat(house)
    assert caught.value.status_code == 504
    await house.until(lambda: house.workers["decode-0"].num_running == 0)
    assert 0 < submits(house.workers["decode-0"])[0].timeout_s <= 0.3
    assert await house.outcomes() == {"failed": 1}


async def test_stop_lets_requests_finish(open_house: Any, saying: Any) -> None:
    house = await open_house(saying(TEXT, delay_s=0.01))
    request = asyncio.create_task(streamed_text(house))
    await house.until(lambda: house.workers["decode-0"].num_running == 1)
    stopping = asyncio.create_task(house.gateway.stop(drain_s=5))
    await asyncio.sleep(0.02)
    with pytest.raises(openai.InternalServerError) as caught:
        await chat(house)
    assert caught.value.status_code == 503
    assert await request == TEXT
    await stopping
    assert await house.outcomes() == {"ok": 1, "rejected": 1}


async def test_stop_ends_what_does_not_finish(open_house: Any, saying: Any) -> None:
    house = await open_house(saying(TEXT * 20, delay_s=0.05))
    request = asyncio.create_task(
        house.http.post("/v1/chat/completions", json={"model": "tiny", "messages": from_user, "stream": True})
    )
    await house.until(lambda: house.workers["decode-0"].num_running == 1)
    await asyncio.sleep(0.15)
    await house.gateway.stop(drain_s=0.1)
    text = (await request).text
    assert text.endswith("data: [DONE]\n\n")
    assert '"code":"draining"' in text
    assert await house.outcomes() == {"failed": 1}


async def test_while_the_cluster_drains_what_runs_may_end_and_nothing_is_begun(open_house: Any, saying: Any) -> None:
    house = await open_house(saying(TEXT, delay_s=0.01))
    is_draining = False
    house.gateway.watch_control_plane(list, lambda: is_draining)
    request = asyncio.create_task(streamed_text(house))
    await house.until(lambda: house.workers["decode-0"].num_running == 1)
    is_draining = True
    with pytest.raises(openai.InternalServerError) as caught:
        await chat(house)
    assert (caught.value.status_code, caught.value.code) == (503, "draining")
    assert (await house.http.get("/ready")).status_code == 503
    assert (await house.admin.get("/cluster")).json()["draining"] is True
    assert await request == TEXT
    is_draining = False  # the next launcher is there
    assert (await house.http.get("/ready")).status_code == 200
    await chat(house)
    assert await house.outcomes() == {"ok": 2, "rejected": 1}


# Stop strings


async def test_stop_string_of_a_single_choice_cancels(open_house: Any, saying: Any) -> None:
    house = await open_house(saying(TEXT, delay_s=0.002))
    answer = await chat(house, stop=["brown", "never"])
    assert answer.choices[0].message.content == "Once upon a time there was a quick "
    assert answer.choices[0].finish_reason == "stop"
    worker = house.workers["decode-0"]
    await house.until(lambda: worker.num_running == 0)
    assert any(isinstance(message, Cancel) for message in worker.received)


async def test_stop_string_of_one_choice_leaves_the_others(open_house: Any, saying: Any) -> None:
    house = await open_house(saying([TEXT, "no such word in this one, however long it may be", TEXT], delay_s=0.002))
    answer = await chat(house, stop="brown", n=3)
    assert [choice.message.content for choice in answer.choices] == [
        "Once upon a time there was a quick ",
        "no such word in this one, however long it may be",
        "Once upon a time there was a quick ",
    ]
    received = house.workers["decode-0"].received
    assert sorted(m.choice for m in received if isinstance(m, FinishChoice)) == [0, 2]
    assert not any(isinstance(message, Cancel) for message in received)


@pytest.mark.parametrize("stop", [None, "time there", ["fox; 🙂", "zzz"], ["jumped."]])
async def test_frames_do_not_matter(open_house: Any, saying: Any, stop: Any) -> None:
    answers = []
    for frame_len in (1, 2, 5, 1000):
        house = await open_house(saying(TEXT, frame_len=frame_len))
        fields = {
            "stop": stop,
            "seed": 1,
            "logprobs": True,
            "top_logprobs": 2,
            "extra_body": {"return_token_ids": True},
        }
        whole = await chat(house, **fields)
        answers.append((whole.choices[0].model_dump(), whole.usage.model_dump()))
        stream = await chat(house, stream=True, stream_options={"include_usage": True}, **fields)
        text, content, token_ids, usage, finish = "", [], [], None, None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                content += choice.logprobs.model_dump()["content"] if choice.logprobs else []
                token_ids += choice.token_ids if hasattr(choice, "token_ids") else []
                finish = choice.finish_reason or finish
        choice = answers[-1][0]
        assert (text, finish) == (choice["message"]["content"], choice["finish_reason"])
        assert (content, token_ids) == (choice["logprobs"]["content"], choice["token_ids"])
        assert usage is not None
        assert usage.model_dump() == answers[-1][1]
    assert all(answer == answers[0] for answer in answers)


# What is remembered


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(20, 44), (40, 57), (64, 32)])
async def test_an_answer_is_noted_as_far_as_its_worker_holds_it(
    open_house: Any, saying: Any, prompt_len: int, max_tokens: int
) -> None:
    """The KV of its last token is nowhere. A prompt without a whole block has an answer, too."""
    house = await open_house(saying("Yes, of course. " * 20), redis_url="redis://127.0.0.1:1/0")
    noted: list[Any] = []
    house.gateway.index.note_routed = lambda keys, holders: noted.append((list(keys), list(holders)))
    prompt = list(range(7, 7 + prompt_len))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True}
    choice = (await house.http.post("/v1/completions", json=body)).json()["choices"][0]
    tokens = [*prompt, *choice["token_ids"]]
    assert len(tokens) == prompt_len + max_tokens
    key = b"cluster key of the tests"
    keys = block_keys(key, root_key(key, house.gateway.workers.identity(), ""), tokens[:-1], 32)
    assert noted[-1] == (keys, [("decode-0", 0)])


# Pairing and heartbeats


async def test_workers_are_paired_as_they_come(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes."), decode=1, prefill=1)
    await house.add(ScriptedWorker("prefill-9", "prefill", key=b"cluster key of the tests"))
    await house.add(ScriptedWorker("decode-9", "decode", saying("Yes."), key=b"cluster key of the tests"))
    old, new = house.workers["decode-0"], house.workers["decode-9"]
    await house.until(lambda: len(house.gateway.workers.get("decode-9").pairs) == 2)
    pairs = {
        worker.worker_id: [
            address.worker_id for message in worker.received if isinstance(message, Pair) for address in message.prefill
        ]
        for worker in (old, new)
    }
    assert pairs == {"decode-0": ["prefill-0", "prefill-9"], "decode-9": ["prefill-0", "prefill-9"]}


async def test_every_worker_is_told_whence_it_may_fetch(
    open_house: Any, saying: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a prefill worker from a decode worker, that has the answers. In a large house all do not know all."""
    monkeypatch.setattr(workers, "MAX_ACQUAINTED", 2)
    house = await open_house(saying("Yes."), decode=2, prefill=1)
    everybody = dict(house.workers)

    def told() -> dict[str, set[str]]:
        pairs = {
            name: [said for said in worker.received if isinstance(said, Pair)] for name, worker in everybody.items()
        }
        return {name: {address.worker_id for pair in pairs[name] for address in pair.sources} for name in everybody}

    expected = {name: everybody.keys() - {name} for name in everybody}
    await house.until(lambda: told() == expected)
    await house.add(ScriptedWorker("prefill-9", "prefill", key=b"cluster key of the tests"))
    await house.until(lambda: "prefill-9" in house.gateway.workers.get("decode-0").pairs)
    assert told() == expected


async def test_refused_pair_is_shown_and_not_used(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes."), decode=0, prefill=1, num_decode=1)
    worker = ScriptedWorker(
        "decode-0",
        "decode",
        saying("Yes."),
        key=b"cluster key of the tests",
        pairing_error="dtype differs: ours a, theirs b",
    )
    await house.add(worker)
    await house.until(lambda: bool(house.gateway.workers.get("decode-0").pairs))
    raw = await house.client.chat.completions.with_raw_response.create(model="tiny", messages=from_user)
    assert raw.headers["x-tandem-prefill-path"] == "local"
    ready = await house.http.get("/ready")
    assert ready.status_code == 503
    assert "dtype differs" in ready.json()["reasons"][0]


async def test_silent_worker_is_given_up(open_house: Any, saying: Any) -> None:
    async def hang(conversation: Conversation) -> None:
        conversation.worker.is_silent = True
        await asyncio.sleep(60)

    house = await open_house(hang, decode=1)
    await house.add(ScriptedWorker("decode-1", "decode", saying(TEXT), key=b"cluster key of the tests"))
    house.gateway.workers.get("decode-1").num_routed = 100  # let the other one be tried first
    assert (await chat(house)).choices[0].message.content == TEXT
    house.workers["decode-0"].is_silent = False
    await house.until(lambda: house.gateway.workers.get("decode-0") is not None)  # still listed: it is tried again


async def test_restarted_worker_is_used_again(open_house: Any, saying: Any) -> None:
    house = await open_house(saying(TEXT))
    house.workers["decode-0"].kill()
    await house.until(lambda: house.gateway.workers.get("decode-0") is None)
    assert (await house.http.get("/health")).status_code == 503
    reborn = ScriptedWorker("decode-0", "decode", saying(TEXT), epoch=1, key=b"cluster key of the tests")
    await house.add(reborn)
    assert (await chat(house)).choices[0].message.content == TEXT
    house.gateway.workers.remove("decode-0", 0)  # late news of the first incarnation
    assert house.gateway.workers.get("decode-0") is not None
    house.gateway.workers.remove("decode-0", 1)
    assert house.gateway.workers.get("decode-0") is None


async def test_worker_with_another_key_is_not_used(open_house: Any, saying: Any) -> None:
    house = await open_house(decode=0, prefill=0)
    stranger = ScriptedWorker("decode-0", "decode", saying(TEXT), key=b"another key")
    house.gateway.workers.add(await stranger.start())
    await asyncio.sleep(0.2)
    assert house.gateway.workers.ready() == []
    await stranger.stop()


async def test_use_prefill_for_unknown_request_is_harmless(open_house: Any, saying: Any) -> None:
    house = await open_house(saying(TEXT))
    link = house.gateway.workers.get("decode-0")
    link.send(UsePrefill(request_id="nobody", prefill=None))
    link.send(Cancel(request_id="nobody"))
    assert (await chat(house)).choices[0].message.content == TEXT


async def test_load_is_spread(open_house: Any, saying: Any) -> None:
    house = await open_house(saying(TEXT, delay_s=0.002), decode=3, prefill=2)
    await asyncio.gather(*(chat(house) for _ in range(30)))
    assert [len(submits(house.workers[f"decode-{number}"])) for number in range(3)] == [10, 10, 10]
    assert await house.outcomes() == {"ok": 30}


async def test_tokens_of_many_requests_in_one_frame(open_house: Any, tokenizer: Any) -> None:
    """A worker sends one frame per step for all its sequences: each request gets its own."""
    words = [f"word {number}" for number in range(8)]

    def tokens_for(request: Any, choice: int) -> list[int]:
        number = request.sampling.seed
        return [*tokenizer.encode(words[number], add_special_tokens=False), 2]

    house = await open_house(answering(tokens_for))
    answers = await asyncio.gather(*(chat(house, seed=number) for number in range(8)))
    assert [answer.choices[0].message.content for answer in answers] == words


async def test_bug_while_reading_does_not_lose_the_worker(open_house: Any, saying: Any, monkeypatch: Any) -> None:
    house = await open_house(saying(TEXT))
    calls = []

    def stumble(snapshot: Any) -> None:
        calls.append(snapshot)
        if len(calls) == 1:
            raise ZeroDivisionError

    monkeypatch.setattr(house.gateway.workers, "on_snapshot", stumble)
    monkeypatch.setattr("tandem.router.workers.LAST_RETRY_S", 0.05)
    await house.until(lambda: bool(calls) and len(house.gateway.workers.ready()) < 2)
    await house.until(lambda: len(house.gateway.workers.ready()) == 2)
    assert (await chat(house)).choices[0].message.content == TEXT
