"""What is cached here of a prompt, lent to another worker: from the pool at once, from lower tiers as it comes back.

    Fetch ──> own what the pool has ──> TicketPart*
          └─> tiers hold more, and soon enough ──> restored into the pool ──> TicketPart*, the last one

The other worker says by when it would compute the rest itself. This one knows how fast its tiers are, so it decides how
much of them is worth waiting for.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence as SequenceOf
from contextlib import aclosing
from typing import TYPE_CHECKING

from tandem.workers.connection import Connection
from tandem.workers.errors import RequestError
from tandem.workers.offload.tiers import Tiers, wanted_blocks
from tandem.workers.protocol import Fetch, TicketPart
from tandem.workers.sequence import Sequence, Status
from tandem.workers.tasks import Tasks
from tandem.workers.types import CachedTokens, KVTicket

if TYPE_CHECKING:
    from tandem.workers.promises import Promise, Promises

PART_BLOCKS = 32
"""Blocks per part of the ticket: the reader pulls one part while digests of the next are computed."""
RESTORED_PART_BLOCKS = 8
"""Of those that tiers bring back, which takes longer than a digest."""
TIER_SHARE = 0.5
"""Of the reader's time that tiers may take: what they bring must cross the wire, too."""


class Lender:
    """Answers `Fetch`. Promises and their ends are the business of promises.py."""

    def __init__(self, promises: Promises, tiers: Tiers | None) -> None:
        self._promises = promises
        self._tiers = tiers
        self._tasks = Tasks()

    async def close(self) -> None:
        """All promises must have ended."""
        await self._tasks.wait()

    def begin(self, connection: Connection, message: Fetch) -> None:
        promises = self._promises
        engine, request_id, first = promises.engine, message.request_id, message.first_block
        if first < 0 or message.max_blocks < 0:
            promises.refuse(connection, request_id, "negative numbers of blocks")
            return

        def num_restorable(keys: SequenceOf[bytes]) -> int:
            return self._num_restorable(keys, message.timeout_s * TIER_SHARE)

        try:
            sequence = engine.hold_cached(
                request_id, message.token_ids, message.salt, first + message.max_blocks, num_restorable
            )
        except RequestError as error:
            promises.refuse(connection, request_id, str(error))
            return
        if sequence is None:
            connection.post(TicketPart(ticket=self._empty_ticket(request_id)))
            return
        promise = promises.begin(connection, sequence)
        promise.num_blocks = first
        promise.lending = self._tasks.spawn(self._lend(promise), f"lend {request_id}")
        # However it ends, even before it began: the blocks of a promise that was cancelled are not written any more.
        promise.lending.add_done_callback(lambda _: engine.release_incoming(sequence))

    # Inside

    def _num_restorable(self, keys: SequenceOf[bytes], most_s: float) -> int:
        """How many of these blocks tiers hold, from the first on, and bring back in time."""
        tiers = self._tiers
        if tiers is None:
            return 0
        num_held = tiers.num_held(keys)
        return bisect_right(range(1, num_held + 1), most_s, key=lambda num: tiers.seconds(keys[:num]))

    async def _lend(self, promise: Promise) -> None:
        sequence = promise.sequence
        if sequence.status is Status.INCOMING:
            await self._publish(promise, self._num_arrived(sequence))
            await self._restore(promise)
            if not self._promises.engine.hold_arrived(sequence):
                return
        if len(sequence.block_ids) > promise.num_blocks:
            await self._publish(promise, len(sequence.block_ids), is_last=True)
            return
        self._promises.publish(promise, promise.num_blocks, [], is_last=True)
        if not promise.generations:  # nobody will confirm nothing
            self._promises.end(promise)

    async def _restore(self, promise: Promise) -> None:
        """Bring back what tiers hold, and publish it as it comes."""
        assert self._tiers is not None, "only tiers fill what is lent"
        sequence, size = promise.sequence, self._promises.kv_cache.block_size
        num_arrived = self._num_arrived(sequence)
        async with aclosing(self._tiers.restore(wanted_blocks(sequence, size))) as restored:
            async for source, num_blocks in restored:
                num_arrived += num_blocks
                self._promises.engine.blocks_arrived(sequence, num_arrived * size, source)
                if num_arrived - promise.num_blocks >= RESTORED_PART_BLOCKS:
                    await self._publish(promise, num_arrived)

    def _num_arrived(self, sequence: Sequence) -> int:
        return sequence.num_computed // self._promises.kv_cache.block_size

    async def _publish(self, promise: Promise, end: int, *, is_last: bool = False) -> None:
        """The blocks are owned, so they do not change while a thread computes their digests."""
        for start in range(promise.num_blocks, end, PART_BLOCKS):
            part_end = min(start + PART_BLOCKS, end)
            digests = await asyncio.to_thread(self._digests, promise.sequence.block_ids[start:part_end])
            self._promises.publish(promise, part_end, digests, is_last=is_last and part_end == end)

    def _digests(self, block_ids: list[int]) -> list[bytes]:
        return [self._promises.kv_cache.digest(block_id) for block_id in block_ids]

    def _empty_ticket(self, request_id: str) -> KVTicket:
        address = self._promises.address
        return KVTicket(
            request_id=request_id,
            worker_id=address.worker_id,
            epoch=address.epoch,
            part=0,
            blocks=(),
            lease_s=self._promises.lease_s,
            cached=CachedTokens(),
            last=True,
        )
