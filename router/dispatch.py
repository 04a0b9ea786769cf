"""The life of one prompt, from its tokens to the end of its last choice.

    hash the prompt's blocks -> ask the prefix index (5 ms at most) -> policy.route -> Submit to the decode worker
      Started     -> sink.started
      TokenChunk  -> sink.tokens; a choice that the sink wants no more of is finished on the worker
      NeedPrefill -> the prefill worker was lost: UsePrefill(another one, or None: read it yourself)
      Failed, retryable, or the worker is lost
                  -> another decode worker, with the tokens that were already emitted; a few times at most
      Failed      -> ApiError
    and however it ends (last choice finished, error, client gone, deadline): whatever still runs is cancelled

What was taken from a worker counts as emitted, in the order in which it came: a mailbox ends with WorkerLost, behind
all that the worker said. So nothing is emitted twice and nothing is lost in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from tandem.router.config import GatewayConfig
from tandem.router.errors import ApiError, internal_error, nobody_left
from tandem.router.metrics import RouterMetrics
from tandem.router.policy import RequestView, Route, pick_prefill, route
from tandem.router.prefix_index import IndexReader
from tandem.router.workers import Mailbox, WorkerLink, WorkerLost, WorkerSet
from tandem.workers.block_key import block_keys, root_key
from tandem.workers.errors import ProtocolError, WorkerUnavailable
from tandem.workers.protocol import Cancel, Failed, FinishChoice, NeedPrefill, Started, Submit, UsePrefill
from tandem.workers.types import Choice, Request, TokenChunk

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Where a generation's output goes."""

    async def started(self, event: Started) -> None:
        """Once, or again after each move to another worker."""

    async def tokens(self, chunks: Sequence[TokenChunk]) -> Sequence[int]:
        """New tokens. Returns the choices of which nothing more is wanted although the worker would go on."""


class Dispatcher:
    """What all generations share."""

    def __init__(
        self, config: GatewayConfig, workers: WorkerSet, index: IndexReader | None, metrics: RouterMetrics
    ) -> None:
        self.config = config
        self.workers = workers
        self.index = index
        self.metrics = metrics
        self._roots: dict[tuple[object, str], bytes] = {}

    async def view(self, request: Request) -> RequestView:
        """The request as the policy sees it, prefix overlaps included."""
        identity = self.workers.identity()
        if identity is None:
            raise nobody_left()
        overlap: dict[str, int] = {}
        if self.index is not None and self.index.is_up:
            # `identity` is compared by value: another revision of the model is another root
            root = self._roots.get((identity, request.salt))
            if root is None:
                root = self._roots[identity, request.salt] = root_key(self.config.cluster_key, identity, request.salt)
            keys = block_keys(self.config.cluster_key, root, request.prompt_token_ids, identity.block_size)
            holders = [(link.worker_id, link.address.epoch) for link in self.workers.ready()]
            overlap = await self.index.longest_prefix(keys, holders)
        return RequestView(
            num_prompt_tokens=len(request.prompt_token_ids),
            num_choices=len(request.choices),
            block_size=identity.block_size,
            local_prefill_tokens=self.config.local_prefill_tokens,
            overlap=overlap,
        )


class Generation:
    """One prompt being answered. `run` is its life; it ends by returning, or raises `ApiError`."""

    def __init__(self, dispatcher: Dispatcher, request: Request, timeout_s: float) -> None:
        self._dispatcher = dispatcher
        self._request = request
        self._deadline = time.monotonic() + timeout_s
        self._emitted: dict[int, list[int]] = {
            choice.index: list(choice.emitted_token_ids) for choice in request.choices
        }
        self._unfinished = {choice.index for choice in request.choices}
        self._num_migrations = 0
        self._avoid: set[str] = set()
        """Workers that have already failed this request."""

    async def run(self, sink: Sink) -> None:
        config, metrics = self._dispatcher.config, self._dispatcher.metrics
        while self._unfinished:
            began = time.perf_counter()
            view = await self._dispatcher.view(self._request)
            chosen = self._choose(view)
            metrics.router_decision.observe(time.perf_counter() - began)
            reason = await self._attempt(chosen, view, sink)
            if reason is None:
                return
            self._avoid.add(chosen.decode)
            if self._num_migrations == config.max_migrations:
                raise nobody_left("Several workers failed while serving this request. Please try again.")
            self._num_migrations += 1
            metrics.migrations.labels(reason).inc()
            logger.info("request %s leaves worker %s (%s)", self._request.request_id, chosen.decode, reason)

    def _choose(self, view: RequestView) -> Route:
        workers = [link.view() for link in self._dispatcher.workers.ready()]
        chosen = route(view, workers, self._avoid)
        if chosen is None:
            raise nobody_left()
        return chosen

    async def _attempt(self, chosen: Route, view: RequestView, sink: Sink) -> str | None:
        """Let one decode worker serve what is left. None: all done. Otherwise the reason to try another."""
        workers = self._dispatcher.workers
        decode = workers.get(chosen.decode)
        prefill = None if chosen.prefill is None else workers.get(chosen.prefill)
        if decode is None:
            return "decode_lost"
        attempt = _Attempt(self, decode, self._remaining_request(), view)
        try:
            return await attempt.run(prefill, sink)
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
            request_id=name if self._num_migrations == 0 else f"{name}.{self._num_migrations}",
            choices=tuple(
                Choice(index=index, emitted_token_ids=tuple(self._emitted[index])) for index in sorted(self._unfinished)
            ),
        )

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    @property
    def avoid(self) -> set[str]:
        return self._avoid

    def take(self, chunks: Sequence[TokenChunk]) -> list[TokenChunk]:
        """Note these chunks as emitted; those of finished choices are dropped."""
        taken = []
        for chunk in chunks:
            if chunk.choice in self._unfinished:
                self._emitted[chunk.choice] += chunk.token_ids
                if chunk.finish_reason is not None:
                    self._unfinished.discard(chunk.choice)
                taken.append(chunk)
        return taken

    def finish(self, choice: int) -> None:
        self._unfinished.discard(choice)

    @property
    def is_finished(self) -> bool:
        return not self._unfinished


