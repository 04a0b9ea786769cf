"""The edges of the HTTP API: what is refused and how, keys, limits, the plain endpoints."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, Model

from tandem.router.openai import chat, completions
from tandem.router.scripted_worker import Conversation
from tandem.workers.protocol import Submit

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture
async def house(open_house: Any, saying: Any) -> Any:
    return await open_house(saying("Yes, indeed."))


def assert_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param
    if code is not None:
        assert body["error"]["code"] == code
    return str(body["error"]["message"])


# Validation

WRONG_VALUES: list[tuple[str, Any]] = [
    ("temperature", "1"), ("temperature", -0.1), ("temperature", 2.1), ("temperature", True), ("top_p", 1.5),
    ("top_p", -1), ("top_k", -2), ("top_k", 1.5), ("min_p", 2), ("seed", 1.5), ("seed", 1 << 63), ("seed", "7"),
    ("max_tokens", 0), ("max_tokens", "5"), ("max_tokens", 5.0), ("stop", ["a"] * 5), ("stop", ""), ("stop", [1]),
    ("stop", {"a": 1}), ("n", 0), ("n", 129), ("n", "2"), ("presence_penalty", 3), ("frequency_penalty", -3),
    ("repetition_penalty", 0), ("stream", "true"), ("stream", 1), ("stream_options", True), ("ignore_eos", "no"),
    ("return_token_ids", 1), ("model", 5), ("stop_token_ids", [-1]), ("stop_token_ids", [1 << 40]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG_VALUES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_wrong_values_are_refused_by_name(doorstep: Any, path: str, field: str, value: Any) -> None:
    question: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
    response = await doorstep.http.post(path, json={"model": "tiny", **question, field: value})
    assert response.status_code == 400
    param = response.json()["error"]["param"]
    assert param.partition("[")[0] == field
    assert_error(response, 400, param=param)


async def test_every_field_of_the_api_is_honoured_or_refused(doorstep: Any) -> None:
    """No field that the client library can send is ignored."""
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    for module, base, path, request, unsupported in (
        (chat_create_params, "CompletionCreateParamsBase", CHAT, chat.ChatCompletionRequest, chat.UNSUPPORTED),
        (
            completion_create_params, "CompletionCreateParamsBase", COMPLETIONS, completions.CompletionRequest,
            completions.UNSUPPORTED,
        ),
    ):  # fmt: skip
        for field in getattr(module, base).__annotations__:
            assert (field in request.model_fields) != (field in unsupported), field
        question = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
        for field in unsupported:
            response = await doorstep.http.post(path, json={"model": "tiny", **question, field: {"some": "thing"}})
            assert field in assert_error(response, 400, param=field, code="unsupported_parameter")


async def test_values_that_ask_for_nothing_are_fine(house: Any) -> None:
    nothing = dict.fromkeys(chat.UNSUPPORTED) | {"store": False, "response_format": {"type": "text"}, "logit_bias": {}}
    nulls = dict.fromkeys(set(chat.ChatCompletionRequest.model_fields) - {"model", "messages"})
    response = await house.http.post(CHAT, json={"model": "tiny", "messages": MESSAGES, **nothing, **nulls})
    assert response.status_code == 200
    response = await house.http.post(CHAT, json={"model": "tiny", "messages": MESSAGES, "store": 0})
    assert_error(response, 400, param="store")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": "x", "name": "me"}, "messages[0].name"),
        ({"role": "user", "content": "x", "surprise": 1}, "messages[0].surprise"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls[0].id"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ("text", "messages[0]"),
    ],
)
async def test_wrong_messages_are_refused_by_place(doorstep: Any, message: Any, param: str) -> None:
    response = await doorstep.http.post(CHAT, json={"model": "tiny", "messages": [message]})
    assert_error(response, 400, param=param)


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (CHAT, {"model": "tiny"}, "messages", "missing_required_parameter"),
        (CHAT, {"messages": MESSAGES}, "model", "missing_required_parameter"),
        (CHAT, {"model": "tiny", "messages": []}, "messages", None),
        (CHAT, {"model": "tiny", "messages": MESSAGES, "top_logprobs": 3}, "top_logprobs", None),
        (CHAT, {"model": "tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
        (CHAT, {"model": "tiny", "messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 1},
         "max_completion_tokens", None),
        (CHAT, {"model": "tiny", "messages": MESSAGES, "stream_options": {}}, "stream_options", None),
        (CHAT, {"model": "tiny", "messages": MESSAGES, "stream": True, "stream_options": {"x": 1}},
         "stream_options.x", "unknown_parameter"),
        (CHAT, {"model": "tiny", "messages": MESSAGES, "foo": None}, "foo", "unknown_parameter"),
        (CHAT, {"model": "tiny", "messages": MESSAGES, "max_tokens": 5000}, "messages", "context_length_exceeded"),
        (COMPLETIONS, {"model": "tiny"}, "prompt", "missing_required_parameter"),
        (COMPLETIONS, {"model": "tiny", "prompt": ""}, "prompt", None),
        (COMPLETIONS, {"model": "tiny", "prompt": []}, "prompt", None),
        (COMPLETIONS, {"model": "tiny", "prompt": [[]]}, "prompt[0]", None),
        (COMPLETIONS, {"model": "tiny", "prompt": [1, "a"]}, "prompt[1]", None),
        (COMPLETIONS, {"model": "tiny", "prompt": [1, -1]}, "prompt[1]", None),
        (COMPLETIONS, {"model": "tiny", "prompt": [1, 400]}, "prompt", None),
        (COMPLETIONS, {"model": "tiny", "prompt": [1, 1 << 70]}, "prompt", None),
        (COMPLETIONS, {"model": "tiny", "prompt": ["a"] * 65, "n": 2}, "n", None),
        (COMPLETIONS, {"model": "tiny", "prompt": "a", "logprobs": 21}, "logprobs", None),
        (COMPLETIONS, {"model": "tiny", "prompt": "a", "logprobs": True}, "logprobs", None),
        (COMPLETIONS, {"model": "tiny", "prompt": [7] * 512}, "prompt", "context_length_exceeded"),
        (COMPLETIONS, {"model": "tiny", "prompt": [7] * 500, "max_tokens": 13}, "prompt", "context_length_exceeded"),
    ],
)  # fmt: skip
async def test_wrong_requests(doorstep: Any, path: str, body: Any, param: str, code: str | None) -> None:
    response = await doorstep.http.post(path, json=body)
    assert_error(response, 400, param=param, code=code)
    assert await doorstep.outcomes() == {"rejected": 1}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000,
        b'{"model":"tiny","messages":[{"role":"user","content":"Hi"}],"temperature":NaN}',
        b'{"model":"tiny","messages":[{"role":"user","content":"Hi"}],"temperature":Infinity}',
        b'{"model":"tiny","messages":[{"role":"user","content":"Hi"}],"temperature":1e999}',
        b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"tiny","messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
    ],
)  # fmt: skip
async def test_what_is_not_json(doorstep: Any, body: bytes) -> None:
    response = await doorstep.http.post(CHAT, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert await doorstep.outcomes() == {"rejected": 1}


@pytest.mark.parametrize("value", ["NaN", "-Infinity", r'"\ud800"', r'"\udfff x"'])
@pytest.mark.parametrize("path", ["temperature", "stop[1]", "logit_bias.7", "user", "chat_template_kwargs.a[0].b"])
async def test_what_is_not_json_is_found(doorstep: Any, path: str, value: str) -> None:
    field = re.split(r"[.\[]", path)[0]
    holders = {"stop[1]": ["a", "@"], "logit_bias.7": {"7": "@"}, "chat_template_kwargs.a[0].b": {"a": [{"b": "@"}]}}
    body = json.dumps({"model": "tiny", "messages": MESSAGES, field: holders.get(path, "@")}).replace('"@"', value)
    response = await doorstep.http.post(CHAT, content=body.encode())
    assert f"'{path}'" in assert_error(response, 400, param=path, code="invalid_json")


async def test_errors_raise_the_clients_own_exceptions(house: Any) -> None:
    create = house.client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as caught:
        await create(model="other", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="'audio' is not supported"):
        await create(model="tiny", messages=MESSAGES, audio={"voice": "a", "format": "wav"})


async def test_unknown_paths_and_methods(doorstep: Any) -> None:
    assert_error(await doorstep.http.get("/v1/nothing"), 404, code="not_found")
    assert_error(await doorstep.http.get(CHAT), 405, code="method_not_allowed")
    assert_error(await doorstep.http.get("/redoc"), 404)
    assert_error(await doorstep.http.get("/metrics"), 404)
    assert_error(await doorstep.http.get("/v1/models/other"), 404, param="model", code="model_not_found")


# Limits


async def test_body_too_large(open_house: Any) -> None:
    house = await open_house(max_body_bytes=1000)
    assert_error(await house.http.post(CHAT, content=b"x" * 1001), 413, code="request_too_large")

    async def unannounced() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    assert_error(await house.http.post(CHAT, content=unannounced()), 413, code="request_too_large")


async def test_body_that_never_comes(open_house: Any) -> None:
    house = await open_house(body_timeout_s=0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(house.url).port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert b"408" in await asyncio.wait_for(reader.readline(), 2)
    writer.close()
    assert await house.outcomes() == {"rejected": 1}


async def test_too_many_at_once(open_house: Any, saying: Any) -> None:
    async def hang(conversation: Conversation) -> None:
        await asyncio.sleep(60)

    house = await open_house(hang, max_in_flight=3)
    first = asyncio.create_task(house.http.post(COMPLETIONS, json={"model": "tiny", "prompt": ["a", "b"]}))
    await house.until(lambda: house.workers["decode-0"].num_running == 2)
    response = await house.http.post(COMPLETIONS, json={"model": "tiny", "prompt": "a", "n": 2})
    assert_error(response, 429, code="rate_limit_exceeded")
    assert response.headers["retry-after"] == "1"
    assert_error(await house.http.post(COMPLETIONS, json={"model": "tiny", "prompt": "a", "n": 4}), 400)
    first.cancel()
    await house.until(lambda: house.gateway.admission.num_in_flight == 0)
    assert await house.outcomes() == {"cancelled": 1, "rejected": 2}


async def test_too_many_prompt_tokens_at_once(open_house: Any) -> None:
    async def hang(conversation: Conversation) -> None:
        await asyncio.sleep(60)

    house = await open_house(hang, max_in_flight_tokens=100)
    # alone, a request may be as large as it likes
    first = asyncio.create_task(house.http.post(COMPLETIONS, json={"model": "tiny", "prompt": [7] * 150}))
    await house.until(lambda: house.workers["decode-0"].num_running == 1)
    response = await house.http.post(COMPLETIONS, json={"model": "tiny", "prompt": [7]})
    assert_error(response, 429, code="rate_limit_exceeded")
    first.cancel()
    await house.until(lambda: house.gateway.admission.num_prompt_tokens == 0)


async def test_long_prompts_do_not_hold_up_others(house: Any) -> None:
    """A body of 2 MB is parsed and tokenised elsewhere: the event loop keeps turning."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(0.005)
            longest = max(longest, loop.time() - before)

    watching = asyncio.create_task(watch())
    response = await house.http.post(COMPLETIONS, json={"model": "tiny", "prompt": "word " * 400_000})
    watching.cancel()
    assert_error(response, 400, param="prompt", code="context_length_exceeded")
    assert longest < 1.0


