"""The prefill worker's half of a handover: compute prompts, promise their blocks, keep the promise until it ends.

    Prefill ──> sequence with `hold` ──each chunk──> TicketPart (blocks, generations, digests)
                                     ──last chunk──> TicketPart with the first token
    Confirm, Cancel, a lost connection, or the end of the lease ──> blocks become cached

A promise belongs to the connection that asked for it; nobody else can renew, confirm or cancel it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from tandem.workers.connection import Connection
from tandem.workers.engine import Engine, StepOutput
from tandem.workers.errors import ProtocolError, RequestError
from tandem.workers.kv_cache import KVCache
from tandem.workers.metrics import WorkerMetrics
from tandem.workers.protocol import (
    AnyMessage,
    Cancel,
    Confirm,
    Confirmed,
    Describe,
    Description,
    Failed,
    Prefill,
    Renew,
    Renewed,
    TicketPart,
)
from tandem.workers.sequence import Sequence
from tandem.workers.transfer.base import Transfer
from tandem.workers.types import Choice, KVTicket, Request, TicketBlock, TokenChunk, WorkerAddress

logger = logging.getLogger(__name__)

LEASE_CHECK_S = 1.0


@dataclass(slots=True, eq=False)
class Promise:
    """What was promised for one request: the ticket's parts so far, and until when."""

    request_id: str
    connection: Connection
    sequence: Sequence
    lease_end: float
    num_parts: int = 0
    num_blocks: int = 0
    generations: dict[int, int] = field(default_factory=dict)
    """Block id -> generation, of all blocks in the ticket so far."""


class PrefillWorker:
    """Answers decode workers. Runs on the worker's event loop, next to the engine that it feeds."""

    def __init__(
        self, address: WorkerAddress, engine: Engine, kv_cache: KVCache, transfer: Transfer, metrics: WorkerMetrics
    ) -> None:
        self.address = address
        self.engine = engine
        self.kv_cache = kv_cache
        self.transfer = transfer
        self.metrics = metrics
        self.lease_s = engine.config.lease_s
        self._promises: dict[str, Promise] = {}

    async def run(self) -> None:
        """End leases that nobody renews. The backstop: in the normal course of things a message does it."""
        while True:
            await asyncio.sleep(min(LEASE_CHECK_S, self.lease_s / 4))
            now = time.monotonic()
            for promise in [promise for promise in self._promises.values() if promise.lease_end < now]:
                logger.warning("the lease of request %s ended without a word", promise.request_id)
                self.metrics.count("leases_expired_total")
                self._end(promise)

    def handle(self, connection: Connection, message: AnyMessage) -> None:
        match message:
            case Describe():
                connection.post(self._description())
            case Prefill():
                self._begin(connection, message)
            case Renew():
                for request_id in message.request_ids:
                    if promise := self._promise(connection, request_id):
                        promise.lease_end = time.monotonic() + self.lease_s
                connection.post(Renewed())
            case Confirm():
                connection.post(self._confirm(connection, message))
            case Cancel():
                if promise := self._promise(connection, message.request_id):
                    self._end(promise)
            case _:
                raise ProtocolError(f"a prefill worker does not take {type(message).__name__}")

    async def close(self) -> None:
        for promise in list(self._promises.values()):
            self._end(promise)

    def connection_lost(self, connection: Connection) -> None:
        for promise in [promise for promise in self._promises.values() if promise.connection is connection]:
            self._end(promise)

    def on_outputs(self, outputs: list[StepOutput]) -> None:
        """A step ended: publish the blocks that it completed."""
        for output in outputs:
            promise = self._promises.get(output.sequence.request_id)
            if promise is None or promise.sequence is not output.sequence:
                self.engine.release(output.sequence)
            elif output.error is not None:
                self._refuse(promise.connection, promise.request_id, output.error)
                del self._promises[promise.request_id]
            else:
                self._publish(promise, output)

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

    def _begin(self, connection: Connection, message: Prefill) -> None:
        prompt, emitted = message.token_ids[: message.num_prompt_tokens], message.token_ids[message.num_prompt_tokens :]
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=prompt,
            sampling=message.sampling,
            choices=(Choice(index=message.choice, emitted_token_ids=emitted),),
            salt=message.salt,
            retention=message.retention,
        )
        try:
            (sequence,) = self.engine.add(request, hold=True)
        except RequestError as error:
            self._refuse(connection, message.request_id, str(error))
            return
        lease_end = time.monotonic() + self.lease_s
        self._promises[message.request_id] = Promise(message.request_id, connection, sequence, lease_end)

    def _publish(self, promise: Promise, output: StepOutput) -> None:
        sequence, block_size = promise.sequence, self.engine.config.block_size
        is_last = output.token is not None
        # The last block of the prompt may be partly filled: it is complete when the prompt is.
        num_complete = len(sequence.block_ids) if is_last else output.num_computed // block_size
        blocks = tuple(
            TicketBlock(
                index=index,
                block_id=block_id,
                generation=self.engine.pool.generation(block_id),
                digest=self.kv_cache.digest(block_id),
            )
            for index, block_id in enumerate(sequence.block_ids[promise.num_blocks : num_complete], promise.num_blocks)
        )
        promise.generations |= {block.block_id: block.generation for block in blocks}
        ticket = KVTicket(
            request_id=promise.request_id,
            worker_id=self.address.worker_id,
            epoch=self.address.epoch,
            part=promise.num_parts,
            blocks=blocks,
            lease_s=self.lease_s,
            cached=sequence.cached,
            last=is_last,
            first_token=_first_token(promise, output) if is_last else None,
        )
        promise.num_parts += 1
        promise.num_blocks = num_complete
        if is_last:
            self.metrics.observe("queue_seconds", (sequence.admitted_at or sequence.queued_at) - sequence.queued_at)
        promise.connection.post(TicketPart(ticket=ticket))

    def _confirm(self, connection: Connection, message: Confirm) -> Confirmed:
        promise = self._promise(connection, message.request_id)
        if promise is None or promise.lease_end < time.monotonic():
            return Confirmed(request_id=message.request_id, broken="lease")
        are_current = all(
            promise.generations.get(block_id) == generation == self.engine.pool.generation(block_id)
            for block_id, generation in message.blocks
        )
        self._end(promise)
        return Confirmed(request_id=message.request_id, broken=None if are_current else "generation")

    def _end(self, promise: Promise) -> None:
        """The one place where a promise ends: its blocks become cached, or its computation stops."""
        if self._promises.get(promise.request_id) is promise:
            del self._promises[promise.request_id]
        self.engine.cancel(promise.sequence.request_id)

    def _refuse(self, connection: Connection, request_id: str, reason: str) -> None:
        connection.post(Failed(request_id=request_id, message=reason, retryable=True))


def _first_token(promise: Promise, output: StepOutput) -> TokenChunk:
    assert output.token is not None
    logprobs = output.token.logprobs
    return TokenChunk(
        request_id=promise.request_id,
        choice=promise.sequence.choice,
        token_ids=(output.token.token_id,),
        logprobs=None if logprobs is None else (logprobs,),
    )
