"""What of a request decides whose cached blocks it may use, and how long its own are kept."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tandem.router.tenants import cache_salt
from tandem.workers.protocol import Submit
from tandem.workers.types import Request, Retention

KEY = b"cluster key of the tests"
COMPLETION = {"model": "tiny", "prompt": [7] * 100}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}]}


async def submitted(house: Any, path: str, body: dict[str, Any], key: str | None = None) -> Request:
    """The request as the decode worker was given it."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    response = await house.http.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return next(
        message.request for message in reversed(house.workers["decode-0"].received) if isinstance(message, Submit)
    )


async def test_each_api_key_is_a_tenant_and_a_salt_divides_it(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes."), api_keys=("alice's key", "bob's key"))
    salts: dict[tuple[str, str | None], str] = {}
    for key in ("alice's key", "bob's key"):
        for asked in (None, "x", "y"):
            extra = {} if asked is None else {"cache_salt": asked}
            chat = await submitted(house, "/v1/chat/completions", CHAT | extra, key)
            completion = await submitted(house, "/v1/completions", COMPLETION | extra, key)
            assert chat.salt == completion.salt
            salts[key, asked] = chat.salt
    assert len(set(salts.values())) == 6
    assert "" not in salts.values()
    assert not any(word in salt for salt in salts.values() for word in ("alice", "bob"))


async def test_without_keys_there_is_one_tenant(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes."))
    assert (await submitted(house, "/v1/completions", COMPLETION)).salt == ""
    assert (await submitted(house, "/v1/completions", COMPLETION | {"cache_salt": None})).salt == ""
    assert (await submitted(house, "/v1/completions", COMPLETION | {"cache_salt": "x"})).salt != ""


async def test_two_tenants_share_no_hint(open_house: Any, saying: Any) -> None:
    """What the router remembers of one tenant's prompt draws no other tenant's anywhere."""
    house = await open_house(
        saying("Yes."), prefill=3, api_keys=("alice's key", "bob's key"), redis_url="redis://127.0.0.1:1/0"
    )
    alice = await submitted(house, "/v1/completions", COMPLETION, "alice's key")
    bob = await submitted(house, "/v1/completions", COMPLETION, "bob's key")
    index, holders = house.gateway.index, [(name, 0) for name in house.workers]
    dispatcher = house.gateway._open_house().dispatcher
    assert await index.longest_prefix(dispatcher.block_keys(alice), holders) != {}
    assert not set(dispatcher.block_keys(alice)) & set(dispatcher.block_keys(bob))


@pytest.mark.parametrize(("policy", "is_asked"), [("cost", True), ("prefix", True), ("round-robin", False)])
async def test_policies_to_compare_with_know_nothing_of_prefixes(
    open_house: Any, saying: Any, policy: str, is_asked: bool
) -> None:
    house = await open_house(saying("Yes."), redis_url="redis://127.0.0.1:1/0", router_policy=policy)
    house.gateway.index.note_routed = lambda keys, holders: noted.append(keys)
    noted: list[Any] = []
    await submitted(house, "/v1/completions", COMPLETION)
    assert bool(noted) == is_asked


def test_salts_say_nothing_and_no_pair_is_read_as_another() -> None:
    assert cache_salt(KEY, "", None) == ""
    assert len({cache_salt(KEY, *pair) for pair in [("", ""), ("a", None), ("a", "b"), ("ab", ""), ("", "ab")]}) == 5
    assert cache_salt(KEY, "a", "b") == cache_salt(KEY, "a", "b") != cache_salt(b"another cluster's", "a", "b")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Retention()),
        ({}, Retention()),
        ({"priority": 0}, Retention(priority=0)),
        ({"priority": 100, "duration": 90}, Retention(priority=100, duration_s=90.0)),
        ({"duration": 0.5}, Retention(duration_s=0.5)),
        ({"priority": None, "duration": None}, Retention()),
    ],
)
async def test_retention_reaches_the_worker(open_house: Any, saying: Any, given: Any, expected: Retention) -> None:
    house = await open_house(saying("Yes."))
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        assert (await submitted(house, path, body | {"kv_retention": given})).retention == expected


@pytest.mark.parametrize(("given", "expected"), [({}, 0), ({"priority": None}, 0), ({"priority": 7}, 7)])
async def test_priority_reaches_the_worker(open_house: Any, saying: Any, given: Any, expected: int) -> None:
    house = await open_house(saying("Yes."))
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        assert (await submitted(house, path, body | given)).priority == expected


REFUSED = [
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"cache_salt": 7}, "cache_salt"),
    ({"cache_salt": True}, "cache_salt"),
    ({"cache_salt": ["x"]}, "cache_salt"),
    ({"kv_retention": 35}, "kv_retention"),
    ({"kv_retention": {"priority": -1}}, "kv_retention.priority"),
    ({"kv_retention": {"priority": 101}}, "kv_retention.priority"),
    ({"kv_retention": {"priority": 35.5}}, "kv_retention.priority"),
    ({"kv_retention": {"priority": "35"}}, "kv_retention.priority"),
    ({"kv_retention": {"priority": True}}, "kv_retention.priority"),
    ({"kv_retention": {"duration": 0}}, "kv_retention.duration"),
    ({"kv_retention": {"duration": -1.0}}, "kv_retention.duration"),
    ({"kv_retention": {"duration": True}}, "kv_retention.duration"),
    ({"kv_retention": {"duration_s": 3}}, "kv_retention.duration_s"),
]


@pytest.mark.parametrize(("extra", "param"), REFUSED)
async def test_wrong_values_are_refused_by_name(doorstep: Any, extra: dict[str, Any], param: str) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        response = await doorstep.http.post(path, json=body | extra)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert "KVRetention" not in error["message"]  # our classes are nobody's business


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "1e999"])
async def test_durations_that_are_no_numbers_are_refused(doorstep: Any, literal: str) -> None:
    content = '{"model": "tiny", "prompt": "x", "kv_retention": {"duration": %s}}' % literal  # noqa: UP031
    headers = {"content-type": "application/json"}
    response: httpx.Response = await doorstep.http.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
