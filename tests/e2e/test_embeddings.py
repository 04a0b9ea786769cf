"""Embeddings of a real cluster through the real client."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.cluster

TEXTS = ["The river runs past the old mill.", "A stream flows by an old mill.", "Stock prices fell on Tuesday.", "🙂"]
LONG = "The river runs through the valley and past the old mill. " * 40


def dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


async def test_the_clients_view(serving: Any) -> None:
    common = {"base_url": f"{serving.url}/v1", "api_key": "none", "max_retries": 0}
    with openai.OpenAI(**common) as client:
        given = client.embeddings.create(model=serving.model, input=TEXTS)
        plain = client.embeddings.create(model=serving.model, input=TEXTS, encoding_format="float")
    assert given.model_dump() == plain.model_dump()
    vectors = [one.embedding for one in given.data]
    assert all(math.isclose(math.hypot(*vector), 1, abs_tol=1e-5) for vector in vectors)
    assert dot(vectors[0], vectors[1]) > dot(vectors[0], vectors[2])
    async with openai.AsyncOpenAI(**common) as client:
        alone = await asyncio.gather(*(client.embeddings.create(model=serving.model, input=each) for each in TEXTS))
        assert [one.data[0].embedding for one in alone] == vectors
        short = await client.embeddings.create(model=serving.model, input=TEXTS[0], dimensions=64)
        assert len(short.data[0].embedding) == 64


async def test_nothing_stays_of_a_client_that_leaves(serving: Any) -> None:
    def used() -> int:
        return sum(worker["blocks"]["used"] for worker in serving.cluster()["workers"])

    async with httpx.AsyncClient(timeout=60) as http:
        body = {"model": serving.model, "input": [f"{number} {LONG}" for number in range(64)]}
        asking = asyncio.create_task(http.post(f"{serving.url}/v1/embeddings", json=body))
        while not await asyncio.to_thread(used):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    async with asyncio.timeout(5):
        while await asyncio.to_thread(used):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
