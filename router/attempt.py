"""One request on one decode worker, from the decision to whatever ends it there. `dispatch.py` draws the whole life."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from tandem.router.accounts import Charge, WorkerAccount
from tandem.router.errors import ApiError, internal_error, too_slow
from tandem.router.journey import current_journey, mark
from tandem.router.policy import RequestView, Route, pick_prefill
from tandem.router.workers import Event, WorkerLost
from tandem.workers.protocol import Cancel, Failed, FinishChoice, NeedPrefill, Started, Submit, UsePrefill
from tandem.workers.types import Request, TokenChunk, WorkerAddress

if TYPE_CHECKING:
    from tandem.router.dispatch import Dispatcher, Generation

logger = logging.getLogger(__name__)

PAUSED = "paused"
"""The reason of an attempt that was ended because its client does not read."""


class Sink(Protocol):
    """Where a generation's output goes."""

    async def started(self, event: Started) -> None:
        """Once, or again after each move to another worker."""

    async def tokens(self, chunks: Sequence[TokenChunk]) -> Sequence[int]:
        """New tokens. Returns the choices of which nothing more is wanted although the worker would go on."""

    def try_tokens(self, chunk: TokenChunk) -> Sequence[int] | None:
        """The same on the spot, where nothing has to be waited for. None: not taken, it must come by `tokens`."""

    @property
    def is_held_up(self) -> bool:
        """Its client does not read, and `tokens` waits for it."""

    @property
    def max_waiting_bytes(self) -> int:
        """Tokens that may wait meanwhile."""

    async def drained(self) -> None:
        """Wait until the client has read most of what there was."""


