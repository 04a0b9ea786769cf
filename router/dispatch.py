"""The life of one prompt, from its tokens to the end of its last choice.

    hash the prompt's blocks -> ask the prefix index (5 ms at most) -> policy.route -> Submit to the decode worker
      Started     -> sink.started
      TokenChunk  -> sink.tokens; a choice that the sink wants no more of is finished on the worker
      NeedPrefill -> the prefill worker was lost: UsePrefill(another one, or None: read it yourself)
      Failed, retryable, or the worker is lost
                  -> another decode worker, with the tokens that were already emitted; a few times at most
      the client does not read, and too much waits for it
                  -> the worker forgets the request; goes on like that once the client has read
      Failed      -> ApiError
    and however it ends (last choice finished, error, client gone, deadline): whatever still runs is cancelled

What was taken from a worker counts as emitted, in the order in which it came: a mailbox ends with WorkerLost, behind
all that the worker said. So nothing is emitted twice and nothing is lost in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from tandem.router.admission import Gate, Prediction
from tandem.router.attempt import PAUSED, Attempt, Sink
from tandem.router.config import GatewayConfig
from tandem.router.errors import ApiError, nobody_left
from tandem.router.index.reader import IndexReader
from tandem.router.index.scripts import Holder
from tandem.router.journey import mark
from tandem.router.metrics import RouterMetrics
from tandem.router.policy import BLIND, RequestView, Route, route
from tandem.router.workers import WorkerLink, WorkerSet
from tandem.workers.block_key import block_keys, root_key
from tandem.workers.errors import ProtocolError, WorkerUnavailable
from tandem.workers.protocol import Started
from tandem.workers.types import CachedTokens, Choice, KVSource, Request

logger = logging.getLogger(__name__)

MAX_NOTED_ANSWERS = 4
"""Of one request: the next turn goes on from one of them, mostly the first."""


class Dispatcher:
    """What all generations share."""

    def __init__(
        self, config: GatewayConfig, workers: WorkerSet, index: IndexReader | None, metrics: RouterMetrics
    ) -> None:
        self.config = config
        self.workers = workers
        self.index = None if config.router_policy in BLIND else index
        self.metrics = metrics
        self.on_room: Callable[[], None] = lambda: None
        """Called when something has left a worker's account."""

    def block_keys(self, request: Request) -> list[bytes]:
        """Names of the prompt's full blocks. Empty when there is no index to ask about them."""
        identity = self.workers.identity()
        if self.index is None or identity is None:
            return []
        root = root_key(self.config.cluster_key, identity, request.salt)
        return block_keys(self.config.cluster_key, root, request.prompt_token_ids, identity.block_size)

    def more_block_keys(self, keys: Sequence[bytes], request: Request, answer: Sequence[int]) -> list[bytes]:
        """Names of the full blocks behind `keys`, which are those of the prompt, with this answer behind it. The KV of
        its last token was never computed: nothing followed it."""
        identity = self.workers.identity()
        if identity is None:
            return []
        parent = keys[-1] if keys else root_key(self.config.cluster_key, identity, request.salt)
        rest = [*request.prompt_token_ids[len(keys) * identity.block_size :], *answer[:-1]]
        return block_keys(self.config.cluster_key, parent, rest, identity.block_size)

    async def view(self, request: Request, keys: Sequence[bytes], affinity: int | None = None) -> RequestView:
        """The request as the policy sees it, prefix overlaps included. `affinity`: see `rendezvous.key_of`."""
        identity = self.workers.identity()
        if identity is None:
            raise nobody_left()
        overlap: dict[str, int] = {}
        if self.index is not None:
            overlap = await self.index.longest_prefix(keys, self.workers.holders())
        return RequestView(
            num_prompt_tokens=len(request.prompt_token_ids),
            num_choices=len(request.choices),
            block_size=identity.block_size,
            block_bytes=identity.block_bytes,
            local_prefill_tokens=self.config.local_prefill_tokens,
            overlap=overlap,
            slo_ttft_s=self.config.slo_ttft_s,
            slo_itl_s=self.config.slo_itl_s,
            preferred={} if affinity is None else self.workers.roster().preferred(affinity),
        )

    def is_idle(self, chosen: Route) -> bool:
        """Neither of these workers has anything to do."""
        roster = self.workers.roster()
        mine = [roster.get(name) for name in (chosen.prefill, chosen.decode) if name is not None]
        return not any(view is not None and (view.num_sequences or view.num_waiting_tokens) for view in mine)

    def source(self, chosen: Route) -> KVSource | None:
        """The policy's source as a worker is told of it."""
        link = None if chosen.source is None else self.workers.get(chosen.source.worker_id)
        if link is None or chosen.source is None:
            return None
        return KVSource(address=link.address, num_blocks=chosen.source.num_blocks)


