"""A client of a running cluster that notes everything it is told, and looks at the workers behind it."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Told:
    """All that one request was told, by choice."""

    token_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    text: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    finish: dict[int, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    status: int = 0
    ended: list[str] = field(default_factory=list)
    """Every terminal thing that was said: "[DONE]", "error", "status". """

    @property
    def outcome(self) -> tuple[Any, ...]:
        assert self.error is None, self.error
        assert self.ended == ["[DONE]"]
        return dict(self.token_ids), dict(self.logprobs), dict(self.text), self.finish


class Cluster:
    """`tandem serve` seen by one asyncio client."""

    def __init__(self, serving: Any, http: httpx.AsyncClient, *, num_workers: int = 2) -> None:
        self.serving = serving
        self.http = http
        self.num_workers = num_workers

    def body(self, number: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
        """A completion with a prompt of its own, sampled with a seed, streamed."""
        prompt = [3 + (number * 7919 + position * 104_729) % 40_000 for position in range(num_tokens)]
        defaults = {"max_tokens": 40, "temperature": 0.8, "seed": number, "logprobs": 1, "ignore_eos": True}
        fixed = {"model": self.serving.model, "prompt": prompt, "stream": True, "return_token_ids": True}
        return defaults | fixed | fields

    async def ask(self, body: dict[str, Any], *, on_token: Callable[[], Awaitable[None]] | None = None) -> Told:
        told = Told()
        async with self.http.stream("POST", f"{self.serving.url}/v1/completions", json=body) as response:
            told.status, told.headers = response.status_code, dict(response.headers)
            if response.status_code != 200:
                told.error = json.loads(await response.aread())["error"]
                told.ended.append("status")
                return told
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    _note(told, line.removeprefix("data: "))
                    if on_token is not None:
                        await on_token()
        return told

    def state(self) -> dict[str, dict[str, Any]]:
        return {worker["id"]: worker for worker in self.serving.cluster()["workers"]}

    def metric(self, name: str) -> float:
        """Sum over all label values."""
        lines = httpx.get(f"{self.serving.admin_url}/metrics", timeout=10).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def count(self, name: str) -> float:
        """Requests that have started, or ended in one way, as in `{outcome="ok"}`."""
        text = httpx.get(f"{self.serving.admin_url}/metrics", timeout=10).text
        series = "tandem_requests_started_total" if name == "started" else f"tandem_requests_total{name}"
        return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{series} ")), 0.0)

    async def until(self, question: Callable[[], bool], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not await asyncio.to_thread(question):
            assert time.monotonic() < end, "waited in vain"
            await asyncio.sleep(0.05)

    def is_whole(self) -> bool:
        cluster = self.serving.cluster()
        states = [worker["state"] for worker in cluster["workers"]]  # a dead worker is not listed
        gateways = [gateway["state"] for gateway in cluster.get("gateways", ())]
        return states == ["ready"] * self.num_workers and set(gateways) <= {"ready"}

    def is_at_rest(self) -> bool:
        """No block of any worker that is up is used."""
        blocks = [worker["blocks"] for worker in self.state().values() if worker["state"] == "ready"]
        return all(block["used"] == block["incoming"] == block["quarantined"] == 0 for block in blocks)


def _note(told: Told, data: str) -> None:
    if data == "[DONE]":
        told.ended.append("[DONE]")
        return
    event = json.loads(data)
    if "error" in event:
        told.error = event["error"]
        return
    for choice in event["choices"]:
        index = choice["index"]
        told.token_ids[index] += choice.get("token_ids") or []
        told.text[index] += choice["text"]
        if choice.get("logprobs"):
            told.logprobs[index] += choice["logprobs"]["token_logprobs"]
        if choice["finish_reason"] is not None:
            assert index not in told.finish, "a choice ended twice"
            told.finish[index] = choice["finish_reason"]
