"""Pauses between attempts."""

from __future__ import annotations

import pytest

from tandem.cluster import backoff
from tandem.cluster.backoff import Backoff


async def test_pauses_double_up_to_a_bound_and_begin_anew_after_a_long_life(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(backoff.asyncio, "sleep", sleep)
    waiting = Backoff()
    for _ in range(11):
        await waiting.pause()
        waiting.note_life(59.0)
    assert slept[:4] == [0.1, 0.2, 0.4, 0.8]
    assert slept[-2:] == [30.0, 30.0]
    waiting.note_life(61.0)
    assert waiting.pause_s == 0.1
