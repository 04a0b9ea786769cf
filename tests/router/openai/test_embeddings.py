"""POST /v1/embeddings: the client's view of it, who reads what, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from typing import Any

import msgspec
import openai
import pytest

from tandem.router.cost_model import RequestView, Speeds, WorkerView
from tandem.router.embedding import choose_reader
from tandem.router.openai.embedding_endpoint import cut
from tandem.router.scripted_worker import ScriptedWorker, scripted_embedding
from tandem.workers.protocol import Cancel, Embed, Failed, Message
from tandem.workers.types import CachedTokens

PATH = "/v1/embeddings"
ROUTE = {"model": "tiny"}


def embeds(worker: ScriptedWorker) -> list[Embed]:
    return [message for message in worker.received if isinstance(message, Embed)]


def vector(token_ids: Any) -> list[float]:
    embedding = scripted_embedding(Embed(request_id="", token_ids=tuple(token_ids))).embedding
    return list(struct.unpack("<8f", embedding))


async def test_the_clients_ways_of_asking(open_house: Any, tokenizer: Any, strictly: Any) -> None:
    house = await open_house()
    texts = ["Once upon a time", "the quick brown fox 🙂"]
    ids = [tokenizer.encode_plain(text, add_special_tokens=True) for text in texts]
    for given, expected in ((texts[0], ids[:1]), (texts, ids), (ids[0], ids[:1]), (ids, ids)):
        default = await house.client.embeddings.create(model="tiny", input=given)  # base64, which it decodes
        plain = await house.client.embeddings.create(model="tiny", input=given, encoding_format="float", user="me")
        assert [one.embedding for one in default.data] == [vector(one) for one in expected]
        assert default.model_dump() == plain.model_dump()
        assert [one.index for one in plain.data] == list(range(len(expected)))
        total = sum(map(len, expected))
        assert (plain.usage.prompt_tokens, plain.usage.total_tokens) == (total, total)
    raw = await house.http.post(PATH, json=ROUTE | {"input": texts, "encoding_format": "base64"})
    assert base64.b64decode(raw.json()["data"][1]["embedding"]) == struct.pack("<8f", *vector(ids[1]))
    assert raw.headers["x-tandem-prefill-worker"] == "prefill-0"
    assert "x-tandem-decode-worker" not in raw.headers
    assert len(raw.headers["x-request-id"]) == 32
    plain = await house.http.post(PATH, json=ROUTE | {"input": texts, "encoding_format": "float"})
    strictly(openai.types.CreateEmbeddingResponse, plain.json())
    assert await house.outcomes() == {"ok": 10}
    value = house.gateway.metrics.registry.get_sample_value
    assert value("tandem_embeddings_total") == 16
    assert value("tandem_prompt_tokens_total") == sum(len(one.token_ids) for one in embeds(house.workers["prefill-0"]))
    assert value("tandem_generation_tokens_total") == 0
    assert not embeds(house.workers["decode-0"])


async def test_dimensions(open_house: Any) -> None:
    house = await open_house()
    short = await house.client.embeddings.create(model="tiny", input=[5, 6], dimensions=6)
    (one,) = short.data
    assert len(one.embedding) == 6
    assert math.isclose(math.hypot(*one.embedding), 1, abs_tol=1e-6)
    full = await house.client.embeddings.create(model="tiny", input=[5, 6], dimensions=8)
    assert full.data[0].embedding == vector([5, 6])
    assert cut(struct.pack("<2f", 0.0, 1.0), 1) == struct.pack("<f", 0.0)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"input": [1, 2, 3, 4], "truncate_prompt_tokens": 3}, (1, 2, 3)),
        ({"input": [1, 2, 3, 4], "truncate_prompt_tokens": 3, "truncation_side": "left"}, (2, 3, 4)),
        ({"input": [[1, 2, 3, 4]], "truncate_prompt_tokens": 5}, (1, 2, 3, 4)),
        ({"input": [7] * 513, "truncate_prompt_tokens": -1}, (7,) * 512),
        ({"input": [7] * 512}, (7,) * 512),
    ],
)
async def test_truncation(open_house: Any, given: Any, sent: Any) -> None:
    house = await open_house()
    assert (await house.http.post(PATH, json=ROUTE | given)).status_code == 200
    (embed,) = embeds(house.workers["prefill-0"])
    assert embed.token_ids == sent


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": [[]]}, "input[0]"),
    ({"input": [[1], []]}, "input[1]"),
    ({"input": [1, "a"]}, "input[1]"),
    ({"input": [1.5]}, "input[0]"),
    ({"input": [-1]}, "input[0]"),
    ({"input": [400]}, "input"),
    ({"input": [[1], [400]]}, "input[1]"),
    ({"input": None}, "input"),
    ({"input": {"a": 1}}, "input"),
    ({"input": [7] * 513}, "input"),
    ({"input": [[1], [7] * 513]}, "input[1]"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": [[7] * 500] * 601}, "input"),
    ({"input": "a", "dimensions": 9}, "dimensions"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": "8"}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"input": "a", "truncation_side": "left"}, "truncation_side"),
    ({"input": "a", "user": "x" * 513}, "user"),
    ({"input": "a", "priority": -1}, "priority"),
    ({"input": "a", "stream": True}, "stream"),
    ({"input": "a", "messages": []}, "messages"),
]


async def test_refusals_name_the_field(doorstep: Any) -> None:
    for body, param in BAD:
        response = await doorstep.http.post(PATH, json=ROUTE | body)
        assert response.status_code == 400, (body, response.text)
        error = response.json()["error"]
        assert error["param"] == param, body
        assert error["message"]
    long = (await doorstep.http.post(PATH, json=ROUTE | {"input": [7] * 513})).json()["error"]
    assert long["code"] == "context_length_exceeded"
    other = await doorstep.http.post(PATH, json={"model": "other", "input": "a"})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    assert (await doorstep.http.get(PATH)).status_code == 405
    assert await doorstep.outcomes() == {"rejected": len(BAD) + 2}


async def test_nobody_is_there(open_house: Any) -> None:
    house = await open_house(decode=0, prefill=0)
    response = await house.http.post(PATH, json=ROUTE | {"input": "a"})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


async def test_a_lost_worker_is_followed_by_another_and_at_last_by_who_decodes(open_house: Any) -> None:
    house = await open_house(prefill=2, index_budget_s=1)
    first, second = house.workers["prefill-0"], house.workers["prefill-1"]

    def die(worker: ScriptedWorker) -> Any:
        def dying(message: Embed) -> Message | None:
            worker.kill()
            return None

        return dying

    first.embedding, second.embedding = die(first), die(second)
    response = await house.http.post(PATH, json=ROUTE | {"input": [[5, 6], [7]], "encoding_format": "float"})
    assert response.status_code == 200
    assert [one["embedding"] for one in response.json()["data"]] == [vector([5, 6]), vector([7])]
    assert response.headers["x-tandem-prefill-worker"] == "decode-0"
    names = [one.request_id for one in embeds(first) + embeds(second) + embeds(house.workers["decode-0"])]
    assert len(names) == len(set(names)), "a late answer could be taken for another"
    value = house.gateway.metrics.registry.get_sample_value
    assert value("tandem_migrations_total", {"reason": "prefill_lost"}) >= 2
    assert await house.outcomes() == {"ok": 1}


async def test_who_refused_is_not_asked_again(open_house: Any) -> None:
    house = await open_house(prefill=2)
    refusing = house.workers["prefill-0"]
    refusing.embedding = lambda message: Failed(request_id=message.request_id, message="no", retryable=True)
    house.gateway.workers.get("prefill-1").account.charge(num_tokens=1_000_000)  # so it never is the first choice
    assert (await house.http.post(PATH, json=ROUTE | {"input": [5]})).status_code == 200
    assert (len(embeds(refusing)), len(embeds(house.workers["prefill-1"]))) == (1, 1)


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        ({"retryable": False, "code": "internal_error"}, 500, "internal_error"),
        ({"retryable": False, "code": "invalid_request", "param": "input"}, 400, "invalid_request"),
        ({"retryable": True}, 503, "service_unavailable"),
    ],
)
async def test_what_a_worker_refuses(open_house: Any, failure: Any, status: int, code: str) -> None:
    house = await open_house()
    for worker in house.workers.values():
        worker.embedding = lambda message: Failed(request_id=message.request_id, message="no", **failure)
    response = await house.http.post(PATH, json=ROUTE | {"input": [[5], [6], [7]]})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert await house.outcomes() == {"rejected" if status == 400 else "failed": 1}


async def test_a_client_that_leaves_cancels_what_it_asked_for(open_house: Any) -> None:
    house = await open_house()
    worker = house.workers["prefill-0"]
    worker.embedding = lambda message: None
    asking = asyncio.create_task(house.http.post(PATH, json=ROUTE | {"input": [[5], [6], [7]]}))
    await house.until(lambda: len(embeds(worker)) == 3)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await house.until(lambda: sum(isinstance(message, Cancel) for message in worker.received) == 3)
    assert await house.outcomes() == {"cancelled": 1}
    link = house.gateway.workers.get("prefill-0")
    assert link.account.num_prefill_tokens == house.gateway.admission.num_prompt_tokens == 0


@pytest.mark.parametrize(("settings", "expected"), [({}, 10), ({"max_in_flight": 3}, 3)])
async def test_a_large_request_gives_workers_no_more_than_they_need(
    open_house: Any, settings: Any, expected: int
) -> None:
    """Two steps of 512 tokens for the one reader; what follows is sent as answers come."""
    house = await open_house(**settings)
    worker = house.workers["prefill-0"]
    held: list[Embed] = []
    most = 0

    def answer(message: Embed) -> Message | None:
        nonlocal most
        held.append(message)
        most = max(most, len(held))
        asyncio.get_running_loop().call_later(0.001, release)
        return None

    def release() -> None:
        (connection,) = worker._connections
        connection.send(scripted_embedding(held.pop(0)))

    worker.embedding = answer
    response = await house.client.embeddings.create(model="tiny", input=[[n % 400] * 100 for n in range(64)])
    assert [one.embedding for one in response.data] == [vector([n % 400] * 100) for n in range(64)]
    assert most == expected


async def test_priority_and_retention_reach_the_worker(open_house: Any) -> None:
    house = await open_house()
    await house.client.embeddings.create(
        model="tiny", input=[5], extra_body={"priority": 7, "kv_retention": {"priority": 80}}
    )
    (embed,) = embeds(house.workers["prefill-0"])
    assert (embed.priority, embed.retention.priority) == (7, 80)


async def test_tenants_and_usage_of_caches(open_house: Any) -> None:
    house = await open_house(api_keys=("one", "two"))
    for key in ("one", "two"):
        headers = {"authorization": f"Bearer {key}"}
        assert (await house.http.post(PATH, json=ROUTE | {"input": [5]}, headers=headers)).status_code == 200
    salts = {one.salt for one in embeds(house.workers["prefill-0"])}
    assert len(salts) == 2
    assert "" not in salts
    worker = house.workers["prefill-0"]
    cached = CachedTokens(pool=3, host=2)
    worker.embedding = lambda message: msgspec.structs.replace(scripted_embedding(message), cached=cached)
    await house.http.post(PATH, json=ROUTE | {"input": [5] * 9})
    value = house.gateway.metrics.registry.get_sample_value
    assert value("tandem_cached_tokens_total", {"source": "prefill"}) == 3
    assert value("tandem_cached_tokens_total", {"source": "host"}) == 2


def test_who_reads() -> None:
    slow = Speeds(prefill_token_s=1.0)
    workers = [
        WorkerView("d", "decode"),
        WorkerView("a", "aggregated"),
        WorkerView("p", "prefill", speeds=slow, unpaired=frozenset({"q"})),
        WorkerView("q", "prefill", speeds=slow, num_waiting_tokens=50),
    ]
    request = RequestView(num_prompt_tokens=100)

    def chosen(*avoid: str, view: RequestView = request) -> str | None:
        choice = choose_reader(view, workers, set(avoid))
        return None if choice is None else choice.worker.worker_id

    assert chosen() == "p"
    assert chosen(view=RequestView(num_prompt_tokens=100, overlap={"q": 3})) == "q"
    assert chosen("p") == "q"
    assert chosen("p", "q") == "a"
    assert chosen("p", "q", "a") == "d"
    assert chosen("p", "q", "a", "d") is None
