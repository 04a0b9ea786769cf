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
    worker_id: str
    reading: Reading


def choose_reader(
    request: RequestView, workers: Sequence[WorkerView], avoid: AbstractSet[str] = frozenset()
) -> Choice | None:
    """The worker that is predicted to be done first, of the first role of `READERS` that anybody has. None: nobody is
    there. A pure function, as the policy is."""
    alive = [worker for worker in workers if worker.worker_id not in avoid]
    sources = cost_model.find_sources(request, alive)
    for role in READERS:
        options = [
            (worker.queue_s + reading.read_s, worker.num_routed, worker.worker_id, reading)
            for worker in alive
            if worker.role == role
            for reading in [cost_model.read(request, worker, sources)]
        ]
        if options:
            *_, worker_id, reading = min(options, key=lambda option: option[:3])
            return Choice(worker_id, reading)
    return None


@dataclass(frozen=True, slots=True)
class Read:
    """A text that was read."""

    worker_id: str
    answer: Embedded


async def embed(dispatcher: Dispatcher, request: Request, *, uses_cache: bool) -> Read:
    """Have the prompt of `request` read. `uses_cache`: it matters who holds a part of it. Raises `ApiError`."""
    began = time.perf_counter()
    metrics, avoid = dispatcher.metrics, set[str]()
    keys = dispatcher.block_keys(request) if uses_cache else []
    for attempt in range(dispatcher.config.max_migrations + 1):
        view = await dispatcher.view(request, keys)
        chosen = choose_reader(view, [link.account.view() for link in dispatcher.workers.ready()], avoid)
        link = None if chosen is None else dispatcher.workers.get(chosen.worker_id)
        if chosen is None or link is None:
            raise nobody_left()
        if attempt == 0:
            metrics.router_decision.observe(time.perf_counter() - began)
        if dispatcher.index is not None and keys:
            dispatcher.index.note_routed(keys, [(link.worker_id, link.address.epoch)])
        answer = await _ask(dispatcher, link, request, chosen.reading, attempt)
        if isinstance(answer, Embedded):
            _count(dispatcher, request, link.address.role, answer)
            return Read(link.worker_id, answer)
        if answer is not None and not answer.retryable:
            raise translated(answer)
        reason = "prefill_lost" if answer is None else "refused"
        avoid.add(link.worker_id)
        metrics.migrations.labels(reason).inc()
        mark("moved", worker=link.worker_id, reason=reason)
        logger.info("text %s leaves worker %s (%s)", request.request_id, link.worker_id, reason)
    raise nobody_left("Several workers failed while serving this request. Please try again.")


async def _ask(
    dispatcher: Dispatcher, link: WorkerLink, request: Request, reading: Reading, attempt: int
) -> Embedded | Failed | None:
    """What this worker says. None: it is lost."""
    name = request.request_id if attempt == 0 else f"{request.request_id}.{attempt}"
    is_sent = is_over = False
    charge = link.account.charge(num_tokens=reading.num_tokens)
    link.account.num_routed += 1
    try:
        mailbox = link.open(name)
        link.send(
            Embed(
                request_id=name,
                token_ids=request.prompt_token_ids,
                salt=request.salt,
                retention=request.retention,
                source=_source(dispatcher, reading),
            )
        )
        is_sent = True
        event = (await mailbox.take())[0]  # one message is all that comes
        is_over = True
        return event if isinstance(event, Embedded | Failed) else None
    except WorkerUnavailable:
        return None
    finally:
        link.account.release(charge)
        link.close(name)
        if is_sent and not is_over:
            link.try_send(Cancel(request_id=name))
        dispatcher.on_room()


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