# Keys


async def test_keys(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes."), api_keys=("secret-a", "secret-b"))
    assert (await house.client.chat.completions.create(model="tiny", messages=MESSAGES)).choices
    async with httpx.AsyncClient(base_url=house.url) as stranger:
        for given in (None, "Bearer", "Bearer secret", "Bearer secret-a2", "Basic secret-a", "secret-a"):
            headers = {} if given is None else {"authorization": given}
            for path in (CHAT, COMPLETIONS, "/v1/models", "/nothing", "/v1/models/tiny", "//health", "/health/"):
                response = await stranger.post(path, headers=headers, json={})
                assert_error(response, 401, code="invalid_api_key")
                assert "secret" not in response.text
        for path in ("/health", "/live", "/ready"):
            assert (await stranger.get(path)).status_code == 200
        response = await stranger.get("/v1/models", headers={"authorization": "bearer secret-b"})
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("given", "is_kept"), [("my-Request_1.2", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("", False)]
)
async def test_request_id(house: Any, given: str, is_kept: bool) -> None:
    for body in ({"model": "tiny", "messages": MESSAGES}, {}):
        response = await house.http.post(CHAT, json=body, headers={"x-request-id": given})
        assert (response.headers["x-request-id"] == given) == is_kept
        assert response.headers["x-request-id"]


async def test_equal_request_ids_do_not_meet(house: Any) -> None:
    headers = {"x-request-id": "same"}
    body = {"model": "tiny", "messages": MESSAGES}
    responses = await asyncio.gather(*(house.http.post(CHAT, json=body, headers=headers) for _ in range(10)))
    assert {response.json()["choices"][0]["message"]["content"] for response in responses} == {"Yes, indeed."}


# Completions


async def test_completion(house: Any) -> None:
    answer = await house.client.completions.create(model="tiny", prompt="Well?")
    Completion.model_validate(answer.model_dump())
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
        "text_completion", "Yes, indeed.", "stop",
    )  # fmt: skip


