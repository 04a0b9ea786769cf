"""The owner's side of every transfer: blocks promised to others, and kept until the promise ends.

    Prefill (prefill.py), Fetch (lend.py) ──> TicketPart* ──> Confirm, Cancel, a lost connection, the end of the lease

A promise belongs to the connection that asked for it; nobody else can renew, confirm or cancel it. Workers of every
role make promises: what is cached here may be fetched by whoever shows that he knows its tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from tandem.workers.connection import Connection
from tandem.workers.engine import Engine
from tandem.workers.kv_cache import KVCache
from tandem.workers.lend import Lender
from tandem.workers.metrics import WorkerMetrics
from tandem.workers.offload.tiers import Tiers
from tandem.workers.protocol import (
    AnyMessage,
    Cancel,
    Confirm,
    Confirmed,
    Describe,
    Description,
    Failed,
    Fetch,
    Renew,
    Renewed,
    TicketPart,
)
from tandem.workers.sequence import Sequence
from tandem.workers.transfer.base import Transfer
from tandem.workers.types import CachedTokens, KVTicket, TicketBlock, TokenChunk, TokenLogprobs, WorkerAddress

logger = logging.getLogger(__name__)

LEASE_CHECK_S = 1.0
NOTHING_CACHED = CachedTokens()


@dataclass(slots=True, eq=False)
class Promise:
    """What was promised for one request: the ticket's parts so far, and until when."""

    request_id: str
    connection: Connection
    sequence: Sequence
    lease_end: float
    num_parts: int = 0
    num_blocks: int = 0
    """How many of the sequence's blocks the parts so far have listed or passed over."""
    generations: dict[int, int] = field(default_factory=dict)
    """Block id -> generation, of all blocks in the ticket so far."""
    lending: asyncio.Task[None] | None = None
    """Publishes, and first restores, what is lent (lend.py)."""


class Promises:
    """Answers other workers. Runs on the worker's event loop.

    `on_ended(sequence, is_incoming)` is called when a promise that prefill.py made has ended. `is_incoming`: somebody
    fills its blocks, and must `release_incoming` when that is over.
    """

    def __init__(
        self,
        address: WorkerAddress,
        engine: Engine,
        kv_cache: KVCache,
        transfer: Transfer,
        metrics: WorkerMetrics,
        tiers: Tiers | None = None,
    ) -> None:
        self.address = address
        self.engine = engine
        self.kv_cache = kv_cache
        self.transfer = transfer
        self.metrics = metrics
        self.lease_s = engine.config.lease_s
        self.on_ended: Callable[[Sequence, bool], None] = lambda sequence, is_incoming: None
        self._promises: dict[str, Promise] = {}
        self._lender = Lender(self, tiers)

    async def run(self) -> None:
        """End leases that nobody renews. The backstop: in the normal course of things a message does it."""
        while True:
            await asyncio.sleep(min(LEASE_CHECK_S, self.lease_s / 4))
            now = time.monotonic()
            for promise in [promise for promise in self._promises.values() if promise.lease_end < now]:
                logger.warning("the lease of request %s ended without a word", promise.request_id)
                self.metrics.count("leases_expired_total")
                self.end(promise)

    def try_handle(self, connection: Connection, message: AnyMessage) -> bool:
        """False: it is not about a promise. A `Cancel` of something unknown is (it may be too late)."""
        match message:
            case Describe():
                connection.post(self._description())
            case Fetch():
                self._lender.begin(connection, message)
            case Renew():
                for request_id in message.request_ids:
                    if promise := self._promise(connection, request_id):
                        promise.lease_end = time.monotonic() + self.lease_s
                connection.post(Renewed())
            case Confirm():
                connection.post(self._confirm(connection, message))
            case Cancel():
                if promise := self._promise(connection, message.request_id):
                    self.end(promise)
            case _:
                return False
        return True

    def connection_lost(self, connection: Connection) -> None:
        for promise in [promise for promise in self._promises.values() if promise.connection is connection]:
            self.end(promise)

    async def close(self) -> None:
        for promise in list(self._promises.values()):
            self.end(promise)
        await self._lender.close()

    def of(self, sequence: Sequence) -> Promise | None:
        promise = self._promises.get(sequence.request_id)
        return promise if promise is not None and promise.sequence is sequence else None

    def begin(self, connection: Connection, sequence: Sequence) -> Promise:
        """Promise the blocks of this sequence, whose request id is the promise's."""
        promise = Promise(sequence.request_id, connection, sequence, time.monotonic() + self.lease_s)
        self._promises[promise.request_id] = promise
        return promise

    def publish(
        self,
        promise: Promise,
        end: int,
        digests: SequenceOf[bytes],
        *,
        is_last: bool,
        first_token: TokenChunk | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
        cached: CachedTokens = NOTHING_CACHED,
    ) -> None:
        """Send the next part of the ticket: the sequence's blocks up to `end`, with their digests, in order."""
        start, promise.num_blocks = promise.num_blocks, end
        blocks = tuple(
            TicketBlock(index=index, block_id=block_id, generation=self.engine.pool.generation(block_id), digest=digest)
            for index, (block_id, digest) in enumerate(zip(promise.sequence.block_ids[start:end], digests), start)
        )
        promise.generations |= {block.block_id: block.generation for block in blocks}
        ticket = KVTicket(
            request_id=promise.request_id,
            worker_id=self.address.worker_id,
            epoch=self.address.epoch,
            part=promise.num_parts,
            blocks=blocks,
            lease_s=self.lease_s,
            cached=cached,
            last=is_last,
            first_token=first_token,
            prompt_logprobs=prompt_logprobs,
        )
        promise.num_parts += 1
        promise.connection.post(TicketPart(ticket=ticket))

    def end(self, promise: Promise) -> None:
        """The one place where a promise ends: its blocks become cached, or its computation stops."""
        if self._promises.get(promise.request_id) is promise:
            del self._promises[promise.request_id]
        incoming = self.engine.cancel(promise.request_id)
        if promise.lending is None:
            self.on_ended(promise.sequence, bool(incoming))
        else:
            promise.lending.cancel()

    def break_off(self, promise: Promise, reason: str) -> None:
        """It cannot be kept: the sequence has ended."""
        self.end(promise)
        self.refuse(promise.connection, promise.request_id, reason)

    def refuse(self, connection: Connection, request_id: str, reason: str) -> None:
        connection.post(Failed(request_id=request_id, message=reason, retryable=True))

    # Inside

    def _description(self) -> Description:
        return Description(
            identity=self.engine.identity,
            transfer_name=self.transfer.name,
            transfer=self.transfer.describe(),
            probe_block=self.kv_cache.num_blocks,
        )

    def _promise(self, connection: Connection, request_id: str) -> Promise | None:
        promise = self._promises.get(request_id)
        return promise if promise is not None and promise.connection is connection else None

    def _confirm(self, connection: Connection, message: Confirm) -> Confirmed:
        promise = self._promise(connection, message.request_id)
        if promise is None or promise.lease_end < time.monotonic():
            return Confirmed(request_id=message.request_id, broken="lease")
        are_current = all(
            promise.generations.get(block_id) == generation == self.engine.pool.generation(block_id)
            for block_id, generation in message.blocks
        )
        self.end(promise)
        return Confirmed(request_id=message.request_id, broken=None if are_current else "generation")
