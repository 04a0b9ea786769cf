"""The way of a chunk: on the spot where the reader waits and the express takes it, in order behind everything else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.router.mailbox import Mailbox
from tandem.router.openai.chat_form import ChatForm
from tandem.workers.protocol import Failed
from tandem.workers.types import TokenChunk


def chunk(token_id: int) -> TokenChunk:
    return TokenChunk(request_id="a", choice=0, token_ids=(token_id,))


async def waiting_reader(mailbox: Mailbox) -> asyncio.Task[Any]:
    reader = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    return reader


async def test_the_express_takes_what_comes_while_the_reader_waits() -> None:
    mailbox, taken = Mailbox(), []
    mailbox.express = lambda each: taken.append(each) is None
    mailbox.put(chunk(1))  # nobody waits yet: it may be behind something that is still being dealt with
    assert await mailbox.take() == [chunk(1)]
    reader = await waiting_reader(mailbox)
    mailbox.put(chunk(2))
    mailbox.put(chunk(3))
    await asyncio.sleep(0)
    assert not reader.done()
    failed = Failed(request_id="a", message="no", retryable=False)
    mailbox.put(failed)
    mailbox.put(chunk(4))  # behind the failure
    assert await reader == [failed, chunk(4)]
    assert taken == [chunk(2), chunk(3)]


async def test_what_the_express_leaves_stays_in_order() -> None:
    mailbox = Mailbox()
    mailbox.express = lambda each: each.token_ids != (2,)
    reader = await waiting_reader(mailbox)
    for token_id in (1, 2, 3):
        mailbox.put(chunk(token_id))
    assert await reader == [chunk(2), chunk(3)]


async def test_a_reader_can_be_woken_for_nothing() -> None:
    mailbox = Mailbox()
    reader = await waiting_reader(mailbox)
    mailbox.wake()
    assert await reader == []
    assert mailbox.is_empty


async def test_what_waits_is_told_and_forgotten_with_the_taking() -> None:
    mailbox, told = Mailbox(), []
    mailbox.on_waiting = told.append
    mailbox.put(chunk(1))
    mailbox.put(chunk(2))
    await mailbox.take()
    mailbox.put(chunk(3))
    assert told[1] == 2 * told[0]
    assert told[2] == told[0]


async def test_a_bug_on_the_way_is_the_requests_own(
    open_house: Any, saying: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    house = await open_house(saying("one two three four five", delay_s=0.001))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    with monkeypatch.context() as broken:
        broken.setattr(ChatForm, "show_text", lambda *given: 1 / 0)
        text = (await house.http.post("/v1/chat/completions", json=body)).text
    assert text.endswith("data: [DONE]\n\n")
    assert '"internal_error"' in text
    assert "ZeroDivisionError" in caplog.text
    assert house.gateway.workers.get("decode-0") is not None  # the connection has not noticed
    text = (await house.http.post("/v1/chat/completions", json=body)).text
    assert "internal_error" not in text
    assert await house.outcomes() == {"failed": 1.0, "ok": 1.0}
