"""Chat completions over real sockets: the `openai` client, the gateway, and a worker that speaks the protocol."""

from __future__ import annotations

from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

HELLO: list[Any] = [{"role": "user", "content": "Say something, please."}]


async def test_whole_answer(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Grüße 🙂 from afar"))
    raw = await house.client.chat.completions.with_raw_response.create(model="tiny", messages=HELLO)
    answer = raw.parse()
    ChatCompletion.model_validate(answer.model_dump())
    assert answer.choices[0].message.content == "Grüße 🙂 from afar"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert raw.headers["x-tandem-prefill-worker"] == "prefill-0"
    assert raw.headers["x-tandem-decode-worker"] == "decode-0"
    assert raw.headers["x-tandem-prefill-path"] == "remote"
    assert raw.headers["x-request-id"]
    assert await house.outcomes() == {"ok": 1}


async def test_stream(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Grüße 🙂 from afar"))
    stream = await house.client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump())
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Grüße 🙂 from afar"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert await house.outcomes() == {"ok": 1}