async def test_completion_of_several_prompts(house: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("Well?", add_special_tokens=False)
    for prompts in (["Well?", "Really, now?"], [ids, [7, 8, 9]]):
        answer = await house.client.completions.create(
            model="tiny", prompt=prompts, n=2, extra_body={"return_token_ids": True}
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices] == ["Yes, indeed."] * 4
        assert answer.choices[1].prompt_token_ids == ids
        assert answer.usage.prompt_tokens == len(ids) + len(answer.choices[2].prompt_token_ids)
        assert answer.usage.completion_tokens == 4 * len(answer.choices[0].token_ids)
        stream = await house.client.completions.create(
            model="tiny", prompt=prompts, n=2, stream=True, extra_body={"return_token_ids": True}
        )
        texts, opened = [""] * 4, {}
        async for chunk in stream:
            choice = chunk.choices[0]
            texts[choice.index] += choice.text
            opened.setdefault(choice.index, (choice.model_extra or {}).get("prompt_token_ids"))
        assert texts == ["Yes, indeed."] * 4
        assert opened[0] == opened[1] == ids


async def test_completion_logprobs(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("é🙂 ok"))
    answer = await house.client.completions.create(model="tiny", prompt="Well?", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert (
        len(logprobs.tokens)
        == len(logprobs.token_logprobs)
        == len(logprobs.text_offset)
        == answer.usage.completion_tokens
    )
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert logprobs.text_offset[0] == 0
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
    pieces = [
        bytes(int(byte, 16) for byte in token.removeprefix("bytes:").split("\\x")[1:])
        if token.startswith("bytes:")
        else token.encode()
        for token in logprobs.tokens
    ]
    assert b"".join(pieces[:-1]).decode() == "é🙂 ok"


async def test_chat_logprobs(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("é🙂 ok"))
    answer = await house.client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in content[:-1]).decode() == "é🙂 ok"
    assert all(len(token.top_logprobs) == 3 for token in content)
    plain = await house.client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True)
    assert all(token.top_logprobs == [] for token in plain.choices[0].logprobs.content)


