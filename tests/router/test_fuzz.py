"""Every field of every route that takes one, with values that nobody should send, streamed and not.

Whatever comes is answered or refused in the API's shape: no 5xx, no 422, no stream that ends as if nothing had
happened, no worker the worse for it, and an ordinary request in between is answered as ever. Straight on ASGI: 16,000
requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from tandem.router import docs

HOLE = "@"
HOSTILE: list[str] = [
    "null", "true", "false", "0", "-1", "1", "3", "-0.0", "0.5", "-2.5", "1e308", "1e999", "-1e999", "NaN", "Infinity",
    "9223372036854775808", "1" + "0" * 400, "-1" + "0" * 40, '""', '"a"', '"1"', '"true"', r'"\u0000"', r'"\ud800"',
    '"\U0001f642"', '"' + "x" * 20_000 + '"', '"<|im_end|>"', '"{{ 7 * 7 }}"', '"../../etc/passwd"', "[]", "[null]",
    "[1]", '["a"]', "[[]]", "[{}]", "[" * 300 + "]" * 300, json.dumps([7] * 2000), "{}", '{"a": 1}', '{"a": {"b": []}}',
    '{"type": "x"}', '{"type": "function"}', r'{"\u0000": 1}', json.dumps({str(number): 1 for number in range(2000)}),
]  # fmt: skip
HELLO = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": HELLO, "max_tokens": 20},
    "/v1/completions": {"model": "tiny", "prompt": "Hi", "max_tokens": 20},
    "/v1/responses": {"model": "tiny", "input": "Hi", "max_output_tokens": 20},
    "/v1/messages": {"model": "tiny", "messages": HELLO, "max_tokens": 20},
    "/v1/embeddings": {"model": "tiny", "input": "Hi"},
}
WAYS: dict[str, list[dict[str, Any]]] = {
    "/v1/embeddings": [{"encoding_format": "float"}, {"encoding_format": "base64"}],
}
"""Of asking, where it is not with a stream and without."""
DEEPER: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": [{"role": HOLE, "content": "x"}]},
        {"messages": [{"role": "user", "content": HOLE}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": HOLE}]}]},
        {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": HOLE}]},
        {"messages": [*HELLO, {"role": "tool", "content": "x", "tool_call_id": HOLE}]},
        {"tools": [{"type": "function", "function": HOLE}]},
        {"tools": [{"type": "function", "function": {"name": HOLE}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": HOLE}}], "tool_choice": "required"},
        {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": HOLE},
        {"response_format": {"type": HOLE}},
        {"response_format": {"type": "json_schema", "json_schema": HOLE}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": HOLE}}},
        {"structured_outputs": {"regex": HOLE}},
        {"structured_outputs": {"choice": HOLE}},
        {"structured_outputs": {"grammar": HOLE}},
        {"structured_outputs": {"json": HOLE}},
        {"stream_options": {"include_usage": HOLE}},
        {"logit_bias": {"7": HOLE}},
        {"unknown": HOLE},
    ],
    "/v1/completions": [{"prompt": [HOLE]}, {"prompt": [[HOLE]]}, {"unknown": HOLE}],
    "/v1/responses": [
        {"input": [HOLE]},
        {"input": [{"role": "user", "content": HOLE}]},
        {"input": [{"type": "function_call_output", "call_id": "1", "output": HOLE}]},
        {"tools": [{"type": "function", "name": HOLE}]},
        {"text": {"format": HOLE}},
        {"unknown": HOLE},
    ],
    "/v1/embeddings": [
        {"input": [HOLE]},
        {"input": ["a", HOLE]},
        {"input": [1, HOLE]},
        {"input": [[HOLE]]},
        {"input": [[1], HOLE]},
        {"kv_retention": {"priority": HOLE}},
        {"kv_retention": {"duration": HOLE}},
        {"truncate_prompt_tokens": 3, "truncation_side": HOLE},
        {"unknown": HOLE},
    ],
    "/v1/messages": [
        {"messages": [{"role": "user", "content": HOLE}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": HOLE}]}]},
        {"tools": [{"name": "f", "input_schema": HOLE}]},
        {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": HOLE},
        {"unknown": HOLE},
    ],
}
LAST_EVENTS = ("[DONE]", "response.completed", "response.incomplete", "message_stop")


def holes(path: str) -> Iterator[dict[str, Any]]:
    _, model, refused = docs.BODIES[path]
    for field in sorted({*model.model_fields, *refused} - {"stream"}):
        yield {field: HOLE}
    yield from DEEPER[path]


def bodies(path: str) -> Iterator[tuple[str, bytes]]:
    """(what was sent where, the body)."""
    for fields in holes(path):
        for way in WAYS.get(path, [{"stream": False}, {"stream": True}]):
            text = json.dumps({**BASES[path], **way, **fields})
            for value in HOSTILE:
                yield f"{fields} {value[:40]} {way}", text.replace(json.dumps(HOLE), value).encode()


async def call(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of a POST."""
    sent: list[Message] = []
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    async with asyncio.timeout(20):
        await app({**scope, "headers": headers, "root_path": "", "http_version": "1.1"}, inbox.get, send)
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert not sent[-1].get("more_body", False)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def check(what: str, path: str, status: int, answer: bytes) -> None:
    if status == 200:
        text = answer.decode()
        is_stream = text.startswith(("data:", "event:"))
        assert not is_stream or any(last in text[-4000:] for last in LAST_EVENTS), what
        assert is_stream or "error" not in text[:9], what
        assert '"error":{' not in text, what
        return
    assert status in (400, 404), (what, status, answer[:300])
    assert len(answer) <= 4096, what
    error = json.loads(answer)["error"]
    keys = {"type", "message"} if path == "/v1/messages" else {"message", "type", "param", "code"}
    assert set(error) == keys, what
    assert error["message"], what
    for leak in ("Traceback", "/site-packages", ".py", "pydantic"):
        assert leak not in error["message"], what


@pytest.mark.parametrize("path", list(BASES))
async def test_anything_is_answered_or_refused(open_house: Any, saying: Any, path: str) -> None:
    house = await open_house(saying("Yes, indeed.", frame_len=50), max_model_len=4096)
    app, num_sent = house.gateway.app, 0
    pending: list[tuple[str, bytes]] = []

    async def send_all() -> None:
        answers = await asyncio.gather(*(call(app, path, body) for _, body in pending))
        for (what, _), (status, answer) in zip(pending, answers, strict=True):
            check(what, path, status, answer)
        assert (await call(app, path, json.dumps(BASES[path]).encode()))[0] == 200
        pending.clear()

    for what, body in bodies(path):
        pending.append((what, body))
        num_sent += 1
        if len(pending) == 2 * len(HOSTILE):
            await send_all()
    await send_all()
    assert num_sent > 1500
    assert house.gateway.admission.num_in_flight == house.gateway.admission.num_prompt_tokens == 0
    assert set(await house.outcomes()) == {"ok", "rejected"}
    assert house.workers["decode-0"].num_running == 0
