"""Clients that do not read: little waits for them, their workers rest meanwhile, and nobody else feels it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from tandem.router.mailbox import Mailbox
from tandem.router.scripted_worker import Script, answering
from tandem.workers.protocol import Cancel, Submit
from tandem.workers.types import Request, TokenChunk

MAX_TOKENS = 3000
BODY = {"model": "tiny", "prompt": "hello", "stream": True, "temperature": 0, "max_tokens": MAX_TOKENS}


@pytest.fixture
def endless() -> Script:
    """Tokens as fast as they go: some 200 bytes of event each, 600 KB in all."""
    token_ids = [50 + number % 40 for number in range(MAX_TOKENS)]

    def tokens_for(request: Request, choice: int) -> list[int]:
        return token_ids

    async def script(conversation: Any) -> None:
        await answering(tokens_for, frame_len=1, delay_s=0.0)(conversation)

    return script


@pytest.fixture
async def house(open_house: Callable[..., Awaitable[Any]], endless: Script) -> Any:
    return await open_house(endless, prefill=0, max_model_len=MAX_TOKENS + 100, slow_reader_timeout_s=1.0)


@contextlib.contextmanager
def narrow_client(url: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A client with hardly any room, that has sent its request and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = url.removeprefix("http://").split(":")
    client.connect((host, int(port)))
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    )
    client.sendall(head.encode() + b"\r\n\r\n" + content)
    client.setblocking(False)
    try:
        yield client
    finally:
        client.close()


def messages(house: Any, kind: type) -> list[Any]:
    return [message for message in house.workers["decode-0"].received if isinstance(message, kind)]


async def events_of_reader(client: socket.socket, pause_s: float) -> AsyncIterator[Any]:
    """What the client reads, a little at a time, to the end."""
    loop = asyncio.get_running_loop()
    text = b""
    while not text.endswith(b"0\r\n\r\n"):
        part = await asyncio.wait_for(loop.sock_recv(client, 1 << 16), 10)
        if not part:
            raise ConnectionError(f"cut after {len(text)} bytes")
        text += part
        await asyncio.sleep(pause_s)
    body, rest = b"", text.partition(b"\r\n\r\n")[2]
    while rest:
        length, _, rest = rest.partition(b"\r\n")
        body += rest[: int(length, 16)]
        rest = rest[int(length, 16) + 2 :]
    for event in body.decode().split("\n\n")[:-1]:
        yield event.removeprefix("data: ")


async def test_who_reads_nothing_is_paused_and_then_given_up(house: Any) -> None:
    worker = house.workers["decode-0"]
    with narrow_client(house.url, BODY):
        await house.until(lambda: bool(messages(house, Cancel)))  # paused: its worker has forgotten the request
        assert worker.num_running == 0
        assert house.gateway.admission.num_in_flight == 1  # the client still has its time
        view = house.gateway.workers.get("decode-0").account.view()
        assert view.num_sequences == 0
        began = time.monotonic()
        assert await house.outcomes() == {"cancelled": 1.0}
        assert time.monotonic() - began < 10
    assert len(messages(house, Submit)) == 1


async def test_who_reads_slowly_gets_everything(house: Any) -> None:
    """After a while of nothing; the answer is paused several times."""
    with narrow_client(house.url, BODY) as client:
        await house.until(lambda: bool(messages(house, Cancel)))
        events = [event async for event in events_of_reader(client, 0.0005)]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert [chunk["finish_reason"] for chunk in chunks[-1:]] == ["length"]
    whole = await house.client.completions.create(model="tiny", prompt="hello", max_tokens=MAX_TOKENS, timeout=60)
    assert "".join(chunk["text"] for chunk in chunks) == whole.choices[0].text
    assert await house.outcomes() == {"ok": 2.0}
    submitted = messages(house, Submit)
    assert len(submitted) > 2  # it was stopped and went on
    assert len({message.request.request_id for message in submitted}) == len(submitted)
    assert house.gateway.metrics.registry.get_sample_value("tandem_slow_reader_pauses_total") == len(submitted) - 2


async def test_others_feel_nothing(house: Any) -> None:
    with narrow_client(house.url, BODY):
        await house.until(lambda: bool(messages(house, Cancel)))
        answer = await house.client.completions.create(model="tiny", prompt="hello", max_tokens=5)
        assert answer.usage.completion_tokens == 5
    assert (await house.outcomes())["ok"] == 1.0


async def test_what_waits_is_bounded(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the mailbox, in the server's buffer, and in the kernel."""
    waiting: list[int] = []
    put = Mailbox.put

    def watched(self: Mailbox, event: Any) -> None:
        put(self, event)
        waiting.append(self._num_bytes)

    monkeypatch.setattr(Mailbox, "put", watched)
    with narrow_client(house.url, BODY):
        await house.until(lambda: bool(messages(house, Cancel)))
        await asyncio.sleep(0.1)
        written = house.gateway.metrics.generation_tokens.value
    assert 0 < max(waiting) < 70_000
    # all that was turned into events is in the server's buffer, the kernel's, or the client's
    assert written * 200 < 192 << 10


def test_the_weight_of_chunks_covers_their_events() -> None:
    mailbox = Mailbox()
    mailbox.put(TokenChunk(request_id="a" * 32, choice=0, token_ids=(1,)))
    assert mailbox._num_bytes >= 200