async def test_what_the_worker_is_asked(open_house: Any, saying: Any, tokenizer: Any) -> None:
    house = await open_house(saying("Yes."))
    worker = house.workers["decode-0"]

    async def ask(**fields: Any) -> Any:
        worker.received.clear()
        response = await house.http.post(COMPLETIONS, json={"model": "tiny", "prompt": [7] * 500, **fields})
        assert response.status_code == 200, response.text
        return next(message for message in worker.received if isinstance(message, Submit)).request.sampling

    plain = await ask()
    assert (plain.max_tokens, plain.temperature, plain.top_p, plain.top_k, plain.num_logprobs) == (
        12,
        1.0,
        1.0,
        0,
        None,
    )
    assert plain.stop_token_ids == (2,)
    assert plain.seed >= 0
    assert (await ask()).seed != plain.seed
    given = await ask(
        max_tokens=5, temperature=0, top_p=0, top_k=1 << 40, min_p=0.5, seed=-1, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.5, ignore_eos=True, stop_token_ids=[9], logprobs=4,
    )  # fmt: skip
    assert (given.max_tokens, given.temperature, given.top_k, given.min_p) == (5, 0.0, 400, 0.5)
    assert 0 < given.top_p < 1e-6
    assert (given.presence_penalty, given.frequency_penalty, given.repetition_penalty) == (1.0, -1.0, 1.5)
    assert (given.stop_token_ids, given.num_logprobs, given.seed) == ((9,), 4, (1 << 63) - 1)


