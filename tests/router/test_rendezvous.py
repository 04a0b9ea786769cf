"""`prompt_cache_key` from the client to the workers, over gateways that know nothing of each other. What it outweighs
and what not is in test_policy.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from tandem.router.rendezvous import first_rows, hash_of, key_of

CHAT: list[Any] = [{"role": "user", "content": "Tell me a story."}]


def test_tenants_with_equal_labels_have_different_keys() -> None:
    assert key_of("a") == key_of("a")
    assert len({key_of("a"), key_of("b"), key_of("a", "00ff"), key_of("b", "00ff"), key_of("")}) == 5


def test_nobody_is_asked_where_nobody_is() -> None:
    assert first_rows(key_of("a"), np.array([], np.uint64)) == []
    assert first_rows(key_of("a"), np.array([hash_of("w")], np.uint64)) == [0]


async def test_several_gateways_send_a_key_to_the_same_workers(open_house: Any, saying: Any) -> None:
    async def way(house: Any, ask: Any, **fields: Any) -> tuple[str, str]:
        answer = await ask.with_raw_response.create(model="tiny", **fields)
        return answer.headers["x-tandem-prefill-worker"], answer.headers["x-tandem-decode-worker"]

    # no snapshot comes meanwhile, which could know of a request that has just ended
    first = await open_house(saying("Yes."), prefill=3, decode=3, heartbeat_s=30)
    second = await open_house(saying("Yes."), prefill=3, decode=3, heartbeat_s=30)
    seen = set()
    for label in "abcdef":
        here = await way(first, first.client.chat.completions, messages=CHAT, prompt_cache_key=label)
        for house in (first, second):
            assert await way(house, house.client.chat.completions, messages=CHAT, prompt_cache_key=label) == here
            assert await way(house, house.client.responses, input=CHAT[0]["content"], prompt_cache_key=label) == here
        seen.add(here)
    assert len(seen) > 2
    without = {await way(first, first.client.chat.completions, messages=CHAT) for _ in range(6)}
    assert len(without) > 1  # in turn
