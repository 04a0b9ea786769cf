"""One request to an OpenAI-compatible server, streamed and timed. Failures are results here, not exceptions."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tandem.cluster.bench.statistics import Histogram, RequestRecord
from tandem.workers.errors import UserError

Api = Literal["completions", "chat"]
Messages = list[dict[str, str]]
Prompt = str | list[int] | Messages
"""Text or token ids for completions; text or a whole conversation for chat."""


class _Failure(Exception):
    """A request that failed; the message is the kind of failure."""


@dataclass(slots=True)
class Answer:
    """What the model said: for the next turn of a conversation."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Empty unless the request asked for them with `return_token_ids`."""


@dataclass(slots=True)
class _Progress:
    """What one request has brought so far."""

    answer: Answer = field(default_factory=Answer)
    token_times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    is_finished: bool = False


class OpenAIClient:
    """Sends requests and measures them. `start` is the moment of the run that records count from."""

    def __init__(
        self, http: httpx.AsyncClient, *, api: Api, model: str, extra: dict[str, Any], timeout_s: float, start: float
    ) -> None:
        self._http = http
        self._api = api
        self._model = model
        self._extra = extra
        self._timeout_s = timeout_s
        self._start = start

    def restart_clock(self, start: float) -> None:
        """Moments of later records count from `start` (of `time.perf_counter`)."""
        self._start = start

    async def measure(
        self, number: int, scheduled_s: float, prompt: Prompt, output_len: int, *, turn: int = 0, reusable: float = 0.0
    ) -> tuple[RequestRecord, Answer]:
        """Always returns a record, also when cancelled: with the error "interrupted"."""
        progress = _Progress()
        error: str | None = None
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(prompt, output_len, progress)
        except _Failure as failure:
            error = str(failure)
        except TimeoutError:
            error = "timeout"
        except asyncio.CancelledError:
            error = "interrupted"
        except httpx.ConnectError:
            error = "connection refused"
        except httpx.HTTPError as broken:
            error = f"connection: {type(broken).__name__}"
        record = self._record(number, scheduled_s, started, time.perf_counter(), error, progress)
        return replace(record, turn=turn, reusable_share=reusable), progress.answer

    async def _stream(self, prompt: Prompt, output_len: int, progress: _Progress) -> None:
        path = "/v1/chat/completions" if self._api == "chat" else "/v1/completions"
        async with self._http.stream("POST", path, json=self._body(prompt, output_len)) as response:
            if response.status_code != 200:
                await response.aread()
                raise _Failure(f"HTTP {response.status_code}")
            async for data in _events(response):
                if data == "[DONE]":
                    progress.is_finished = True
                    return
                self._take(data, progress)
        if not progress.is_finished:
            raise _Failure("stream ended early")

    def _body(self, prompt: Prompt, output_len: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        else:
            body["prompt"] = prompt
        return body | self._extra

    def _take(self, data: str, progress: _Progress) -> None:
        try:
            event = json.loads(data)
            if "error" in event:
                raise _Failure(f"error event: {event['error'].get('code') or event['error'].get('type')}")
            progress.usage = event.get("usage") or progress.usage
            for choice in event.get("choices") or ():
                if self._brings_token(choice):
                    progress.token_times.append(time.perf_counter())
                delta = choice.get("delta") or {}
                progress.answer.text += choice.get("text") or delta.get("content") or ""
                progress.answer.token_ids += choice.get("token_ids") or ()
                progress.is_finished = progress.is_finished or choice.get("finish_reason") is not None
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise _Failure("malformed event") from error

    def _brings_token(self, choice: dict[str, Any]) -> bool:
        """A completion's event may carry a token without text (half a character); a chat's first event carries none."""
        if self._api == "completions":
            return bool(choice.get("text")) or choice.get("finish_reason") is None
        delta = choice.get("delta") or {}
        return bool(delta.get("content") or delta.get("reasoning_content"))

    def _record(
        self, number: int, scheduled_s: float, started: float, ended: float, error: str | None, progress: _Progress
    ) -> RequestRecord:
        times = progress.token_times
        details = progress.usage.get("prompt_tokens_details") or {}
        return RequestRecord(
            number=number,
            scheduled_s=scheduled_s,
            started_s=started - self._start,
            ended_s=ended - self._start,
            error=error,
            ttft_s=times[0] - started if times else None,
            gaps_s=tuple(later - earlier for earlier, later in pairwise(times)),
            prompt_tokens=progress.usage.get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens"),
            output_tokens=progress.usage.get("completion_tokens", len(times)),
        )


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each server-sent event. Events of more than one data line do not occur in this API."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield line[5:].strip()


async def first_model(http: httpx.AsyncClient) -> str:
    """The first model that the server lists. Raises `UserError` when it cannot be had."""
    try:
        response = await http.get("/v1/models", timeout=10.0)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise UserError(f"{http.base_url}v1/models answers HTTP {error.response.status_code}") from error
    except httpx.HTTPError as error:
        raise UserError(f"{http.base_url} does not answer: {type(error).__name__}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"{http.base_url}v1/models lists no model; name one with --model") from error


async def scrape_histogram(admin_url: str, name: str) -> Histogram | None:
    """A histogram of a /metrics page, summed over its labels; None when it is not to be had."""
    try:
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as http:
            response = await http.get(admin_url.rstrip("/") + "/metrics")
            response.raise_for_status()
        return parse_histogram(response.text, name)
    except (httpx.HTTPError, ValueError):
        return None


def parse_histogram(text: str, name: str) -> Histogram | None:
    """A histogram of a page of metrics, summed over its labels; None if it is not there. Raises `ValueError`."""
    counts: dict[float, float] = {}
    total = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{name}_bucket":
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
            elif sample.name == f"{name}_sum":
                total += sample.value
    if not counts:
        return None
    bounds = tuple(sorted(counts))
    return Histogram(bounds, tuple(counts[bound] for bound in bounds), total)