class _Attempt:
    """One request on one decode worker."""

    def __init__(self, generation: Generation, decode: WorkerLink, request: Request, view: RequestView) -> None:
        self._generation = generation
        self._decode = decode
        self._request = request
        self._view = view
        self._running = {choice.index for choice in request.choices}
        """Choices that the worker still generates, as far as we know."""
        self._num_sequences = len(self._running)
        self._prefill: WorkerLink | None = None
        self._is_open = False
        self._is_sent = False

    async def run(self, prefill: WorkerLink | None, sink: Sink) -> str | None:
        mailbox = self._open()
        self._charge_prefill(prefill)
        self._decode.send(
            Submit(
                request=self._request,
                prefill=None if prefill is None else prefill.address,
                timeout_s=self._generation.remaining_s,
            )
        )
        self._is_sent = True
        return await self._listen(mailbox, sink)

    async def _listen(self, mailbox: Mailbox, sink: Sink) -> str | None:
        while True:
            chunks: list[TokenChunk] = []
            reason: str | None = None
            failure: ApiError | None = None
            for event in await mailbox.take():
                match event:
                    case TokenChunk():
                        chunks.append(event)
                    case Started():
                        self._charge_prefill(None)
                        self._count_start(event)
                        await sink.started(event)
                    case NeedPrefill():
                        self._use_another_prefill(event)
                    case Failed(retryable=True):
                        self._running.clear()
                        reason = "refused"
                    case Failed():
                        self._running.clear()
                        failure = _translated(event)
                    case WorkerLost():
                        self._running.clear()
                        reason = "decode_lost"
            if chunks:
                await self._pass_on(chunks, sink)
            if self._generation.is_finished:
                return None
            if failure is not None:
                raise failure
            if reason is not None:
                return reason

    async def _pass_on(self, chunks: list[TokenChunk], sink: Sink) -> None:
        taken = self._generation.take(chunks)
        self._running.difference_update(chunk.choice for chunk in taken if chunk.finish_reason is not None)
        if not taken:
            return
        for choice in await sink.tokens(taken):
            self._generation.finish(choice)
            if choice in self._running and not self._generation.is_finished:
                self._running.discard(choice)
                self._decode.try_send(FinishChoice(request_id=self._request.request_id, choice=choice))

    def _use_another_prefill(self, event: NeedPrefill) -> None:
        workers = self._dispatcher.workers
        self._generation.avoid.add(event.failed_worker)
        self._dispatcher.metrics.migrations.labels("prefill_lost").inc()
        views = [link.view() for link in workers.ready()]
        name = pick_prefill(self._view, views, self._decode.view(), self._generation.avoid)
        prefill = None if name is None else workers.get(name)
        self._charge_prefill(prefill)
        address = None if prefill is None else prefill.address
        self._decode.send(UsePrefill(request_id=self._request.request_id, prefill=address))

    # The books: what each worker has been given by us

    @property
    def _dispatcher(self) -> Dispatcher:
        return self._generation._dispatcher

    def _open(self) -> Mailbox:
        mailbox = self._decode.open(self._request.request_id)
        self._decode.num_routed += 1
        self._decode.num_sequences += self._num_sequences
        self._is_open = True
        return mailbox

    def _charge_prefill(self, prefill: WorkerLink | None) -> None:
        """Let `prefill`, and nobody else, have this prompt on its account."""
        num_tokens = len(self._request.prompt_token_ids)
        if self._prefill is not None:
            self._prefill.num_prefill_tokens -= num_tokens
        if prefill is not None:
            prefill.num_prefill_tokens += num_tokens
            prefill.num_routed += 1
        self._prefill = prefill

    def _count_start(self, event: Started) -> None:
        metrics = self._dispatcher.metrics
        metrics.prefills.labels(event.path).inc()
        pool = "prefill" if event.path == "remote" else "decode"
        for source, num_tokens in msgspec.structs.asdict(event.cached).items():
            if num_tokens:
                metrics.cached_tokens.labels(pool if source == "pool" else source).inc(num_tokens)

    def end(self) -> None:
        """Close the books, and stop whatever the worker still does for this request."""
        if not self._is_open:
            return
        self._charge_prefill(None)
        self._decode.num_sequences -= self._num_sequences
        self._decode.close(self._request.request_id)
        if self._is_sent and self._running:
            self._decode.try_send(Cancel(request_id=self._request.request_id))


def _translated(failure: Failed) -> ApiError:
    """A worker's refusal in the API's words. Only messages about the request itself are passed on."""
    if failure.code == "internal_error":
        logger.error("request %s failed on its worker: %s", failure.request_id, failure.message)
        return internal_error()
    if failure.code == "timeout":
        return ApiError(504, "The request was not finished in time.", type="server_error", code="timeout")
    return ApiError(400, failure.message, param=failure.param, code=failure.code)


async def run_all(generations: Sequence[tuple[Generation, Sink]]) -> None:
    """All prompts of one request at once. The first error ends the others and is raised."""
    tasks = [asyncio.create_task(generation.run(sink)) for generation, sink in generations]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
