"""Who shares a cache, over a real cluster: the same prompt, other salts."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.cluster

PROMPT = "The lighthouse keeper wrote down every ship that passed, and what it carried. " * 12


def cached_tokens(serving: Any, **fields: Any) -> int:
    usage = serving.complete(PROMPT, **fields).raise_for_status().json()["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= cached < usage["prompt_tokens"]
    return cached


def test_who_has_another_salt_shares_nothing(serving: Any) -> None:
    assert cached_tokens(serving, cache_salt="one") == 0
    assert cached_tokens(serving, cache_salt="one") > 0
    assert cached_tokens(serving, cache_salt="another") == 0
    assert cached_tokens(serving) < 8  # some other prompt may begin with the same words
    assert cached_tokens(serving, kv_retention={"priority": 90, "duration": 60}) > 64
