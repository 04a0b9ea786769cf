"""The worker that other tests trust."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tandem.router.scripted_worker import Conversation, ScriptedWorker
from tandem.workers.protocol import Submit
from tandem.workers.types import Request, SamplingParams


async def test_a_script_that_fails_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Or whoever waits for its answer does so until the test's own limit, and nobody knows why."""

    async def script(conversation: Conversation) -> None:
        raise AssertionError("not the tokens that were asked for")

    worker = ScriptedWorker("decode-0", "decode", script)
    request = Request(request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1, seed=0))
    worker._begin(cast(Any, None), Submit(request=request, timeout_s=1.0))
    await asyncio.gather(*worker._tasks, return_exceptions=True)
    await asyncio.sleep(0)
    assert "the script of decode-0 failed" in caplog.text
    assert "not the tokens that were asked for" in caplog.text
