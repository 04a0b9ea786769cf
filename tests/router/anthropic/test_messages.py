"""The Messages API, read as its clients read it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.router.scripted_worker import Conversation
from tandem.workers.protocol import Submit

MESSAGES = "/v1/messages"
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
CALL = 'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def told(house: Any) -> str:
    request = next(m for m in reversed(house.workers["decode-0"].received) if isinstance(m, Submit)).request
    return str(house.gateway._house.tokenizer.text_of(request.prompt_token_ids))


@pytest.fixture
async def house(open_house: Any, saying: Any) -> Any:
    return await open_house(saying(CALL, frame_len=2), max_model_len=2048)


async def ask(house: Any, status: int = 200, **fields: Any) -> Any:
    given = {"model": "tiny", "max_tokens": 200, "messages": HELLO, **fields}
    response = await house.http.post(MESSAGES, json=given)
    assert response.status_code == status, response.text
    return response.json()


async def test_whole(house: Any) -> None:
    body = await ask(house, tools=TOOLS, system=[{"type": "text", "text": "Be kind."}])
    assert set(body) == {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    text, call = body["content"]
    assert text == {"type": "text", "text": "Sure."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"a": 1})
    assert (body["stop_reason"], body["stop_sequence"]) == ("tool_use", None)
    assert body["usage"]["output_tokens"] > 10
    assert "Be kind." in told(house)


async def test_streamed(house: Any, events_of: Any) -> None:
    given = {"model": "tiny", "max_tokens": 200, "messages": HELLO, "tools": TOOLS, "stream": True}
    events = events_of((await house.http.post(MESSAGES, json=given)).text)
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    kinds = [name for position, name in enumerate(names) if position == 0 or names[position - 1] != name]
    assert kinds == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "content_block_start",
        "content_block_delta", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    deltas = [data for name, data in events if name == "content_block_delta"]
    assert "".join(data["delta"]["text"] for data in deltas if data["index"] == 0) == "Sure."
    written = "".join(data["delta"]["partial_json"] for data in deltas if data["index"] == 1)
    assert json.loads(written) == {"a": 1}
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_results_and_words_of_one_message(house: Any) -> None:
    first = await ask(house, tools=TOOLS)
    result = {
        "type": "tool_result",
        "tool_use_id": first["content"][1]["id"],
        "content": [{"type": "text", "text": "42"}],
    }
    messages = [
        *HELLO,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    await ask(house, messages=messages, tools=TOOLS)
    assert "<tool_response>\n42\n</tool_response>" in told(house)
    assert "And now?<|im_end|>" in told(house)
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}' in told(house)


async def test_why_it_stopped(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("One two three."))
    assert (await ask(house))["stop_reason"] == "end_turn"
    assert (await ask(house, max_tokens=2))["stop_reason"] == "max_tokens"
    body = await ask(house, stop_sequences=["x", " two", "three", "4", "5", "6"])
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", " two")
    assert body["content"] == [{"type": "text", "text": "One"}]


async def test_an_answer_that_is_begun_is_gone_on_with(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("more."))
    await ask(house, messages=[*HELLO, {"role": "assistant", "content": "Well, "}])
    assert told(house).endswith("<|im_start|>assistant\nWell, ")


async def test_choices_of_tools(house: Any) -> None:
    async def grammar(**choice: Any) -> Any:
        await ask(house, tools=TOOLS, tool_choice=choice)
        return next(
            m for m in reversed(house.workers["decode-0"].received) if isinstance(m, Submit)
        ).request.sampling.grammar

    assert await grammar(type="auto") is None
    assert "call)*" in await grammar(type="any")
    assert "call)*" not in await grammar(type="any", disable_parallel_tool_use=True)
    assert '\\"f\\"' in await grammar(type="tool", name="f")
    assert await grammar(type="none") is None


async def test_count_tokens(house: Any) -> None:
    response = await house.http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": HELLO})
    await ask(house)
    request = next(m for m in house.workers["decode-0"].received if isinstance(m, Submit)).request
    assert response.json() == {"input_tokens": len(request.prompt_token_ids)}
    more = await house.http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": HELLO, "tools": TOOLS})
    assert more.json()["input_tokens"] > response.json()["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "context length"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"container": "x"}, "container"),
        ({"temperature": 1.5}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"n": 1}, "n"),
    ],
)
async def test_refusals_in_the_shape_of_this_api(doorstep: Any, fields: Any, word: str) -> None:
    given = {"model": "tiny", "max_tokens": 5, "messages": HELLO, **fields}
    response = await doorstep.http.post(MESSAGES, json=given)
    assert response.status_code == 400
    body = response.json()
    assert set(body) == {"type", "error"}
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert word in body["error"]["message"]


async def test_other_errors(open_house: Any, tokenizer: Any, events_of: Any) -> None:
    async def fail(conversation: Conversation) -> None:
        conversation.start()
        conversation.say(conversation.chunk(0, tokenizer.encode("Once", add_special_tokens=False)))
        conversation.fail(retryable=False)

    house = await open_house(fail, api_keys=("secret",))
    assert (await ask(house, 404, model="other"))["error"]["type"] == "not_found_error"
    given = {"model": "tiny", "max_tokens": 5, "messages": HELLO, "stream": True}
    del house.http.headers["authorization"]
    response = await house.http.post(MESSAGES, json=given)
    assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
    response = await house.http.post(MESSAGES, json=given, headers={"x-api-key": "secret"})
    name, data = events_of(response.text)[-1]
    assert (name, data["error"]["type"]) == ("error", "api_error")
