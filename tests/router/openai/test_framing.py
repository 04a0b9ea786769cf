"""How a stream begins, goes on and ends, whatever happens: as bytes, and as the client's types."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from tandem.router.scripted_worker import Conversation, answering

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


def stream_body(path: str, **fields: Any) -> dict[str, Any]:
    question: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "Hi"}
    return {"model": "tiny", "stream": True, **question, **fields}


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("text", ["", "x", "Grüße 🙂 日本語", "  \n", "the end"])
@pytest.mark.parametrize("frame_len", [1, 3])
async def test_a_stream(
    open_house: Any, saying: Any, strictly: Any, events_of: Any, path: str, text: str, frame_len: int
) -> None:
    house = await open_house(saying(text, frame_len=frame_len))
    body = stream_body(path, n=2, max_tokens=100, logprobs=True if path == CHAT else 1)
    response = await house.http.post(path, json=body | {"stream_options": {"include_usage": True}})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [data for _, data in events_of(response.text)]
    assert events.pop() == "[DONE]"
    for event in events:
        # the API says null until the end, where its client's type of completions has no such thing
        filled = [choice if path == CHAT else choice | {"finish_reason": "stop"} for choice in event["choices"]]
        strictly(ChatCompletionChunk if path == CHAT else Completion, event | {"choices": filled})
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + usage["usage"]["completion_tokens"]
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in events)
    for index in (0, 1):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(map(text_of, choices)) == text
        assert "\ufffd" not in "".join(map(text_of, choices))
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        if path == CHAT:
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert choices[-1]["delta"] == {}
            assert all("role" not in choice["delta"] for choice in choices[1:])
        scored = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        num_scored = sum(len(each["content"] if path == CHAT else each["tokens"]) for each in scored)
        assert num_scored == usage["usage"]["completion_tokens"] // 2


async def test_one_token(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("the quick"))
    for path in (CHAT, COMPLETIONS):
        body = (await house.http.post(path, json=stream_body(path, max_tokens=1, stream=False))).json()
        assert body["usage"]["completion_tokens"] == 1
        assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stop", ["k br", "wn", "🙂"])
async def test_a_stop_string_across_tokens(open_house: Any, saying: Any, events_of: Any, stop: str) -> None:
    text = "the quick brown 🙂 fox"
    house = await open_house(saying(text))
    response = await house.http.post(CHAT, json=stream_body(CHAT, stop=[stop], max_tokens=100))
    choices = [data["choices"][0] for _, data in events_of(response.text)[:-1]]
    assert "".join(map(text_of, choices)) == text.partition(stop)[0]
    assert choices[-1]["finish_reason"] == "stop"
    await house.until(lambda: house.workers["decode-0"].num_running == 0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_failure_in_midstream_is_never_a_clean_end(
    open_house: Any, tokenizer: Any, events_of: Any, path: str
) -> None:
    async def script(conversation: Conversation) -> None:
        conversation.start()
        conversation.say(conversation.chunk(0, tokenizer.encode("Once", add_special_tokens=False)))
        conversation.fail(retryable=False)

    house = await open_house(script)
    events = [data for _, data in events_of((await house.http.post(path, json=stream_body(path))).text)]
    assert events[-1] == "[DONE]"
    assert set(events[-2]) == {"error"}
    assert set(events[-2]["error"]) == {"message", "type", "param", "code"}
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-2])
    with pytest.raises(openai.APIError):
        async for _ in await house.client.chat.completions.create(model="tiny", messages=HELLO, stream=True):
            pass


async def test_the_clients_own_retries(open_house: Any, tokenizer: Any) -> None:
    """429 and 503 carry Retry-After, and the client comes again by itself."""
    ids = [*tokenizer.encode("Yes.", add_special_tokens=False), 2]
    house = await open_house(answering(lambda request, choice: ids), max_in_flight=1)
    house.gateway.admission.num_in_flight = 1
    client = house.client.with_options(max_retries=2)
    statuses: list[int] = []

    async def note(response: Any) -> None:
        statuses.append(response.status_code)
        house.gateway.admission.num_in_flight = 0

    client._client.event_hooks["response"].append(note)
    answer = await client.chat.completions.create(model="tiny", messages=HELLO)
    assert (answer.choices[0].message.content, statuses) == ("Yes.", [429, 200])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_for_a_client_of_http_1_0(open_house: Any, saying: Any, events_of: Any, path: str) -> None:
    """As many frames as tokens: most go the direct way, and none in chunks."""
    house = await open_house(saying("Grüße 🙂 from afar, and more of them"))
    body = json.dumps(stream_body(path, n=2, max_tokens=100)).encode()
    head = f"POST {path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", int(house.url.rpartition(":")[2]))
    writer.write(head.encode() + body)
    answered, _, content = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
    writer.close()
    assert b"chunked" not in answered
    events = [data for _, data in events_of(content.decode())]
    assert events.pop() == "[DONE]"
    for index in (0, 1):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(map(text_of, choices)) == "Grüße 🙂 from afar, and more of them"
    assert await house.outcomes() == {"ok": 1}