class Attempt:
    """One request on one decode worker, and on their accounts from the moment it is made until `end`."""

    def __init__(self, generation: Generation, route: Route, request: Request, view: RequestView) -> None:
        self.route = route
        self._generation = generation
        self._request = request
        self._view = view
        self._began = time.perf_counter()
        self._running = {choice.index for choice in request.choices}
        """Choices that the worker still generates, as far as we know."""
        self._reading: tuple[WorkerAccount, Charge] | None = None
        """Who reads the prompt, and was charged for it."""
        self._is_as_predicted = generation.is_first_attempt
        self._is_open = True
        self._is_sent = False
        self._wanted, self._emitted = generation.unfinished, generation.emitted
        self._journey = current_journey()
        self._bug: Exception | None = None
        """That a chunk met on its express way: raised where the request's errors are dealt with."""
        decode = self._dispatcher.workers.get(route.decode)
        assert decode is not None, "chosen among those that are ready"
        self._decode = decode
        decode.account.num_routed += 1
        self._decode_charge = decode.account.charge(num_sequences=len(self._running))
        self._mailbox = decode.open(request.request_id)
        self._charge_reader(route)

    async def run(self, sink: Sink) -> str | None:
        """None: nothing more is wanted. Otherwise why another attempt is needed, which is a label of `migrations`, or
        `PAUSED`. Raises `ApiError`, `WorkerUnavailable` (it could not be asked), `ProtocolError` (too large to ask)."""
        self._decode.send(
            Submit(
                request=self._request,
                prefill=self._prefill_address(self.route),
                source=self._dispatcher.source(self.route),
                timeout_s=self._generation.remaining_s,
            )
        )
        self._is_sent = True
        self._mailbox.express = partial(self._express, sink.try_tokens)
        self._mailbox.on_waiting = partial(self._limit_waiting, sink)
        return await self._listen(sink)

    async def _listen(self, sink: Sink) -> str | None:
        while True:
            events = await self._mailbox.take()
            end: str | ApiError | None = None
            for event in events:
                if end is None and not isinstance(event, TokenChunk):
                    end = await self._react(event, sink)
            await self._pass_on([event for event in events if isinstance(event, TokenChunk)], sink)
            if self._bug is not None:
                raise self._bug
            if self._generation.is_finished:
                return None
            if isinstance(end, ApiError):
                raise end
            if end is not None:
                return end
            if not self._is_open and self._mailbox.is_empty:
                return PAUSED

    async def _react(self, event: Event, sink: Sink) -> str | ApiError | None:
        """To whatever is no token. How this ends the attempt, if it does: why another is needed, or the refusal."""
        match event:
            case Started():
                self._release_reader()
                start = self._generation.without_own_kv(event)
                self._count_start(start)
                _mark_start(start)
                await sink.started(start)
            case NeedPrefill():
                self._use_another_prefill(event)
            case Failed():
                self._running.clear()
                return "refused" if event.retryable else translated(event)
            case WorkerLost():
                self._running.clear()
                return "decode_lost"
        return None

    def _limit_waiting(self, sink: Sink, num_bytes: int) -> None:
        """Whose client does not read gets no more tokens: the worker forgets the request, and another attempt goes on
        once the client has read what there is."""
        if num_bytes > sink.max_waiting_bytes and sink.is_held_up:
            self.end()

    async def _pass_on(self, chunks: list[TokenChunk], sink: Sink) -> None:
        taken = [chunk for chunk in chunks if self._note(chunk)]
        if taken:
            self._finish(await sink.tokens(taken))

    def _express(self, try_tokens: Callable[[TokenChunk], Sequence[int] | None], chunk: TokenChunk) -> bool:
        """See `Mailbox.express`."""
        if chunk.choice not in self._wanted:
            return True
        try:
            cut = try_tokens(chunk)
            if cut is None:
                return False
            self._note(chunk)
            if cut:
                self._finish(cut)
        except Exception as error:  # noqa: BLE001  it is the request's: the connection's reader must not meet it
            self._bug = error
            self._mailbox.wake()
        if not self._wanted:
            self._mailbox.wake()
        return True

    def _note(self, chunk: TokenChunk) -> bool:
        """It is on its way to the client. False: nobody wants it any more."""
        if chunk.choice not in self._wanted:
            return False
        self._emitted[chunk.choice] += chunk.token_ids
        if chunk.finish_reason is not None:
            self._wanted.discard(chunk.choice)
            self._running.discard(chunk.choice)
        if self._journey is not None:
            self._journey.count_tokens(len(chunk.token_ids))
        return True

    def _finish(self, choices: Sequence[int]) -> None:
        """Nothing more is wanted of these."""
        for choice in choices:
            self._generation.finish(choice)
            if choice in self._running and not self._generation.is_finished:
                self._running.discard(choice)
                self._decode.try_send(FinishChoice(request_id=self._request.request_id, choice=choice))

    def _use_another_prefill(self, event: NeedPrefill) -> None:
        workers = self._dispatcher.workers
        self._generation.avoid.add(event.failed_worker)
        self._dispatcher.metrics.migrations.labels("prefill_lost").inc()
        chosen = pick_prefill(self._view, workers.roster(), self._decode.account.view(), self._generation.avoid)
        self._release_reader()
        self._charge_reader(chosen)
        self._decode.send(
            UsePrefill(
                request_id=self._request.request_id,
                prefill=self._prefill_address(chosen),
                source=self._dispatcher.source(chosen),
            )
        )
        self._is_as_predicted = False

    def _prefill_address(self, chosen: Route) -> WorkerAddress | None:
        link = None if chosen.prefill is None else self._dispatcher.workers.get(chosen.prefill)
        return None if link is None else link.address

    # The books: what each worker has been given by us

    @property
    def _dispatcher(self) -> Dispatcher:
        return self._generation.dispatcher

    def _charge_reader(self, chosen: Route) -> None:
        """Whoever reads the prompt has what it must compute on its account, until the first token."""
        reader = self._decode if chosen.prefill is None else self._dispatcher.workers.get(chosen.prefill)
        if reader is not None:
            reader.account.num_routed += reader is not self._decode
            self._reading = reader.account, reader.account.charge(num_tokens=chosen.num_tokens)

    def _release_reader(self) -> None:
        if self._reading is not None:
            account, charge = self._reading
            account.release(charge)
            self._reading = None

    def _count_start(self, event: Started) -> None:
        metrics = self._dispatcher.metrics
        metrics.prefills.labels(event.path).inc()
        if event.handover_s is not None:
            self._dispatcher.workers.fleet.note_handover(event.handover_s)
        if self._is_as_predicted and self.route.ttft_s > 0:
            metrics.ttft_over_predicted.observe((time.perf_counter() - self._began) / self.route.ttft_s)
        pool = "prefill" if event.path == "remote" else "decode"
        for source, num_tokens in msgspec.structs.asdict(event.cached).items():
            if num_tokens:
                metrics.cached_tokens.labels(pool if source == "pool" else source).inc(num_tokens)

    def end(self) -> None:
        """Close the books, and stop whatever the worker still does for this request. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._release_reader()
        self._decode.account.release(self._decode_charge)
        self._decode.close(self._request.request_id)
        if self._is_sent and self._running:
            self._decode.try_send(Cancel(request_id=self._request.request_id))
        self._dispatcher.on_room()


def translated(failure: Failed) -> ApiError:
    """A worker's refusal in the API's words. Only messages about the request itself are passed on."""
    if failure.code == "internal_error":
        logger.error("request %s failed on its worker: %s", failure.request_id, failure.message)
        return internal_error()
    if failure.code == "timeout":
        return too_slow()
    return ApiError(400, failure.message, param=failure.param, code=failure.code)


def _mark_start(event: Started) -> None:
    mark(
        "started",
        path=event.path,
        prefill=event.prefill_worker,
        decode=event.decode_worker,
        num_cached_tokens=event.cached.total,
        num_fetched_tokens=event.cached.peer,
        queue_s=event.queue_s,
        handover_s=event.handover_s,
    )
