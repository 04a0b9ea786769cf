"""Tasks for which nobody waits."""

from __future__ import annotations

import asyncio

import pytest

from tandem.cluster.background import in_background


async def test_what_ends_such_a_task_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    async def stumble() -> None:
        raise KeyError("nobody thought of this")

    waiting = in_background(asyncio.sleep(60), name="one that is cancelled")
    waiting.cancel()
    stumbling = in_background(stumble(), name="follow the launcher")
    await asyncio.gather(waiting, stumbling, return_exceptions=True)
    await asyncio.sleep(0)
    (record,) = caplog.records
    assert record.getMessage() == "follow the launcher: this goes on no longer"
    assert "nobody thought of this" in caplog.text
