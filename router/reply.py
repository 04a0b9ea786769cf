"""One request's answer while it is being made: as a stream of events, or whole at the end.

Both take the same tokens through the same `Answer`s, so they say the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.types import Message, Send

from tandem.router.direct_write import DirectWriter
from tandem.router.errors import ApiError, Cancelled
from tandem.router.form import Form, Usage
from tandem.router.http import EVENT_STREAM_HEADERS, send_error, send_json
from tandem.router.journey import trace_headers
from tandem.router.metrics import RouterMetrics
from tandem.router.output import Answer, Delta
from tandem.router.patience import patience
from tandem.router.plan import Plan
from tandem.router.tokenizer import Tokenizer
from tandem.workers.protocol import Started
from tandem.workers.types import TokenChunk

MAX_WAITING_BYTES = 64 << 10
"""Tokens of one request that may wait for a client that does not read. As much again may be in what is being written,
and the server and the kernel have their own share (http_protocol.py): below 256 KiB in all."""

MANY_LOGPROBS = 1000
"""In a whole answer, which takes milliseconds from here on: it is made in a thread, or all streams would wait."""

Lane = Callable[[TokenChunk], Sequence[int] | None]


def nothing_now(chunk: TokenChunk) -> Sequence[int] | None:
    """A lane that is closed."""
    return None


class Reply:
    """What a stream and a whole answer have in common: the answers, the counts, the headers."""

    def __init__(
        self,
        *,
        plan: Plan,
        tokenizer: Tokenizer,
        form: Form,
        error_body: Callable[[ApiError], Mapping[str, Any]],
        request_id: str,
        send: Send,
        writer: DirectWriter | None,
        metrics: RouterMetrics,
        arrived: float,
    ) -> None:
        self._plan = plan
        self._form = form
        self._error_body = error_body
        self._send = send
        self._writer = writer
        self._metrics = metrics
        self._arrived = arrived
        """`time.perf_counter` when the request came in."""
        self._headers: list[tuple[str, str]] = [("x-request-id", request_id), *trace_headers()]
        self._started: dict[int, Started] = {}
        """By prompt; where a request was moved, its first start counts."""
        self._answers = {
            (position, index): Answer(tokenizer, prompt, plan.stop, plan.sampling.stop_token_ids, plan.showing)
            for position, prompt in enumerate(plan.prompts)
            for index in range(plan.num_choices)
        }
        self._has_tokens = False
        self.is_held_up = False
        """Seen from outside: it waits for its client to read."""
        self.has_begun = False
        """True once the status line is out: from then on an error can only be an event."""

    async def started(self, position: int, event: Started) -> None:
        """A prompt is about to be answered."""
        if position in self._started:
            return
        is_first = not self._started
        self._started[position] = event
        self._metrics.prompt_tokens.inc(len(self._plan.prompts[position]))
        if self._plan.scores_prompts:
            await asyncio.to_thread(self._form.take_prompt, position, event.prompt_logprobs)
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
        news: list[tuple[int, Answer, Delta]] = []
        for chunk in chunks:
            answer = self._answers[position, chunk.choice]
            delta = answer.push(chunk)
            self._observe(answer, len(delta.token_ids))
            news.append((self._index(position, chunk.choice), answer, delta))
            if answer.is_cut:
                cut.append(chunk.choice)
        await self._show(news)
        return cut

    def lane(self, position: int) -> Lane:
        """`Sink.try_tokens` of one prompt."""
        return nothing_now

    async def drained(self) -> None:
        """Wait until the client has read most of what was written."""

    async def done(self) -> None:
        """Everything is answered."""
        raise NotImplementedError

    async def fail(self, error: ApiError) -> None:
        """The one thing that is said of a request that could not be served."""
        raise NotImplementedError

    @property
    def max_waiting_bytes(self) -> int:
        """For each prompt's tokens, while the client does not read."""
        return MAX_WAITING_BYTES // len(self._plan.prompts)

    def leave(self) -> None:
        """The client is gone; the form may want to know."""
        self._form.fail(Cancelled())

    async def _begin(self) -> None:
        """The headers are complete."""

    async def _show(self, news: Sequence[tuple[int, Answer, Delta]]) -> None:
        """(index of the choice, its answer, what was added), in order."""

    def _index(self, position: int, choice: int) -> int:
        return position * self._plan.num_choices + choice

    def _usage(self) -> Usage:
        return Usage(
            num_prompt=sum(len(prompt) for prompt in self._plan.prompts),
            num_completion=0 if self._plan.only_prompt else self._num_tokens(),
            num_cached=sum(event.cached.total for event in self._started.values()),
            num_reasoning=sum(answer.num_reasoning_tokens for answer in self._answers.values()),
        )

    def _num_tokens(self) -> int:
        return sum(len(answer.total.token_ids) for answer in self._answers.values())

    def _observe(self, answer: Answer, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        now = time.perf_counter()
        if answer.last_token_at is not None:
            self._metrics.inter_token_latency.observe((now - answer.last_token_at) / num_tokens)
        elif not self._has_tokens:
            self._has_tokens = True
            self._metrics.time_to_first_token.observe(now - self._arrived)
        answer.last_token_at = now
        self._metrics.generation_tokens.value += num_tokens


class WholeReply(Reply):
    """One JSON object at the end."""

    async def done(self) -> None:
        given = list(self._answers.values()), self._usage()
        num_each = 1 + (self._plan.sampling.num_logprobs or 0)
        num_logprobs = num_each * sum(len(answer.total.scored) for answer in given[0])
        if num_logprobs > MANY_LOGPROBS and self._form.is_pure:
            body = await asyncio.to_thread(self._form.whole, *given)
        else:
            body = self._form.whole(*given)
        self.has_begun = True
        await send_json(self._send, 200, body, self._headers)

    async def fail(self, error: ApiError) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._form.fail(error)
            await send_error(self._send, error, self._headers, body=self._error_body(error))


class StreamReply(Reply):
    """Server-sent events, written straight to ASGI: a frame of tokens is one write."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._begun = asyncio.Event()
        """Prompts start independently of each other, and none may write before the headers."""
        self._may_write = False
        """The headers are out, and the first events."""
        self._shows_text_only = not self._plan.return_token_ids and not self._plan.scores_prompts

    async def _begin(self) -> None:
        self.has_begun = True
        headers = EVENT_STREAM_HEADERS + [(name.encode(), value.encode("latin-1")) for name, value in self._headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._write(self._form.begin())
        self._begun.set()
        self._may_write = True

    def lane(self, position: int) -> Lane:
        writer = self._writer
        if writer is None:
            return nothing_now
        lanes = {
            index: (self._index(position, index), self._answers[position, index])
            for index in range(self._plan.num_choices)
        }

        def try_tokens(chunk: TokenChunk) -> Sequence[int] | None:
            # for every token of every stream: worth a look at what it calls
            if not (writer.is_ready and self._may_write):
                return None
            index, answer = lanes[chunk.choice]
            text = answer.try_push(chunk) if self._shows_text_only else None
            if text is not None:
                self._observe(answer, len(chunk.token_ids))
                content = self._form.show_text(index, text)
            else:
                delta = answer.push(chunk)
                self._observe(answer, len(delta.token_ids))
                content = self._form.show(index, answer, delta)
            if content:
                writer.write(content)
            return (chunk.choice,) if answer.is_cut else ()

        return try_tokens

    async def _show(self, news: Sequence[tuple[int, Answer, Delta]]) -> None:
        await self._begun.wait()
        await self._write(b"".join([self._form.show(index, answer, delta) for index, answer, delta in news]))

    async def done(self) -> None:
        await self._write(self._form.end(list(self._answers.values()), self._usage()), is_last=True)

    async def fail(self, error: ApiError) -> None:
        events = self._form.fail(error)
        if not self.has_begun:
            self.has_begun = True
            await send_error(self._send, error, self._headers, body=self._error_body(error))
        else:
            await self._write(events, is_last=True)

    async def drained(self) -> None:
        # nothing more is sent: `send` waits until what was sent before is read
        await self._send_patiently({"type": "http.response.body", "body": b"", "more_body": True})

    async def _write(self, content: bytes, *, is_last: bool = False) -> None:
        if content or is_last:
            await self._send_patiently({"type": "http.response.body", "body": content, "more_body": not is_last})

    async def _send_patiently(self, message: Message) -> None:
        self.is_held_up = True
        try:
            async with patience(self._writer):
                await self._send(message)
        finally:
            self.is_held_up = False


class PromptSink:
    """The part of a reply that belongs to one of its prompts."""

    def __init__(self, reply: Reply, position: int) -> None:
        self._reply = reply
        self._position = position
        self.try_tokens = reply.lane(position)
        self.max_waiting_bytes = reply.max_waiting_bytes
        self.drained = reply.drained

    @property
    def is_held_up(self) -> bool:
        return self._reply.is_held_up

    async def started(self, event: Started) -> None:
        await self._reply.started(self._position, event)

    async def tokens(self, chunks: Sequence[TokenChunk]) -> Sequence[int]:
        return await self._reply.tokens(self._position, chunks)
