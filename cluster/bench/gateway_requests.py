"""What a gateway does with a request before a worker hears of it, part by part, timed in this process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tandem.cluster.bench.prompts import WORDS
from tandem.cluster.bench.router_workers import StandingWorkers
from tandem.cluster.bench.statistics import percentiles
from tandem.router.config import GatewayConfig
from tandem.router.dispatch import Dispatcher, Generation
from tandem.router.metrics import RouterMetrics
from tandem.router.openai import chat
from tandem.router.tokenizer import Tokenizer
from tandem.workers.block_key import block_keys, root_key

NUM_WORKERS = 8
"""Four that prefill and four that decode, for the policy to choose from."""
KEY = b"cluster key of the bench"


@dataclass(frozen=True, slots=True)
class Parts:
    """One length of prompt. CPU seconds of this thread, medians."""

    prompt_tokens: int
    parse_s: float
    """The body: JSON, and every field checked."""
    template_s: float
    tokenise_s: float
    hash_s: float
    """Names of the prompt's blocks."""
    route_s: float
    """The policy and the books; without asking an index, which takes no CPU time of the gateway to speak of."""
    rest_s: float
    """Of making a plan: tools, stops, sampling, guards against control tokens."""


def words(count: int) -> str:
    """A text of about so many tokens."""
    return " ".join((WORDS * (count // len(WORDS) + 1))[:count])


def measure_parts(tokenizer: Tokenizer, folder: Path, prompt_tokens: int, rounds: int) -> Parts:
    """Each part so many times, in turn, for a chat of about `prompt_tokens` tokens. `folder`: the tokenizer's."""
    text = words(prompt_tokens)
    messages = [{"role": "user", "content": text}]
    body = msgspec.json.encode({"model": "bench", "messages": messages, "stream": True, "max_tokens": 64})
    config = GatewayConfig(model_name="bench", tokenizer_folder=folder, max_model_len=1 << 20, cluster_key=KEY)
    workers = StandingWorkers(NUM_WORKERS, random.Random(0))
    dispatcher = Dispatcher(config, workers, None, RouterMetrics(list))
    identity = workers.identity()
    root = root_key(KEY, identity, "")

    asked = chat.parse(body)
    rendered = tokenizer.render_chat(messages)
    request = asked.plan(tokenizer, config).requests("bench")[0]
    generation = Generation(dispatcher, request, timeout_s=600.0)
    times: dict[str, list[float]] = {}

    def time_once(name: str, work: Callable[[], Any]) -> None:
        began = time.thread_time()
        work()
        times.setdefault(name, []).append(time.thread_time() - began)

    def book() -> None:
        generation.book()
        generation.close()

    _look_up_without_index(generation)
    for _ in range(rounds):
        time_once("parse", lambda: chat.parse(body))
        time_once("template", lambda: tokenizer.render_chat(messages))
        time_once("tokenise", lambda: tokenizer.encode(rendered, add_special_tokens=False))
        time_once("plan", lambda: asked.plan(tokenizer, config))
        time_once("hash", lambda: block_keys(KEY, root, request.prompt_token_ids, identity.block_size))
        time_once("route", book)
    median = {name: _median(taken) for name, taken in times.items()}
    return Parts(
        prompt_tokens=len(request.prompt_token_ids),
        parse_s=median["parse"],
        template_s=median["template"],
        tokenise_s=median["tokenise"],
        hash_s=median["hash"],
        route_s=median["route"],
        rest_s=max(0.0, median["plan"] - median["template"] - median["tokenise"]),
    )


def _look_up_without_index(generation: Generation) -> None:
    """`look_up` never waits where there is no index."""
    try:
        generation.look_up().send(None)
    except StopIteration:
        return
    raise AssertionError("a look-up without an index waited")


def _median(values: list[float]) -> float:
    found = percentiles(values)
    assert found is not None
    return found.p50
