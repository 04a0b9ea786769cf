"""One request's answer while it is being made: as a stream of events, or whole at the end.

Both take the same tokens through the same `Answer`s, so they say the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from starlette.types import Send

from tandem.router.errors import ApiError
from tandem.router.http import send_error, send_json
from tandem.router.metrics import RouterMetrics
from tandem.router.openai import sse
from tandem.router.output import Answer, Delta
from tandem.router.plan import Plan
from tandem.router.tokenizer import Tokenizer
from tandem.workers.protocol import Started
from tandem.workers.types import TokenChunk


class Format(Protocol):
    """The shapes of one endpoint (`chat.ChatFormat`, `completions.CompletionFormat`)."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int, prompt: Sequence[int]) -> dict[str, Any] | None: ...
    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]: ...
    def choice(self, index: int, total: Delta, prompt: Sequence[int]) -> dict[str, Any]: ...
    def extras(self) -> Mapping[str, Any]: ...


class Reply:
    """What a stream and a whole answer have in common: the answers, the counts, the headers."""

    def __init__(
        self,
        *,
        plan: Plan,
        tokenizer: Tokenizer,
        form: Format,
        model: str,
        request_id: str,
        unique_id: str,
        send: Send,
        metrics: RouterMetrics,
        arrived: float,
    ) -> None:
        self._plan = plan
        self._form = form
        self._send = send
        self._metrics = metrics
        self._arrived = arrived
        """`time.perf_counter` when the request came in."""
        self._model = model
        self._id = form.id_prefix + unique_id
        self._created = int(time.time())
        self._headers: list[tuple[str, str]] = [("x-request-id", request_id)]
        self._started: dict[int, Started] = {}
        """By prompt; where a request was moved, its first start counts."""
        self._answers = {
            (position, index): Answer(tokenizer, prompt, plan.stop, plan.sampling.stop_token_ids)
            for position, prompt in enumerate(plan.prompts)
            for index in range(plan.num_choices)
        }
        self._token_times: dict[tuple[int, int], float] = {}
        self.has_begun = False
        """True once the status line is out: from then on an error can only be an event."""

    async def started(self, position: int, event: Started) -> None:
        """A prompt is about to be answered."""
        if position in self._started:
            return
        is_first = not self._started
        self._started[position] = event
        self._metrics.prompt_tokens.inc(len(self._plan.prompts[position]))
        if is_first:
            self._headers += [
                ("x-tandem-prefill-worker", event.prefill_worker),
                ("x-tandem-decode-worker", event.decode_worker),
                ("x-tandem-prefill-path", event.path),
            ]
            await self._begin()

    async def tokens(self, position: int, chunks: Sequence[TokenChunk]) -> list[int]:
        """Returns the choices that a stop string has ended."""
        cut: list[int] = []
        news: list[tuple[int, int, Delta]] = []
        for chunk in chunks:
            answer = self._answers[position, chunk.choice]
            delta = answer.push(chunk)
            self._observe(position, chunk.choice, len(delta.token_ids))
            news.append((position, chunk.choice, delta))
            if answer.is_cut:
                cut.append(chunk.choice)
        await self._show(news)
        return cut

    async def done(self) -> None:
        """Everything is answered."""
        raise NotImplementedError

    async def fail(self, error: ApiError) -> None:
        """The one thing that is said of a request that could not be served."""
        raise NotImplementedError

    async def _begin(self) -> None:
        """The headers are complete."""

    async def _show(self, news: Sequence[tuple[int, int, Delta]]) -> None:
        """(prompt, choice, what was added), in order."""

    def _index(self, position: int, choice: int) -> int:
        return position * self._plan.num_choices + choice

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(prompt) for prompt in self._plan.prompts)
        completion = sum(len(answer.total.token_ids) for answer in self._answers.values())
        cached = sum(event.cached.total for event in self._started.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _observe(self, position: int, choice: int, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        now = time.perf_counter()
        before = self._token_times.get((position, choice))
        if before is not None:
            self._metrics.inter_token_latency.observe((now - before) / num_tokens)
        elif not self._token_times:
            self._metrics.time_to_first_token.observe(now - self._arrived)
        self._token_times[position, choice] = now
        self._metrics.generation_tokens.inc(num_tokens)


class WholeReply(Reply):
    """One JSON object at the end."""

    async def done(self) -> None:
        choices = [
            self._form.choice(self._index(position, choice), answer.total, self._plan.prompts[position])
            for (position, choice), answer in self._answers.items()
        ]
        body = {
            "id": self._id,
            "object": self._form.whole_object,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": self._usage(),
            **self._form.extras(),
        }
        self.has_begun = True
        await send_json(self._send, 200, body, self._headers)

    async def fail(self, error: ApiError) -> None:
        if not self.has_begun:
            self.has_begun = True
            await send_error(self._send, error, self._headers)


class StreamReply(Reply):
    """Server-sent events, written straight to ASGI: a chunk is one JSON object, and a frame of chunks one write."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        envelope = {"id": self._id, "object": self._form.chunk_object, "created": self._created, "model": self._model}
        self._writer = sse.ChunkWriter(envelope, shows_usage=self._plan.include_usage)
        self._begun = asyncio.Event()
        """Prompts start independently of each other, and none may write before the headers."""

    async def _begin(self) -> None:
        self.has_begun = True
        headers = sse.HEADERS + [(name.encode(), value.encode("latin-1")) for name, value in self._headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        openings = b""
        for position, choice in self._answers:
            opening = self._form.opening(self._index(position, choice), self._plan.prompts[position])
            if opening is not None:
                openings += self._writer.chunk(opening, self._form.extras())
        await self._write(openings)
        self._begun.set()

    async def _show(self, news: Sequence[tuple[int, int, Delta]]) -> None:
        await self._begun.wait()
        await self._write(
            b"".join(
                self._writer.chunk(choice)
                for position, index, delta in news
                for choice in self._form.chunks(self._index(position, index), delta)
            )
        )

    async def done(self) -> None:
        last = self._writer.usage(self._usage()) if self._plan.include_usage else b""
        await self._write(last + sse.DONE, is_last=True)

    async def fail(self, error: ApiError) -> None:
        if not self.has_begun:
            self.has_begun = True
            await send_error(self._send, error, self._headers)
        else:
            await self._write(sse.error(error) + sse.DONE, is_last=True)

    async def _write(self, content: bytes, *, is_last: bool = False) -> None:
        if content or is_last:
            await self._send({"type": "http.response.body", "body": content, "more_body": not is_last})


class PromptSink:
    """The part of a reply that belongs to one of its prompts."""

    def __init__(self, reply: Reply, position: int) -> None:
        self._reply = reply
        self._position = position

    async def started(self, event: Started) -> None:
        await self._reply.started(self._position, event)

    async def tokens(self, chunks: Sequence[TokenChunk]) -> Sequence[int]:
        return await self._reply.tokens(self._position, chunks)