def _holder(link: WorkerLink) -> Holder:
    return link.worker_id, link.address.epoch


class Generation:
    """One prompt being answered. `run` is its life; it ends by returning, or raises `ApiError`.

    `look_up`, then `book`, may come before, where it matters which workers it gets and when; `close` then ends what was
    booked and never ran.
    """

    def __init__(self, dispatcher: Dispatcher, request: Request, timeout_s: float, affinity: int | None = None) -> None:
        self.dispatcher = dispatcher
        self._request = request
        self._affinity = affinity
        self._deadline = time.monotonic() + timeout_s
        self.emitted: dict[int, list[int]] = {
            choice.index: list(choice.emitted_token_ids) for choice in request.choices
        }
        """Tokens that are on their way to the client, by choice. Always the same lists."""
        self.unfinished = {choice.index for choice in request.choices}
        """Choices of which more is wanted. Always the same set."""
        self._num_migrations = 0
        self._num_pauses = 0
        """For a client that did not read."""
        self._avoid: set[str] = set()
        """Workers that have already failed this request."""
        self._keys: Sequence[bytes] | None = None
        self._view: RequestView | None = None
        self._num_held_at_first: int | None = None
        """Prompt tokens that somebody was said to hold before anybody read it for this request."""
        self._has_started = False
        self._lookup_s = 0.0
        self._booked: Attempt | None = None

    async def run(self, sink: Sink) -> None:
        config, metrics = self.dispatcher.config, self.dispatcher.metrics
        while self.unfinished:
            if self._booked is None:
                await self.look_up()
                self.book()
            assert self._booked is not None
            attempt, self._booked = self._booked, None
            reason = await self._attempt(attempt, sink)
            if reason is None:
                self._note_answers(attempt.route.decode)
                return
            if reason == PAUSED:
                self._num_pauses += 1
                metrics.pauses.inc()
                mark("paused", worker=attempt.route.decode)
                await sink.drained()
                continue
            self._avoid.add(attempt.route.decode)
            if self._num_migrations == config.max_migrations:
                raise nobody_left("Several workers failed while serving this request. Please try again.")
            self._num_migrations += 1
            metrics.migrations.labels(reason).inc()
            mark("moved", worker=attempt.route.decode, reason=reason)
            logger.info("request %s leaves worker %s (%s)", self._request.request_id, attempt.route.decode, reason)

    async def look_up(self) -> None:
        """Ask the index who holds how much of the prompt."""
        began = time.perf_counter()
        if self._keys is None:
            self._keys = self.dispatcher.block_keys(self._request)
        view = self._view = await self.dispatcher.view(self._request, self._keys, self._affinity)
        if self._num_held_at_first is None:
            self._num_held_at_first = max(map(view.num_held_tokens, view.overlap), default=0)
        self._lookup_s = time.perf_counter() - began

    def predict(self) -> Route:
        """Where it would go now, and what would come of it. Raises `ApiError` when nobody is there."""
        assert self._view is not None, "look_up comes first"
        chosen = route(self._view, self.dispatcher.workers.roster(), self._avoid, self.dispatcher.config.router_policy)
        if chosen is None:
            raise nobody_left()
        return chosen

    def book(self) -> None:
        """Choose the workers and put the request on their accounts."""
        assert self._view is not None, "look_up comes first"
        began = time.perf_counter()
        chosen = self.predict()
        metrics = self.dispatcher.metrics
        metrics.router_decision.observe(self._lookup_s + time.perf_counter() - began)
        metrics.predicted_ttft.observe(chosen.ttft_s)
        source = None if chosen.source is None else chosen.source.worker_id
        mark("routed", prefill=chosen.prefill, decode=chosen.decode, source=source, predicted_s=chosen.ttft_s)
        self._note_routed(chosen)
        self._booked = Attempt(self, chosen, self._remaining_request(), self._view)

    def close(self) -> None:
        """However it ended: nothing is left on any account."""
        if self._booked is not None:
            self._booked.end()
            self._booked = None

    def _note_routed(self, chosen: Route) -> None:
        """Both workers are about to hold the prompt; the index says so only later."""
        if self.dispatcher.index is not None:
            workers = self.dispatcher.workers
            links = [workers.get(name) for name in (chosen.prefill, chosen.decode) if name is not None]
            self.dispatcher.index.note_routed(self._keys or (), [_holder(link) for link in links if link is not None])

    def _note_answers(self, decode: str) -> None:
        """The decode worker holds prompt and answer now: the conversation's next turn begins with them."""
        index, link = self.dispatcher.index, self.dispatcher.workers.get(decode)
        if index is None or link is None or self._keys is None:
            return
        for choice in sorted(self.emitted)[:MAX_NOTED_ANSWERS]:
            more = self.dispatcher.more_block_keys(self._keys, self._request, self.emitted[choice])
            index.note_routed([*self._keys, *more], [_holder(link)])

    async def _attempt(self, attempt: Attempt, sink: Sink) -> str | None:
        """Let one decode worker serve what is left. None: all done. Otherwise the reason to try another."""
        try:
            return await attempt.run(sink)
        except WorkerUnavailable:
            return "decode_lost"
        except ProtocolError as error:
            raise ApiError(413, "The request is too large for the server.", code="request_too_large") from error
        finally:
            attempt.end()

    def _remaining_request(self) -> Request:
        """What is still to be generated, behind what the client already has."""
        # a name of its own per attempt: the lost worker's leases and late words must not be taken for this one's
        name = self._request.request_id
        return msgspec.structs.replace(
            self._request,
            request_id=name if self.is_first_attempt else f"{name}.{self._num_migrations + self._num_pauses}",
            choices=tuple(
                Choice(index=index, emitted_token_ids=tuple(self.emitted[index])) for index in sorted(self.unfinished)
            ),
        )

    @property
    def is_first_attempt(self) -> bool:
        return self._num_migrations + self._num_pauses == 0

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    @property
    def avoid(self) -> set[str]:
        return self._avoid

    def without_own_kv(self, event: Started) -> Started:
        """Its `cached` as the client should see it. KV that an attempt computed before its worker died was computed for
        this request, and nothing is counted twice where a request is moved after its start."""
        if self._has_started:
            return msgspec.structs.replace(event, cached=CachedTokens())
        self._has_started = True
        if self.is_first_attempt:
            return event
        return msgspec.structs.replace(event, cached=event.cached.at_most(self._num_held_at_first or 0))

    def finish(self, choice: int) -> None:
        self.unfinished.discard(choice)

    @property
    def is_finished(self) -> bool:
        return not self.unfinished


async def enter_together(generations: Sequence[Generation], gate: Gate, arrived: float, priority: int) -> None:
    """All prompts of one request are let in at once, so that none is refused when others have begun. Raises `ApiError`
    429. Each is predicted as if it were alone."""
    await asyncio.gather(*(generation.look_up() for generation in generations))

    def predict() -> Prediction:
        routes = [generation.predict() for generation in generations]
        slowest = max(routes, key=lambda chosen: chosen.ttft_s)
        return Prediction(
            slowest.ttft_s,
            slowest.queue_s,
            max(chosen.itl_s for chosen in routes),
            is_alone=all(generation.dispatcher.is_idle(chosen) for generation, chosen in zip(generations, routes)),
        )

    def book() -> None:
        for generation in generations:
            generation.book()

    await gate.enter(predict, book, arrived, priority)


async def run_all(generations: Sequence[tuple[Generation, Sink]]) -> None:
    """All prompts of one request at once. The first error ends the others and is raised."""
    tasks = [asyncio.create_task(generation.run(sink)) for generation, sink in generations]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
