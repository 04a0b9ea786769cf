"""`tandem bench parity`: the same requests through every way of serving must give the same answers, to the bit.

    {aggregated, disaggregated} x {chunks} x {alone, many at once}: a fresh server each, asked twice: cold, then cached

Compared are token ids, logprobs (as printed, with all digits), text, finish reasons, calls of tools, embeddings, and
token counts.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from tandem.cluster.bench.server_process import serving

LENGTHS = (
    *(1, 2, 17, 31, 32, 33, 63, 64, 65, 66, 96, 100, 127, 128, 129, 150, 200, 255, 256, 257),
    *(300, 384, 400, 450, 511, 512, 513, 600, 640, 700, 777, 900, 1000, 1023, 1024, 1100, 1300, 1500, 1777, 2000),
)
"""Prompt lengths, tokens: around the borders of blocks and chunks, up to 2,000."""
MOST_WORDS = 500
REQUEST_TIMEOUT_S = 300.0
CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
WORDS = ("river", "mill", "weather", "Bern", "Paris", "train", "seven", "blue", "why", "never", "Grüße", "🙂", "\n")
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PLACE}}]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "n": 2},
    {"temperature": 0, "stop": ["e", "\n"]},
    {"temperature": 0.7, "top_k": 40, "min_p": 0.02, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"temperature": 0.9, "structured_outputs": {"regex": "[a-f]{3,9}(-[0-9]{2}){2,5}"}, "max_tokens": 30},
    {"path": CHAT, "tools": TOOLS, "tool_choice": "required", "temperature": 0.8, "max_tokens": 60},
    {"path": EMBEDDINGS},
    {"temperature": 0, "max_tokens": 1},
    {"temperature": 0.9, "repetition_penalty": 1.2, "n": 2, "stop": "the"},
    {"temperature": 0.6, "echo": True, "prompt_logprobs": 2},
    {"beam_width": 3, "n": 2, "length_penalty": 0.5, "max_tokens": 10},
    {"path": CHAT, "response_format": {"type": "json_object"}, "logprobs": True, "top_logprobs": 3, "n": 2},
    {"path": CHAT, "prompt_logprobs": 1, "temperature": 0.5, "logit_bias": {"17": 4.0}},
    {"temperature": 0.5, "max_tokens": 40, "ignore_eos": True},
    {"path": CHAT, "tools": TOOLS, "temperature": 0, "n": 2},
    {"temperature": 1.1, "n": 3, "best_of": 4, "min_tokens": 6, "bad_words": ["the", "a"]},
    {"path": EMBEDDINGS, "encoding_format": "base64", "dimensions": 32},
]
"""What is asked, in turn: fields of a completion where there is no `path`."""

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """One way of serving, and of asking."""

    mode: str
    chunk: int
    concurrency: int
    is_cached: bool

    def __str__(self) -> str:
        crowd = "alone" if self.concurrency == 1 else f"{self.concurrency} at once"
        return f"{self.mode}, chunks of {self.chunk}, {crowd}, {'cached' if self.is_cached else 'cold'}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one way compares with the first. `difference` describes the first request that differs."""

    way: Way
    num_requests: int
    num_equal: int
    num_cached_tokens: int
    difference: str | None


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: where, and what."""

    path: str
    body: dict[str, Any]


def make_requests(num: int, model: str, vocab_size: int, seed: int) -> list[Ask]:
    """`num` requests, the kinds in turn, with prompts of 1 to 2,000 tokens (chats and beam searches: up to 500)."""
    chooser = random.Random(seed)
    positions = [round(index * (len(LENGTHS) - 1) / max(1, num - 1)) for index in range(num)]
    return [
        _ask(KINDS[index % len(KINDS)], index, LENGTHS[position], model, vocab_size, chooser)
        for index, position in enumerate(positions)
    ]


def _ask(
    kind: Mapping[str, Any], index: int, num_tokens: int, model: str, vocab_size: int, chooser: random.Random
) -> Ask:
    fields = dict(kind)
    path = fields.pop("path", "/v1/completions")
    prompt = [chooser.randrange(3, vocab_size) for _ in range(num_tokens)]
    common = {"model": model, "max_tokens": 12, "seed": chooser.randrange(1 << 31), "return_token_ids": True}
    if path == EMBEDDINGS:
        return Ask(path, {"model": model, "input": [prompt, prompt[::-1], prompt[:40]], **fields})
    if path == CHAT:
        words = " ".join(chooser.choices(WORDS, k=min(num_tokens, MOST_WORDS)))
        return Ask(path, common | {"messages": [{"role": "user", "content": words}]} | fields)
    if "beam_width" in fields:
        prompt = prompt[:MOST_WORDS]
    return Ask(path, common | {"prompt": prompt, "logprobs": index % 4} | fields)


async def compare_ways(
    model: str,
    *,
    num_requests: int,
    chunks: Sequence[int],
    concurrency: int,
    seed: int,
    vocab_size: int,
    arguments: Sequence[str] = (),
    on_outcome: Callable[[Outcome], None],
    on_progress: Callable[[str], None],
) -> list[Outcome]:
    """Run every way; the very first pass is what the others are compared with."""
    modes = {"aggregated": ("--aggregated", "1"), "disaggregated": ("--prefill", "1", "--decode", "1")}
    expected: list[Answer] | None = None
    outcomes: list[Outcome] = []
    for chunk, (mode, flags), crowd in itertools.product(chunks, modes.items(), (1, concurrency)):
        on_progress(f"starting: {mode}, chunks of {chunk}")
        flags_of_way = [model, *flags, "--max-num-batched-tokens", str(chunk), *arguments]
        async with serving(flags_of_way) as server, _client(server.url) as http:
            name = (await http.get("/v1/models")).json()["data"][0]["id"]
            asks = make_requests(num_requests, name, vocab_size, seed)
            for is_cached in (False, True):
                way = Way(mode, chunk, crowd, is_cached)
                on_progress(f"asking: {way}")
                answers = await _ask_all(http, asks, crowd)
                expected = answers if expected is None else expected
                outcomes.append(_compare(way, expected, answers))
                on_outcome(outcomes[-1])
    return outcomes


def show_outcomes(outcomes: Sequence[Outcome], console: Console) -> None:
    """A row per way, then the first difference of each way that has one."""
    table = Table(title="Parity: every way against the first", title_justify="left")
    for column in ("mode", "chunk", "at once", "prefix", "equal", "cached tokens"):
        table.add_column(column, justify="left" if column in ("mode", "prefix") else "right")
    for outcome in outcomes:
        way = outcome.way
        equal = f"{outcome.num_equal}/{outcome.num_requests}"
        prefix = "cached" if way.is_cached else "cold"
        cells = (way.mode, str(way.chunk), str(way.concurrency), prefix, equal, str(outcome.num_cached_tokens))
        table.add_row(*cells, style=None if outcome.difference is None else "bold red")
    console.print(table)
    for outcome in outcomes:
        if outcome.difference is not None:
            console.print(f"{outcome.way}: {outcome.difference}", markup=False, soft_wrap=True)


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S, trust_env=False)


async def _ask_all(http: httpx.AsyncClient, asks: Sequence[Ask], concurrency: int) -> list[Answer]:
    limit = asyncio.Semaphore(concurrency)

    async def ask(one: Ask) -> Answer:
        async with limit:
            response = await http.post(one.path, json=one.body)
        answer: Answer = response.json()
        return answer if response.status_code == 200 else {"error": answer, "usage": {}}

    return list(await asyncio.gather(*map(ask, asks)))


def _compare(way: Way, expected: Sequence[Answer], answers: Sequence[Answer]) -> Outcome:
    pairs = list(zip(expected, answers, strict=True))
    differences = [
        f"request {index}: {_comparable(want)} became {_comparable(got)}"
        for index, (want, got) in enumerate(pairs)
        if "error" in got or _comparable(want) != _comparable(got)
    ]
    num_cached = sum(_cached_tokens(answer) for answer in answers)
    return Outcome(way, len(pairs), len(pairs) - len(differences), num_cached, differences[0] if differences else None)


def _comparable(answer: Answer) -> Answer:
    """What must not depend on the way: everything but the names of this one answer and of its calls, and what was
    cached."""
    if "error" in answer:
        return answer
    usage = {name: count for name, count in answer["usage"].items() if not name.endswith("_details")}
    told = {name: value for name, value in answer.items() if name not in ("id", "created", "choices")}
    choices = [_without_call_ids(choice) for choice in answer.get("choices", ())]
    return {**told, "choices": choices, "usage": usage}


def _without_call_ids(choice: Answer) -> Answer:
    calls = choice.get("message", {}).get("tool_calls")
    if not calls:
        return choice
    named = [{name: value for name, value in call.items() if name != "id"} for call in calls]
    return {**choice, "message": {**choice["message"], "tool_calls": named}}


def _cached_tokens(answer: Answer) -> int:
    count: int = answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return count