async def test_a_gateway_with_a_seed_gives_it_to_requests_without_one(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes."), seed=7)
    for fields, expected in (({}, 7), ({"seed": 3}, 3)):
        for path, prompt in (("completions", {"prompt": "A"}), ("chat/completions", {"messages": MESSAGES})):
            house.workers["decode-0"].received.clear()
            response = await house.http.post(f"/v1/{path}", json={"model": "tiny", **prompt, **fields})
            assert response.status_code == 200, response.text
            (asked,) = (message for message in house.workers["decode-0"].received if isinstance(message, Submit))
            assert asked.request.sampling.seed == expected


async def test_chat_takes_all_the_room_by_default(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes."))
    answer = await house.client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]},
        ],
        extra_body={"return_token_ids": True},
    )
    request = next(m for m in house.workers["decode-0"].received if isinstance(m, Submit)).request
    assert request.sampling.max_tokens == 512 - len(request.prompt_token_ids)
    text = house.gateway._house.tokenizer._tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne.\nTwo.<|im_end|>")
    assert answer.prompt_token_ids == list(request.prompt_token_ids)


async def test_length_ends_an_answer(house: Any) -> None:
    answer = await house.client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=2)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 2)


async def test_half_a_character_at_the_end(open_house: Any, saying: Any, tokenizer: Any) -> None:
    text = "ab \U0001f680"  # a character of four bytes that the tokenizer knows as four tokens
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
    house = await open_house(saying(text))
    answer = await house.client.completions.create(model="tiny", prompt="x", max_tokens=num_tokens - 1)
    assert answer.choices[0].text == "ab \ufffd"


async def test_line_breaks_stay_inside_events(open_house: Any, saying: Any) -> None:
    text = "a\u2028b\u2029c\u0085d\r\ne\x0bf"
    house = await open_house(saying(text))
    request = {"model": "tiny", "messages": MESSAGES, "stream": True}
    lines = (await house.http.post(CHAT, json=request)).text.splitlines()
    contents = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in contents) == text


async def test_sync_client(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes, indeed."))

    def ask() -> tuple[str | None, str, list[str]]:
        with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
            stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].message.content, text, [model.id for model in client.models.list()]

    assert await asyncio.to_thread(ask) == ("Yes, indeed.", "Yes, indeed.", ["tiny"])


# The plain endpoints


async def test_models(house: Any) -> None:
    models = (await house.client.models.list()).data
    assert [model.id for model in models] == ["tiny"]
    Model.model_validate(models[0].model_dump())
    assert (await house.client.models.retrieve("tiny")).owned_by == "tandem"


async def test_health(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes."))
    for client in (house.http, house.admin):
        assert [(await client.get(path)).status_code for path in ("/live", "/health", "/ready")] == [200, 200, 200]
    house.workers["prefill-0"].kill()
    await house.until(lambda: house.gateway.workers.get("prefill-0") is None)
    response = await house.http.get("/ready")
    assert response.status_code == 503
    assert response.json()["reasons"] == ["no prefill worker is alive (1 wanted)"]
    assert (await house.http.get("/health")).status_code == 200  # decode workers read prompts themselves
    house.workers["decode-0"].kill()
    await house.until(lambda: house.gateway.workers.get("decode-0") is None)
    assert (await house.http.get("/health")).status_code == 503
    assert (await house.http.get("/live")).status_code == 200
    assert len((await house.http.get("/ready")).json()["reasons"]) == 2


async def test_cluster(house: Any) -> None:
    body = (await house.admin.get("/cluster")).json()
    assert set(body) == {"workers", "redis", "model", "max_model_len", "degraded", "draining"}
    assert body["redis"] == {"up": None}, "none is configured"
    decode, prefill = body["workers"]
    assert {"id", "role", "pid", "epoch", "state", "address", "blocks", "running", "waiting"} <= set(decode)
    assert (decode["id"], decode["state"], prefill["role"]) == ("decode-0", "ready", "prefill")
    assert set(decode["blocks"]) == {"total", "free", "cached", "used", "incoming", "quarantined"}
    assert decode["pairs"][0]["transport"] == "scripted"


async def test_starting_gateway_says_so(open_house: Any) -> None:
    house = await open_house(decode=0, prefill=0)
    house.gateway._house = None
    assert_error(await house.http.post(CHAT, json={}), 503)
    assert (await house.http.get("/ready")).status_code == 503
