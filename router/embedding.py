"""One text's embedding, from its tokens to the vector: whoever reads prompts reads it, and nobody decodes.

hash its blocks -> ask the index (5 ms at most) -> choose_reader -> Embed
  Embedded             -> done
  Failed, retryable, or the worker is lost
                       -> another reader; a few times at most
  Failed               -> ApiError
and however it ends: nothing is left on any account, and no worker reads on for nobody
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import msgspec

from tandem.router import cost_model
from tandem.router.accounts import Charge
from tandem.router.admission import Prediction
from tandem.router.attempt import translated
from tandem.router.cost_model import Reading, RequestView, WorkerView
from tandem.router.dispatch import Dispatcher
from tandem.router.errors import nobody_left
from tandem.router.journey import mark
from tandem.router.workers import WorkerLink
from tandem.workers.errors import WorkerUnavailable
from tandem.workers.protocol import Cancel, Embed, Embedded, Failed
from tandem.workers.types import KVSource, Request, Role

logger = logging.getLogger(__name__)

READERS: tuple[Role, ...] = ("prefill", "aggregated", "decode")
"""Decode workers last, and only if there is nobody else: a long text in their steps holds up everybody's tokens."""


@dataclass(frozen=True, slots=True)
class Choice:
    worker: WorkerView
    reading: Reading


def choose_reader(
    request: RequestView, workers: Sequence[WorkerView], avoid: AbstractSet[str] = frozenset()
) -> Choice | None:
    """The worker that is predicted to be done first, of the first role of `READERS` that anybody has. None: nobody is
    there. A pure function, as the policy is."""
    alive = [worker for worker in workers if worker.worker_id not in avoid]
    sources = cost_model.find_sources(request, alive)
    for role in READERS:
        options = [Choice(worker, cost_model.read(request, worker, sources)) for worker in alive if worker.role == role]
        if options:
            return min(options, key=_rank)
    return None


def _rank(option: Choice) -> tuple[float, int, str]:
    worker = option.worker
    return worker.queue_s + option.reading.read_s, worker.num_routed, worker.worker_id


def predicted(chosen: Choice) -> Prediction:
    """What `admission.Gate` compares with its limits. A text has no tokens of its own: what may miss the limit between
    tokens is others' answers, where the reader decodes."""
    worker, speeds = chosen.worker, chosen.worker.speeds
    disturbs = worker.role != "prefill" and worker.num_sequences > 0
    return Prediction(
        ttft_s=worker.queue_s + chosen.reading.read_s,
        queue_s=worker.queue_s,
        itl_s=speeds.decode_step_s + speeds.decode_sequence_s * worker.num_sequences if disturbs else 0.0,
        is_alone=not worker.num_sequences and not worker.num_waiting_tokens,
    )


@dataclass(frozen=True, slots=True)
class Read:
    """A text that was read."""

    worker_id: str
    answer: Embedded


@dataclass(frozen=True, slots=True)
class _Booking:
    """A text on a worker's account."""

    link: WorkerLink
    reading: Reading
    charge: Charge


