"""POST /v1/embeddings as an ASGI application: all inputs of a request are read beside each other, so many at a time
that the workers are busy and others' prompts are not kept waiting for the whole of a large request.
"""

from __future__ import annotations

import asyncio
import math
import struct
from base64 import b64encode
from collections.abc import Sequence

import msgspec

from tandem.router.embedding import READERS, Read, Text
from tandem.router.http import encode_json, send_json
from tandem.router.journey import mark, trace_headers
from tandem.router.openai.embeddings import EmbeddingPlan, parse
from tandem.router.openai.endpoint import Endpoint, Exchange, House, check_model, in_a_thread_if_large
from tandem.router.tenants import cache_salt
from tandem.router.window import Window

MAX_AT_ONCE = 64
"""Inputs of one request that workers have at the same time; so many sequences it counts for at the door."""
STEPS_AHEAD = 2
"""How many steps' worth of tokens each reader is given at a time: one that it computes and one that is ready. More
would only make those wait who come later."""
MAX_NAMED_WORKERS = 16


class EmbeddingEndpoint(Endpoint):
    """See the module."""

    async def _answer(self, exchange: Exchange, body: bytes) -> None:
        house = exchange.house
        plan = await in_a_thread_if_large(body, self._prepare, house, body)
        mark("prepared", num_prompts=len(plan.inputs), num_prompt_tokens=plan.num_tokens)
        requests = plan.requests(
            exchange.unique_id, cache_salt(house.config.cluster_key, exchange.caller, plan.cache_salt)
        )
        num_at_once = min(len(requests), MAX_AT_ONCE, house.config.max_in_flight)
        with house.admission.admit(num_at_once, plan.num_tokens):
            uses_cache = not house.pooling.reads_whole
            texts = [Text(house.dispatcher, request, uses_cache=uses_cache) for request in requests]
            try:
                if house.gate.has_limits:
                    await _enter(texts, exchange, plan.priority)
                exchange.is_admitted = True
                reads, shown = await self._read_all(house, plan, texts, num_at_once)
            finally:
                for text in texts:
                    text.close()
        headers = [("x-request-id", exchange.request_id), *trace_headers(), ("x-tandem-prefill-worker", _names(reads))]
        usage = {"prompt_tokens": plan.num_tokens, "total_tokens": plan.num_tokens}
        answer = {"object": "list", "data": shown, "model": house.config.model_name, "usage": usage}
        await send_json(exchange.send, 200, answer, headers)

    def _prepare(self, house: House, body: bytes) -> EmbeddingPlan:
        asked = parse(body)
        check_model(asked.model, house.config)
        return asked.plan(house.tokenizer, house.config, house.pooling)

    async def _read_all(
        self, house: House, plan: EmbeddingPlan, texts: Sequence[Text], num_at_once: int
    ) -> tuple[list[Read], list[msgspec.Raw]]:
        """The first error ends the others and is raised. Each is written as it comes: a large answer is made in small
        pieces."""
        window = Window(_room(house), num_at_once)

        async def read(position: int, text: Text) -> tuple[Read, msgspec.Raw]:
            async with window.holding(text.num_tokens):
                done = await text.run()
            return done, _shown(position, done.answer.embedding, plan)

        tasks = [asyncio.create_task(read(position, text)) for position, text in enumerate(texts)]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [done for done, _ in results], [shown for _, shown in results]


async def _enter(texts: Sequence[Text], exchange: Exchange, priority: int) -> None:
    """Returns when the longest text is predicted to be read in time; what comes behind it waits for its own request
    alone. Raises `ApiError` 429."""
    longest = max(texts, key=lambda text: text.num_tokens)
    await longest.look_up()
    await exchange.house.gate.enter(longest.predict, longest.book, exchange.arrived, priority)


def _room(house: House) -> int:
    """Tokens that the readers there are now should have at a time."""
    chunks = {role: [0] for role in READERS}
    for link in house.dispatcher.workers.ready():
        chunks[link.address.role].append(link.account.view().chunk_tokens)
    return STEPS_AHEAD * next((sum(chunks[role]) for role in READERS if sum(chunks[role])), 1)


def _names(reads: Sequence[Read]) -> str:
    """Mostly one."""
    names = list(dict.fromkeys(read.worker_id for read in reads))
    return ", ".join(names[:MAX_NAMED_WORKERS])


def _shown(position: int, embedding: bytes, plan: EmbeddingPlan) -> msgspec.Raw:
    if plan.num_dimensions is not None:
        embedding = cut(embedding, plan.num_dimensions)
    shown = b64encode(embedding).decode("ascii") if plan.is_base64 else _numbers(embedding)
    return msgspec.Raw(encode_json({"object": "embedding", "index": position, "embedding": shown}))


def _numbers(embedding: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(embedding) // 4}f", embedding)


def cut(embedding: bytes, num_dimensions: int) -> bytes:
    """The first numbers, at length 1 again. All zeros stay so."""
    numbers = _numbers(embedding)[:num_dimensions]
    length = math.sqrt(math.fsum(number * number for number in numbers)) or 1.0
    return struct.pack(f"<{num_dimensions}f", *(number / length for number in numbers))
