"""The real `openai` client against a real cluster: every field that is honoured, streamed and not, and refusals."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.cluster

CHAT: list[Any] = [{"role": "user", "content": "Name three animals."}]
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.8, "seed": 5},
    {"seed": 6, "n": 3},
    {"seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0, "stop": ["a", "\n\n"]},
    {"seed": 8, "extra_body": {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2}},
    {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}},
]
LONG = "The river runs through the valley and past the old mill. " * 16


@pytest.fixture(scope="module")
def client(serving: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(serving: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: ",".join(fields))
def test_a_streamed_chat_says_the_same(client: openai.OpenAI, serving: Any, fields: dict[str, Any]) -> None:
    common: dict[str, Any] = {"model": serving.model, "messages": CHAT, "max_completion_tokens": 24, **fields}
    whole = client.chat.completions.create(**common, logprobs=True, top_logprobs=3)
    texts: dict[int, str] = {}
    finish: dict[int, str] = {}
    usage = None
    stream = client.chat.completions.create(
        **common, logprobs=True, top_logprobs=3, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                finish[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert finish == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert len(whole.choices) == fields.get("n", 1)
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 3
            assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-9
    if "stop" in fields:
        assert "a" not in (whole.choices[0].message.content or "")


def test_completions_cold_and_cached(client: openai.OpenAI, serving: Any) -> None:
    common: dict[str, Any] = {"model": serving.model, "prompt": LONG, "max_tokens": 16, "seed": 3, "logprobs": 2}
    common["extra_body"] = {"cache_salt": uuid.uuid4().hex}  # other tests' prompts may begin with the same words
    answers = [client.completions.with_raw_response.create(**common) for _ in range(2)]
    cold, cached = (answer.parse() for answer in answers)
    assert [choice.model_dump() for choice in cold.choices] == [choice.model_dump() for choice in cached.choices]
    assert answers[0].headers["x-tandem-prefill-path"] == "remote"
    assert answers[0].headers["x-tandem-prefill-worker"] != answers[0].headers["x-tandem-decode-worker"]
    assert cold.usage is not None
    assert cached.usage is not None
    assert cold.usage.prompt_tokens_details is not None
    assert cached.usage.prompt_tokens_details is not None
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < (cached.usage.prompt_tokens_details.cached_tokens or 0) < cached.usage.prompt_tokens
    one = client.completions.create(model=serving.model, prompt=LONG, max_tokens=1, seed=3)
    assert one.usage is not None
    assert (one.usage.completion_tokens, one.choices[0].finish_reason) == (1, "length")


async def test_async_streams_at_once(async_client: openai.AsyncOpenAI, serving: Any) -> None:
    stream = await async_client.completions.create(model=serving.model, prompt="One, two,", max_tokens=8, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("top_p", 2),
        ("n", 0),
        ("max_completion_tokens", 0),
        ("top_logprobs", 50),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nothing"}}}),
        ("logit_bias", {"5": 1000}),
        ("structured_outputs", {"regex": "("}),
        ("service_tier", "flex"),
        ("no_such_field", 1),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(client: openai.OpenAI, serving: Any, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model=serving.model, messages=CHAT, extra_body={field: value})
    assert field in str(refusal.value)
    assert refusal.value.param is not None
    assert refusal.value.param.split(".")[0].split("[")[0] == field


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=CHAT)


def test_a_prompt_that_does_not_fit(client: openai.OpenAI, serving: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model=serving.model, prompt=[5] * 9000, max_tokens=5)
    assert refusal.value.code == "context_length_exceeded"
