"""Stored responses over several gateways: found by all, owned by one key, and of no use to whoever can touch Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from tandem.cluster.redis_server import EmbeddedRedis
from tandem.router.index.client import acl_rule
from tandem.router.openai.messages import Message
from tandem.router.responses.sealed import Record, Sealer
from tandem.router.responses.shared import SharedResponses
from tandem.router.scripted_worker import Conversation

SECRET_WORDS = "Grüße from afar"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def redis(server: EmbeddedRedis) -> AsyncIterator[Any]:
    async with Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
async def two(open_house: Any, saying: Any, server: EmbeddedRedis) -> Any:
    """Two gateways of one cluster, each with workers of its own; clients "a" and "b" have keys."""
    return [await open_gateway(open_house, saying(SECRET_WORDS), server.url) for _ in range(2)]


async def open_gateway(open_house: Any, script: Any, url: str) -> Any:
    return await open_house(
        script, redis_url=url, index_namespace="n", share_responses=True, api_keys=("a", "b"), max_model_len=2048
    )


async def keys(redis: Any, kind: str) -> list[bytes]:
    return sorted([key async for key in redis.scan_iter(f"pfx:{{n}}:{kind}:*")])


async def test_what_one_gateway_stores_another_finds(two: Any) -> None:
    here, there = (house.client.responses for house in two)
    kept = await here.create(model="tiny", input="My name is Fox.")
    found = await there.retrieve(kept.id)
    assert found.model_dump() == (await here.retrieve(kept.id)).model_dump()
    after = await there.create(model="tiny", input="And?", previous_response_id=kept.id)
    assert after.usage.input_tokens > kept.usage.input_tokens + kept.usage.output_tokens
    with pytest.raises(openai.BadRequestError):
        await there.cancel(kept.id)
    await there.delete(kept.id)
    for responses in (here, there):
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(kept.id)
        with pytest.raises(openai.NotFoundError):
            await responses.create(model="tiny", input="And?", previous_response_id=kept.id)
    assert (await here.retrieve(after.id)).output_text == SECRET_WORDS


async def test_it_is_there_once_the_answer_has_ended(two: Any, redis: Any) -> None:
    here, there = (house.client.responses for house in two)
    await redis.execute_command("CLIENT", "PAUSE", "300", "WRITE")
    stream = await here.create(model="tiny", input="Hi", stream=True)
    last = [event async for event in stream][-1]
    assert (await there.retrieve(last.response.id)).status == "completed"
    await redis.execute_command("CLIENT", "PAUSE", "300", "WRITE")
    whole = await here.create(model="tiny", input="Hi")
    assert (await there.retrieve(whole.id)).status == "completed"


async def test_another_key_finds_nothing(two: Any) -> None:
    mine = await two[0].client.responses.create(model="tiny", input="Hi")
    theirs = two[1].client.with_options(api_key="b").responses
    for attempt in (theirs.retrieve, theirs.delete, theirs.cancel):
        with pytest.raises(openai.NotFoundError):
            await attempt(mine.id)
    assert (await two[1].client.responses.retrieve(mine.id)).id == mine.id


async def test_cancelled_from_another_gateway(open_house: Any, tokenizer: Any, server: Any) -> None:
    async def hang(conversation: Conversation) -> None:
        conversation.start()
        conversation.say(conversation.chunk(0, tokenizer.encode("Once", add_special_tokens=False)))
        await asyncio.sleep(60)

    one, other = [await open_gateway(open_house, hang, server.url) for _ in range(2)]
    stream = await one.client.responses.create(model="tiny", input="Hi", stream=True)
    events = []
    async for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta":
            name = events[0].response.id
            assert (await other.client.responses.retrieve(name)).status == "in_progress"
            with pytest.raises(openai.NotFoundError):
                await other.client.with_options(api_key="b").responses.cancel(name)
            assert (await other.client.responses.cancel(name)).status == "cancelled"
    assert events[-1].response.status == "cancelled"
    assert await one.outcomes() == {"cancelled": 1}
    assert (await other.client.responses.retrieve(name)).status == "cancelled"


async def test_redis_is_told_nothing_and_believed_nothing(two: Any, redis: Any) -> None:
    here, there = (house.client.responses for house in two)
    first = await here.create(model="tiny", input=f"{SECRET_WORDS}?")
    second = await here.create(model="tiny", input="Hi")
    names = await keys(redis, "r")
    assert len(names) == 2
    values = await redis.mget(names)
    for text in (SECRET_WORDS, first.id, "tiny", "afar"):
        assert text.encode() not in b"".join(values)
    other_key = Sealer(b"another cluster's").seal(names[0].decode(), Record("stored", {"id": first.id}))
    poisons = (b"", b"x" * 100, values[0][:-1], values[0] + b"x", other_key, values[1])
    for poison in poisons:
        await redis.set(names[0], poison)
        await redis.set(names[1], values[0])  # each under the other's name
        for name in (first.id, second.id):
            with pytest.raises(openai.NotFoundError):
                await there.retrieve(name)
    await redis.delete(names[0])
    await redis.lpush(names[0], "a list")
    for name in (first.id, second.id):
        with pytest.raises(openai.NotFoundError):
            await there.create(model="tiny", input="And?", previous_response_id=name)
        assert (await here.retrieve(name)).id == name, "its own gateway knows better"


async def test_without_redis_each_gateway_knows_its_own(two: Any, server: EmbeddedRedis) -> None:
    here, there = (house.client.responses for house in two)
    before = await here.create(model="tiny", input="Hi")
    await server.stop()
    after = await here.create(model="tiny", input="Hi")
    for name in (before.id, after.id):
        assert (await here.retrieve(name)).id == name
        with pytest.raises(openai.NotFoundError):
            await there.retrieve(name)
    await here.create(model="tiny", input="And?", previous_response_id=before.id)


# The part alone


async def shared(url: str, **bounds: int) -> SharedResponses:
    return SharedResponses(
        url, namespace="n", cluster_key=b"k", time_to_live_s=60, cancel=lambda name, caller: None, **bounds
    )


async def put(responses: SharedResponses, name: str, text: str = "x") -> None:
    await responses.put(name, "me", {"id": name}, [Message(role="user", content=text)])


async def known(responses: SharedResponses, names: str) -> str:
    return "".join([name for name in names if await responses.find(name, "me") is not None])


async def test_the_oldest_go_first(server: EmbeddedRedis, redis: Any) -> None:
    few = await shared(server.url, max_responses=3)
    for name in "abcde":
        await put(few, name)
    assert await known(few, "abcde") == "cde"
    small = await shared(server.url, max_bytes=3000)
    for name in "fgh":
        await put(small, name, "x" * 1000)
    assert await known(small, "abcdefgh") == "gh"
    for poison in ({"head": "-1"}, {"bytes": "nan"}, {"tail": "1e300"}, {"head": "7", "tail": "3"}):
        await redis.hset("pfx:{n}:rq", mapping=poison)
        await put(small, "i", "x" * 1000)
        assert await known(small, "i") == "i"
    await redis.delete("pfx:{n}:rq")
    await redis.set("pfx:{n}:rq", "of another type")
    await put(small, "j")
    assert await known(small, "j") == "j"
    assert 0 < await redis.ttl((await keys(redis, "r"))[0]) <= 60, "nothing stays for ever, whatever the queue says"
    large = await shared(server.url)
    await put(large, "k", "x" * 100_000)
    found = await large.find("k", "me")
    assert found is not None
    assert found.conversation()[0].content == "x" * 100_000
    await put(large, "l", "x" * (9 << 20))
    assert await known(large, "kl") == "k", "too long to be shared"
    for each in (few, small, large):
        await each.stop()


async def test_the_documented_rights_suffice(server: EmbeddedRedis, redis: Any) -> None:
    await redis.execute_command(*acl_rule("tandem", "n").replace(">PASSWORD", ">word").split())
    await redis.execute_command("ACL", "LOG", "RESET")
    guest = await shared(server.url.replace("unix://", "unix://tandem:word@"))
    guest.begin("a", "me", {"id": "a"})
    await guest.ask_to_cancel("a", "me")
    await guest._attend_once()
    await guest._renew([guest._sealer.name("a", "me")])
    assert await known(guest, "a") == "a"
    await put(guest, "a")
    await guest.delete("a", "me")
    found = await guest.find("a", "me")
    assert found is not None
    assert found.kind == "deleted"
    refused = [entry[b"object"] for entry in map(_pairs, await redis.execute_command("ACL", "LOG"))]
    assert [each for each in refused if each != b"client|setinfo"] == []
    await guest.stop()


def _pairs(entry: Any) -> dict[bytes, Any]:
    return entry if isinstance(entry, dict) else dict(zip(entry[::2], entry[1::2]))
