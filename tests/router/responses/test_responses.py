"""The Responses API with the client's own types: whole, streamed, stored, cancelled."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, get_args

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tandem.router.openai.messages import Message
from tandem.router.responses.sealed import Record
from tandem.router.responses.store import ResponseStore
from tandem.router.scripted_worker import Conversation
from tandem.workers.protocol import Submit

RESPONSES = "/v1/responses"
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "f",
        "description": None,
        "strict": False,
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
]
CALL = 'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


EVENTS: dict[str, Any] = {
    event.model_fields["type"].annotation.__args__[0]: event for event in get_args(get_args(ResponseStreamEvent)[0])
}


def told(house: Any) -> str:
    request = next(m for m in reversed(house.workers["decode-0"].received) if isinstance(m, Submit)).request
    return str(house.gateway._house.tokenizer.text_of(request.prompt_token_ids))


@pytest.fixture
async def house(open_house: Any, saying: Any) -> Any:
    return await open_house(saying("Grüße 🙂 from afar"), max_model_len=2048)


@pytest.fixture
async def calling(open_house: Any, saying: Any) -> Any:
    return await open_house(saying(CALL, frame_len=2), max_model_len=2048)


async def test_whole(house: Any, strictly: Any) -> None:
    body = (await house.http.post(RESPONSES, json={"model": "tiny", "input": "Hi", "instructions": "Be kind."})).json()
    response = strictly(Response, body)
    assert response.output_text == "Grüße 🙂 from afar"
    assert (response.status, response.instructions) == ("completed", "Be kind.")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert "<|im_start|>system\nBe kind.<|im_end|>" in told(house)


async def test_streamed_events_tell_the_same(calling: Any, strictly: Any, events_of: Any) -> None:
    given = {"model": "tiny", "input": "Hi", "tools": TOOLS, "stream": True}
    events = events_of((await calling.http.post(RESPONSES, json=given)).text)
    for number, (name, data) in enumerate(events):
        assert (name, data["sequence_number"]) == (data["type"], number)
        strictly(EVENTS[name], data)
    names = [name for name, _ in events]
    assert names[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert names[-1] == "response.completed"
    final = Response.model_validate(events[-1][1]["response"])
    deltas = [data["delta"] for name, data in events if name == "response.function_call_arguments.delta"]
    assert "".join(deltas) == final.output[1].arguments
    assert json.loads(final.output[1].arguments) == {"a": 1}
    assert "".join(data["delta"] for name, data in events if name == "response.output_text.delta") == "Sure."
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert done == events[-1][1]["response"]["output"]
    stream = await calling.client.responses.create(model="tiny", input="Hi", tools=TOOLS, stream=True)
    assert [event.type async for event in stream] == names


async def test_a_conversation_with_tools(calling: Any) -> None:
    client = calling.client
    first = await client.responses.create(model="tiny", input="Hi", tools=TOOLS, instructions="Be kind.")
    call = first.output[1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    await client.responses.create(model="tiny", input=[output], previous_response_id=first.id, tools=TOOLS)
    with_id = told(calling)
    assert "Be kind." not in with_id
    history = [{"role": "user", "content": "Hi"}, *first.output, output]
    await client.responses.create(model="tiny", input=history, tools=TOOLS, store=False)
    assert told(calling) == with_id
    assert with_id.count("<|im_start|>") == 5
    assert "<tool_response>\n42\n</tool_response>" in with_id


async def test_stored_and_forgotten(house: Any) -> None:
    client = house.client
    kept = await client.responses.create(model="tiny", input="Hi")
    assert (await client.responses.retrieve(kept.id)).output_text == kept.output_text
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(kept.id)
    await client.responses.delete(kept.id)
    gone = await client.responses.create(model="tiny", input="Hi", store=False)
    for name in (kept.id, gone.id, "resp_other"):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError) as refusal:
            await client.responses.create(model="tiny", input="Hi", previous_response_id=name)
        assert refusal.value.param == "previous_response_id"


async def test_each_key_has_its_own(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes."), api_keys=("a", "b"))
    mine = await house.client.responses.create(model="tiny", input="Hi")
    theirs = house.client.with_options(api_key="b")
    for attempt in (theirs.responses.retrieve, theirs.responses.delete, theirs.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            await attempt(mine.id)
    assert (await house.client.responses.retrieve(mine.id)).id == mine.id


async def test_cancel(open_house: Any, tokenizer: Any, events_of: Any) -> None:
    async def hang(conversation: Conversation) -> None:
        conversation.start()
        conversation.say(conversation.chunk(0, tokenizer.encode("Once", add_special_tokens=False)))
        await asyncio.sleep(60)

    house = await open_house(hang)
    stream = await house.client.responses.create(model="tiny", input="Hi", stream=True)
    events = []
    async for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta":
            name = events[0].response.id
            assert (await house.client.responses.retrieve(name)).status == "in_progress"
            assert (await house.client.responses.cancel(name)).status == "cancelled"
    assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "cancelled")
    assert (await house.client.responses.retrieve(name)).status == "cancelled"
    assert await house.outcomes() == {"cancelled": 1}
    await house.until(lambda: house.workers["decode-0"].num_running == 0)


async def test_an_answer_cut_short_is_incomplete(house: Any, strictly: Any) -> None:
    body = (await house.http.post(RESPONSES, json={"model": "tiny", "input": "Hi", "max_output_tokens": 3})).json()
    response = strictly(Response, body)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"


async def test_a_failure_in_midstream(open_house: Any, tokenizer: Any, events_of: Any, strictly: Any) -> None:
    async def fail(conversation: Conversation) -> None:
        conversation.start()
        conversation.say(conversation.chunk(0, tokenizer.encode("Once", add_special_tokens=False)))
        conversation.fail(retryable=False)

    house = await open_house(fail)
    given = {"model": "tiny", "input": "Hi", "stream": True}
    events = events_of((await house.http.post(RESPONSES, json=given)).text)
    assert events[-1][0] == "response.failed"
    strictly(EVENTS[events[-1][0]], events[-1][1])
    assert events[-1][1]["response"]["error"]["code"] == "server_error"
    assert await house.outcomes() == {"failed": 1}


async def test_logprobs(house: Any, strictly: Any) -> None:
    given = {"model": "tiny", "input": "Hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    response = strictly(Response, (await house.http.post(RESPONSES, json=given)).json())
    logprobs = response.output[0].content[0].logprobs
    assert b"".join(bytes(each.bytes) for each in logprobs[:-1]).decode() == "Grüße 🙂 from afar"
    assert all(len(each.top_logprobs) == 2 for each in logprobs)


@pytest.mark.parametrize("length", [5, 200])
async def test_a_stream_tells_the_logprobs_of_all_tokens(house: Any, events_of: Any, length: int) -> None:
    """Also of those that are parts of a character, and of the one that ends the answer."""
    body = {"model": "tiny", "input": "Hi", "top_logprobs": 2, "max_output_tokens": length}
    whole = (await house.http.post(RESPONSES, json=body)).json()["output"][0]["content"][0]
    events = [event for _, event in events_of((await house.http.post(RESPONSES, json={**body, "stream": True})).text)]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [each for delta in deltas for each in delta["logprobs"]] == whole["logprobs"]
    assert "".join(delta["delta"] for delta in deltas) == whole["text"]
    assert events[-1]["response"]["output"][0]["content"][0] == whole


@pytest.mark.parametrize("frame_len", [1, 2, 5, 500])
@pytest.mark.parametrize("length", [9, 20, 200])
async def test_logprobs_beside_calls_are_the_same_in_a_stream(
    open_house: Any, saying: Any, frame_len: int, length: int
) -> None:
    """Those of calls are nowhere; of what looks like one and is none, with its text."""
    house = await open_house(saying(f"{CALL}\nGrüße <tool_ca", frame_len=frame_len), max_model_len=2048)
    given: Any = {"model": "tiny", "input": "Hi", "tools": TOOLS, "top_logprobs": 1, "max_output_tokens": length}
    whole = await house.client.responses.create(**given)
    streamed: dict[int, list[Any]] = {}
    async for event in await house.client.responses.create(**given, stream=True):
        if event.type == "response.output_text.delta":
            streamed.setdefault(event.output_index, []).extend(each.token for each in event.logprobs)
        if event.type in ("response.completed", "response.incomplete"):
            last = event.response
    told = {
        index: [each.token for each in item.content[0].logprobs]
        for index, item in enumerate(whole.output)
        if item.type == "message"
    }
    assert streamed == told
    assert [item.content for item in last.output if item.type == "message"] == [
        item.content for item in whole.output if item.type == "message"
    ]
    if length == 200:
        assert "".join(told[0]) == "Sure."
        assert "".join(told[2]).endswith("<tool_ca<|im_end|>")


async def test_a_form(house: Any, strictly: Any) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    given = {"model": "tiny", "input": "Hi", "text": {"format": form}}
    strictly(Response, (await house.http.post(RESPONSES, json=given)).json())
    request = next(m for m in house.workers["decode-0"].received if isinstance(m, Submit)).request
    assert "object" in request.sampling.grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10_000}, "input"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
    ],
)  # fmt: skip
async def test_refusals(doorstep: Any, fields: Any, param: str) -> None:
    response = await doorstep.http.post(RESPONSES, json={"model": "tiny", "input": "Hi", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_every_field_of_the_api_is_honoured_or_refused() -> None:
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    from tandem.router.responses.wire import UNSUPPORTED, ResponseRequest

    for field in ResponseCreateParamsBase.__annotations__:
        assert (field in ResponseRequest.model_fields) != (field in UNSUPPORTED), field


def test_the_store_has_bounds() -> None:
    now = 0.0
    store = ResponseStore(max_responses=2, max_characters=200, time_to_live_s=10, clock=lambda: now)

    def names() -> list[str]:
        return list(store._stored)

    for name in "abc":
        store.put(name, "me", {"id": name}, [Message(role="user", content="x")])
    assert names() == ["b", "c"]
    store.put("large", "me", {}, [Message(role="user", content="x" * 150)])
    assert names() == ["c", "large"]
    store.put("larger", "me", {}, [Message(role="user", content="x" * 190)])
    assert names() == ["larger"]
    store.put("too large", "me", {}, [Message(role="user", content="x" * 201)])
    assert names() == ["larger"]
    now = 11.0
    with pytest.raises(Exception, match="not found"):
        store.get("larger", "me")
    assert (names(), store._num_characters) == ([], 0)


def test_what_another_gateway_wrote_is_forgotten_in_its_own_time() -> None:
    """Although what stands before it in the order has longer."""
    now = 0.0
    store = ResponseStore(time_to_live_s=10, clock=lambda: now)
    store.put("mine", "me", {"id": "mine"}, [])
    store._take("theirs", "me", Record("stored", {"id": "theirs"}, [], time.time() + 5))
    assert store.get("theirs", "me").response == {"id": "theirs"}
    now = 6.0
    assert store.get("mine", "me")
    with pytest.raises(Exception, match="not found"):
        store.get("theirs", "me")


async def test_a_body_that_is_too_deep_is_refused(house: Any) -> None:
    body = b'{"model": "tiny", "input": "Hi", "previous_response_id": null, "x": %b1%b}' % (b"[" * 5000, b"]" * 5000)
    answer = await house.http.post(RESPONSES, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert await house.outcomes() == {"rejected": 1.0}
