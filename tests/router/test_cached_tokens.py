"""Where reused KV was found: told to the client as one number, to the operator by source."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.router.scripted_worker import Conversation
from tandem.workers.types import CachedTokens

MESSAGES = [{"role": "user", "content": "What the cluster has read before, it need not read again. " * 4}]
FOUND = CachedTokens(pool=7, peer=5, host=3, disk=2)


@pytest.mark.parametrize(("prefill", "pool"), [(1, "prefill"), (0, "decode")])
async def test_by_source(open_house: Any, prefill: int, pool: str) -> None:
    async def script(conversation: Conversation) -> None:
        conversation.start(cached=FOUND)
        conversation.say(conversation.chunk(0, [40], "stop"))

    house = await open_house(script, prefill=prefill)
    for _ in range(2):
        answer = await house.client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert answer.usage.prompt_tokens_details.cached_tokens == 17
    counts = {
        source: house.gateway.metrics.registry.get_sample_value("tandem_cached_tokens_total", {"source": source})
        for source in ("prefill", "decode", "peer", "host", "disk")
    }
    assert counts == {"prefill": None, "decode": None, pool: 14, "peer": 10, "host": 6, "disk": 4}
