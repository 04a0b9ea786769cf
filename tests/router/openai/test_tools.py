"""Tools from end to end: what the model is told, what its answer is held to, and what the client gets."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tandem.workers.protocol import Submit

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
HELLO: list[Any] = [{"role": "user", "content": "The weather in Bern?"}]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern 🙂"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def asked(house: Any) -> Any:
    return next(m for m in reversed(house.workers["decode-0"].received) if isinstance(m, Submit)).request


@pytest.fixture
async def house(open_house: Any, saying: Any) -> Any:
    return await open_house(saying(CALLS, frame_len=3), max_model_len=2048)


async def test_whole(house: Any, strictly: Any) -> None:
    answer = await house.client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
    choice = strictly(ChatCompletion, answer.model_dump(exclude_unset=True)).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    calls = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("get_weather", {"city": "Bern 🙂"}),
        ("now", {}),
    ]
    assert len({call.id for call in calls}) == 2


async def test_streamed(house: Any, strictly: Any) -> None:
    stream = await house.client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, stream=True)
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    text, num_pieces, finish = "", 0, None
    async for chunk in stream:
        strictly(ChatCompletionChunk, chunk.model_dump(exclude_unset=True))
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or ():
            if call.index not in names:
                assert call.id
                assert call.type == "function"
                names[call.index] = call.function.name
                arguments[call.index] = ""
            else:
                assert call.id is None
                num_pieces += 1
            arguments[call.index] += call.function.arguments
    assert (text, finish, names) == ("Let me see.", "tool_calls", {0: "get_weather", 1: "now"})
    assert [json.loads(each) for each in arguments.values()] == [{"city": "Bern 🙂"}, {}]
    assert num_pieces > 4


async def test_the_librarys_own_accumulator(house: Any) -> None:
    async with house.client.chat.completions.stream(model="tiny", messages=HELLO, tools=TOOLS) as stream:
        final = await stream.get_final_completion()
    assert [call.function.name for call in final.choices[0].message.tool_calls] == ["get_weather", "now"]


async def test_results_are_told_to_a_template_that_knows_no_tools(house: Any) -> None:
    first = await house.client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
    message = first.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    await house.client.chat.completions.create(
        model="tiny", messages=[*HELLO, message.model_dump(), *results], tools=TOOLS
    )
    text = house.gateway._house.tokenizer.text_of(asked(house).prompt_token_ids)
    assert text.count("<|im_start|>") == 5
    assert '"name": "get_weather"' in text.partition("<|im_end|>")[0]
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern 🙂"}}\n</tool_call>' in text
    assert "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nsunny\n</tool_response>" in text


async def test_a_template_that_knows_tools_shows_them(open_house: Any, saying: Any, tmp_path: Any) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for tool in tools %}{{ tool.function.name }};{% endfor %}{% for m in messages %}"
        "{{ m.role }}:{{ m.content }}{% for call in m.tool_calls %}<tool_call>{{ call.function.arguments.city }}"
        "{% endfor %} {% endfor %}"
    )
    house = await open_house(saying("Sunny."), max_model_len=2048, chat_template=template)
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    answer = await house.client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Sunny.", "stop")
    text = house.gateway._house.tokenizer.text_of(asked(house).prompt_token_ids)
    assert text == "get_weather;now;user:The weather in Bern? assistant:<tool_call>Bern tool:sunny "


async def test_what_the_answer_is_held_to(house: Any) -> None:
    async def grammar(**fields: Any) -> str | None:
        await house.client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, **fields)
        found: str | None = asked(house).sampling.grammar
        return found

    assert await grammar() is None
    assert await grammar(tool_choice="auto") is None
    required = await grammar(tool_choice="required")
    assert required is not None
    assert "get_weather" in required
    assert "now" in required
    assert "call)*" in required
    assert "call)*" not in (await grammar(tool_choice="required", parallel_tool_calls=False) or "")
    named = await grammar(tool_choice={"type": "function", "function": {"name": "now"}})
    assert named is not None
    assert "get_weather" not in named
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    response = await house.http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "tools": strict})
    assert response.status_code == 200
    assert "free" in asked(house).sampling.grammar


async def test_no_tools_when_none_is_chosen(house: Any) -> None:
    answer = await house.client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert "<tool_call>" in answer.choices[0].message.content
    assert "get_weather" not in house.gateway._house.tokenizer.text_of(asked(house).prompt_token_ids)


async def test_an_answer_that_is_cut_short_says_so(house: Any) -> None:
    answer = await house.client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, max_tokens=60)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}]}]},
         "messages[1].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
async def test_refusals(doorstep: Any, fields: Any, param: str) -> None:
    response = await doorstep.http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_a_model_whose_calls_nobody_could_read(tokenizer_folder: Any, doorstep: Any, tmp_path: Any) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools }}{{ messages[0].content }}")
    house = doorstep.gateway._house
    object.__setattr__(house, "tokenizer", type(house.tokenizer)(tokenizer_folder, chat_template=template))
    response = await doorstep.http.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "tools": TOOLS}
    )
    assert response.json()["error"]["param"] == "tools"
    assert "--tool-call-parser" in response.json()["error"]["message"]


async def test_thoughts(open_house: Any, saying: Any, tmp_path: Any) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1].content }}<think>\n{# </think> #}")
    text = "Hm, <b>.\n</think>\n\nFour."
    house = await open_house(saying(text), chat_template=template)
    answer = await house.client.chat.completions.create(model="tiny", messages=HELLO)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Four.", "Hm, <b>.\n")
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    stream = await house.client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    thoughts, content = "", ""
    async for chunk in stream:
        thoughts += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
        content += chunk.choices[0].delta.content or ""
    assert (content, thoughts) == ("Four.", "Hm, <b>.\n")


async def test_errors_are_the_clients_own(house: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await house.client.chat.completions.create(
            model="tiny", messages=HELLO, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "x"}}
        )
    assert refusal.value.param == "tool_choice"
