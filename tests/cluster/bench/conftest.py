"""A small scripted server on loopback: answers the OpenAI API with known delays."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


@dataclass
class ScriptedServer:
    """An ASGI application. `plan` gives the behaviour of the n-th generation request: "ok" by default."""

    ttft_s: float = 0.03
    gap_s: float = 0.01
    plan: dict[int, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[bytes, bytes]] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    url: str = ""

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/v1/models":
            await _whole(send, 200, json.dumps({"data": [{"id": "scripted"}, {"id": "other"}]}))
        elif path == "/metrics":
            await _whole(send, 200, self.metrics.pop(0))
        elif path in ("/v1/completions", "/v1/chat/completions"):
            self.headers.append(dict(scope["headers"]))
            self.bodies.append(json.loads(await _body(receive)))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                await self._generate(len(self.bodies) - 1, "chat" in path, send)
            finally:
                self.running -= 1
        else:
            await _whole(send, 404, "{}")

    async def _generate(self, number: int, is_chat: bool, send: Send) -> None:
        behaviour = self.plan.get(number, "ok")
        if behaviour.isdigit():
            await _whole(send, int(behaviour), '{"error": {"message": "no", "code": "busy"}}')
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        if is_chat:
            await _event(send, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        num_tokens = self.bodies[number]["max_tokens"]
        await asyncio.sleep(self.ttft_s)
        for token in range(num_tokens):
            if token:
                await asyncio.sleep(self.gap_s)
            if token == 2 and behaviour == "error event":
                await _event(send, {"error": {"message": "lost", "code": "worker_lost"}})
                break
            if token == 2 and behaviour == "cut":
                await send({"type": "http.response.body", "body": b""})
                return
            if token == 2 and behaviour == "garbage":
                await send({"type": "http.response.body", "body": b"data: {nonsense\n\n", "more_body": True})
            choice = _choice(is_chat, "word ", None)
            if self.bodies[number].get("return_token_ids"):
                choice["token_ids"] = [7]
            await _event(send, {"choices": [choice]})
        if behaviour != "error event":
            await _event(send, {"choices": [_choice(is_chat, "", "length")]})
            await _event(send, {"choices": [], "usage": _usage(num_tokens)})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _choice(is_chat: bool, text: str, finish_reason: str | None) -> dict[str, Any]:
    content: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
    return {"index": 0, "finish_reason": finish_reason, **content}


def _usage(num_tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": 40, "completion_tokens": num_tokens, "prompt_tokens_details": {"cached_tokens": 10}}


async def _event(send: Send, event: dict[str, Any]) -> None:
    body = f"data: {json.dumps(event)}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _whole(send: Send, status: int, text: str) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": text.encode()})


async def _body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer()
    listener = socket.create_server(("127.0.0.1", 0))
    scripted.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(scripted, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    running = _NoSignals(config)
    serving = asyncio.ensure_future(running.serve(sockets=[listener]))
    while not running.started:  # noqa: ASYNC110  (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    yield scripted
    running.should_exit = True
    await serving
    listener.close()


class _NoSignals(uvicorn.Server):
    """The tests send SIGINT to this process on purpose; it is not for the server."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)
