"""Embeddings of a whole corpus from a cluster, and what those feel who chat meanwhile.

python tests/bench/embeddings.py [MODEL] [--inputs 512] [--tokens 100] [ARGUMENTS OF tandem serve ...]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from typing import Any

import httpx

from tandem.cluster.bench.server_process import serving

CHAT_TOKENS = 300


async def corpus(
    http: httpx.AsyncClient, model: str, num_inputs: int, num_tokens: int, seed: int, priority: int = 0
) -> float:
    """Tokens per second."""
    chooser = random.Random(seed)
    inputs = [[chooser.randrange(3, 40_000) for _ in range(num_tokens)] for _ in range(num_inputs)]
    began = time.perf_counter()
    body = {"model": model, "input": inputs, "encoding_format": "base64", "priority": priority}
    response = await http.post("/v1/embeddings", json=body)
    response.raise_for_status()
    return num_inputs * num_tokens / (time.perf_counter() - began)


async def first_token_s(http: httpx.AsyncClient, model: str, seed: int) -> float:
    prompt = [random.Random(seed + number).randrange(3, 40_000) for number in range(CHAT_TOKENS)]
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "stream": True}
    began = time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                return time.perf_counter() - began
    raise RuntimeError("no token came")


async def first_tokens_s(
    http: httpx.AsyncClient, model: str, seed: int, until: asyncio.Future[Any] | None
) -> list[float]:
    """One after another, 12 of them, or while `until` is not done."""
    given: list[float] = []
    while len(given) < 12 if until is None else not until.done():
        seed += 1000
        given.append(await first_token_s(http, model, seed))
    return given


def told(what: str, values: list[float]) -> str:
    median, most = 1000 * statistics.median(values), 1000 * max(values)
    return f"first token, {CHAT_TOKENS} tokens, {what}: median {median:.0f} ms, most {most:.0f} ms, of {len(values)}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--inputs", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=100)
    given, arguments = parser.parse_known_args()
    async with (
        serving([given.model, "--prefill", "1", "--decode", "1", *arguments]) as server,
        httpx.AsyncClient(base_url=server.url, timeout=600) as http,
    ):
        name = (await http.get("/v1/models")).json()["data"][0]["id"]
        await corpus(http, name, 32, given.tokens, seed=1)  # speeds are learned
        speeds = [await corpus(http, name, given.inputs, given.tokens, seed) for seed in (2, 3, 4)]
        lines = [f"{given.inputs} inputs of {given.tokens} tokens: {', '.join(f'{s:,.0f}' for s in speeds)} tokens/s"]
        lines.append(told("alone", await first_tokens_s(http, name, 5, None)))
        for priority in (0, 1):
            reading = asyncio.create_task(corpus(http, name, 2 * given.inputs, given.tokens, 6 + priority, priority))
            beside = await first_tokens_s(http, name, 7 + 100 * priority, reading)
            lines.append(told(f"beside a corpus of priority {priority} ({await reading:,.0f} tokens/s)", beside))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