class Text:
    """One text to be read. `run` is its life; it ends by returning, or raises `ApiError`. `uses_cache`: it matters who
    holds a part of it.

    `look_up`, then `book`, may come before, where it matters when it gets its worker; `close` then ends what was booked
    and never ran. As `dispatch.Generation`.
    """

    def __init__(self, dispatcher: Dispatcher, request: Request, *, uses_cache: bool) -> None:
        self._dispatcher = dispatcher
        self._request = request
        self._keys: Sequence[bytes] | None = None if uses_cache else ()
        self._view: RequestView | None = None
        self._lookup_s = 0.0
        self._avoid: set[str] = set()
        """Workers that have already failed it."""
        self._booking: _Booking | None = None

    async def run(self) -> Read:
        request, metrics = self._request, self._dispatcher.metrics
        for attempt in range(self._dispatcher.config.max_migrations + 1):
            if self._booking is None:
                await self.look_up()
                self.book()
            assert self._booking is not None
            booking, self._booking = self._booking, None
            link = booking.link
            answer = await self._ask(booking, attempt)
            if isinstance(answer, Embedded):
                _count(self._dispatcher, request, link.address.role, answer)
                return Read(link.worker_id, answer)
            if answer is not None and not answer.retryable:
                raise translated(answer)
            reason = "prefill_lost" if answer is None else "refused"
            self._avoid.add(link.worker_id)
            metrics.migrations.labels(reason).inc()
            mark("moved", worker=link.worker_id, reason=reason)
            logger.info("text %s leaves worker %s (%s)", request.request_id, link.worker_id, reason)
        raise nobody_left("Several workers failed while serving this request. Please try again.")

    @property
    def num_tokens(self) -> int:
        return len(self._request.prompt_token_ids)

    async def look_up(self) -> None:
        """Ask the index who holds how much of it."""
        began = time.perf_counter()
        if self._keys is None:
            self._keys = self._dispatcher.block_keys(self._request)
        self._view = await self._dispatcher.view(self._request, self._keys)
        self._lookup_s = time.perf_counter() - began

    def predict(self) -> Prediction:
        """What would come of it now. Raises `ApiError` when nobody is there."""
        return predicted(self._choose())

    def book(self) -> None:
        """Choose who reads it, and put it on that worker's account."""
        began, dispatcher = time.perf_counter(), self._dispatcher
        chosen = self._choose()
        dispatcher.metrics.router_decision.observe(self._lookup_s + time.perf_counter() - began)
        link = dispatcher.workers.get(chosen.worker.worker_id)
        assert link is not None, "chosen among those that are ready"
        if dispatcher.index is not None and self._keys:
            dispatcher.index.note_routed(self._keys, [(link.worker_id, link.address.epoch)])
        link.account.num_routed += 1
        self._booking = _Booking(link, chosen.reading, link.account.charge(num_tokens=chosen.reading.num_tokens))

    def close(self) -> None:
        """However it ended: nothing is left on any account."""
        if self._booking is not None:
            self._release(self._booking)
            self._booking = None

    def _choose(self) -> Choice:
        assert self._view is not None, "look_up comes first"
        workers = [link.account.view() for link in self._dispatcher.workers.ready()]
        chosen = choose_reader(self._view, workers, self._avoid)
        if chosen is None:
            raise nobody_left()
        return chosen

    async def _ask(self, booking: _Booking, attempt: int) -> Embedded | Failed | None:
        """What this worker says. None: it is lost."""
        link, request = booking.link, self._request
        name = request.request_id if attempt == 0 else f"{request.request_id}.{attempt}"
        is_sent = is_over = False
        try:
            mailbox = link.open(name)
            link.send(
                Embed(
                    request_id=name,
                    token_ids=request.prompt_token_ids,
                    salt=request.salt,
                    retention=request.retention,
                    priority=request.priority,
                    source=_source(self._dispatcher, booking.reading),
                )
            )
            is_sent = True
            event = (await mailbox.take())[0]  # one message is all that comes
            is_over = True
            return event if isinstance(event, Embedded | Failed) else None
        except WorkerUnavailable:
            return None
        finally:
            link.close(name)
            if is_sent and not is_over:
                link.try_send(Cancel(request_id=name))
            self._release(booking)

    def _release(self, booking: _Booking) -> None:
        booking.link.account.release(booking.charge)
        self._dispatcher.on_room()


def _source(dispatcher: Dispatcher, reading: Reading) -> KVSource | None:
    link = None if reading.source is None else dispatcher.workers.get(reading.source.worker_id)
    if link is None or reading.source is None:
        return None
    return KVSource(address=link.address, num_blocks=reading.source.num_blocks)


def _count(dispatcher: Dispatcher, request: Request, role: Role, answer: Embedded) -> None:
    metrics = dispatcher.metrics
    metrics.prompt_tokens.inc(len(request.prompt_token_ids))
    metrics.embeddings.inc()
    for source, num_tokens in msgspec.structs.asdict(answer.cached).items():
        if num_tokens:
            pool = "prefill" if role == "prefill" else "decode"
            metrics.cached_tokens.labels(pool if source == "pool" else source).inc(num_tokens)
