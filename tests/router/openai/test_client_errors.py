"""What the `openai` client makes of each refusal and failure: its error class, and whether it comes again by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai.types import Model

from tandem.router.scripted_worker import Conversation

HELLO: Any = [{"role": "user", "content": "Hi"}]


async def collect(stream: Any, chunks: list[Any]) -> None:
    async for chunk in stream:
        chunks.append(chunk)


def full(house: Any) -> None:
    house.gateway.admission.num_in_flight = 1


def without_workers(house: Any) -> None:
    house.gateway._house = None


def as_it_is(house: Any) -> None:
    pass


CASES: dict[str, tuple[type[openai.APIStatusError], int, dict[str, Any], Any]] = {
    "a field": (openai.BadRequestError, 400, {"temperature": 7}, as_it_is),
    "a key": (openai.AuthenticationError, 401, {"extra_headers": {"authorization": "Bearer other"}}, as_it_is),
    "a model": (openai.NotFoundError, 404, {"model": "other"}, as_it_is),
    "size": (openai.APIStatusError, 413, {"messages": [{"role": "user", "content": "x" * 5000}]}, as_it_is),
    "kind": (openai.APIStatusError, 415, {"extra_headers": {"content-type": "text/plain"}}, as_it_is),
    "load": (openai.RateLimitError, 429, {}, full),
    "start": (openai.InternalServerError, 503, {}, without_workers),
}


@pytest.mark.parametrize("name", list(CASES))
async def test_each_refusal_has_its_class_and_only_passing_ones_are_tried_again(
    open_house: Any, saying: Any, name: str
) -> None:
    kind, status, changes, arrange = CASES[name]
    house = await open_house(saying("Yes."), api_keys=("secret",), max_body_bytes=4096, max_in_flight=1)
    arrange(house)
    client = house.client.with_options(max_retries=1)
    waits: list[str | None] = []

    async def note(response: Any) -> None:
        waits.append(response.headers.get("retry-after"))

    client._client.event_hooks["response"].append(note)
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(**{"model": "tiny", "messages": HELLO, "stream": stream} | changes)
        assert caught.value.status_code == status
        assert caught.value.request_id
    assert waits == ([None] * 2 if status < 429 else ["1"] * 4)
    house.gateway.admission.num_in_flight = 0


async def test_a_failure_in_mid_stream_is_raised_after_what_came_before(open_house: Any, tokenizer: Any) -> None:
    async def script(conversation: Conversation) -> None:
        conversation.start()
        conversation.say(conversation.chunk(0, tokenizer.encode("Once", add_special_tokens=False)))
        conversation.fail(retryable=False)

    house = await open_house(script)
    for create in (
        house.client.chat.completions.create(model="tiny", messages=HELLO, stream=True),
        house.client.completions.create(model="tiny", prompt="Hi", stream=True),
    ):
        chunks: list[Any] = []
        with pytest.raises(openai.APIError):
            await collect(await create, chunks)
        assert chunks


async def test_a_client_that_has_waited_long_enough_says_so_and_leaves(open_house: Any) -> None:
    async def silent(conversation: Conversation) -> None:
        conversation.start()
        await asyncio.sleep(60)

    house = await open_house(silent)
    client = house.client.with_options(timeout=0.2)
    for stream in (False, True):
        create = client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
        with pytest.raises(openai.APITimeoutError):
            await collect(await create, [])
    await house.until(lambda: house.workers["decode-0"].num_running == 0)
    assert await house.outcomes() == {"cancelled": 2}


async def test_models_have_no_keys_that_nobody_knows(open_house: Any, saying: Any, strictly: Any) -> None:
    house = await open_house(saying("Yes."))
    listed = (await house.http.get("/v1/models")).json()
    assert set(listed) == {"object", "data"}
    for shown in (*listed["data"], (await house.http.get("/v1/models/tiny")).json()):
        strictly(Model, shown, but=("max_model_len",))
