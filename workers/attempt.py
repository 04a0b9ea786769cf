"""What reading KV from another worker has in common, be it a handover or a fetch: ask, pull, compare, confirm.

Parts of a ticket may arrive twice or out of order; a block is accepted once. Nothing is used before every digest has
matched and the owner has confirmed that its promise held. Any failure is a `TransferError`, and costs a recompute only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from tandem.workers.errors import PairingError, ProtocolError, TransferError, WorkerUnavailable
from tandem.workers.kv_cache import KVCache
from tandem.workers.metrics import WorkerMetrics
from tandem.workers.peers import Inbox, Peer
from tandem.workers.protocol import Cancel, Confirm, Confirmed, Failed, TicketPart
from tandem.workers.sequence import Sequence
from tandem.workers.transfer.base import Transfer
from tandem.workers.types import KVTicket, TicketBlock, WorkerAddress

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Reader:
    """What it takes to read other workers' blocks into ours."""

    kv_cache: KVCache
    transfer: Transfer
    metrics: WorkerMetrics
    settle: Callable[[list[int]], Awaitable[None]]
    """Awaited before blocks of ours are overwritten."""


class TicketReader:
    """Puts a ticket together from its parts: the blocks from `first` to before `end`, or, if `may_end_early`, a run of
    them. Knows when it is whole; refuses what does not fit the request."""

    def __init__(
        self, request_id: str, address: WorkerAddress, end: int, *, first: int = 0, may_end_early: bool = False
    ) -> None:
        self._request_id = request_id
        self._address = address
        self._first = first
        self._end = end
        self._may_end_early = may_end_early
        self._parts_seen: set[int] = set()
        self._num_parts: int | None = None
        self.blocks: dict[int, TicketBlock] = {}
        self.last: KVTicket | None = None

    @property
    def is_whole(self) -> bool:
        return self._num_parts is not None and len(self._parts_seen) == self._num_parts

    def accept(self, ticket: KVTicket) -> list[TicketBlock]:
        """The blocks that this part adds; none if it was here before. Raises `TransferError`."""
        if (ticket.request_id, ticket.worker_id, ticket.epoch) != (
            self._request_id,
            self._address.worker_id,
            self._address.epoch,
        ):
            raise TransferError("a ticket of another request or incarnation", reason="refused")
        if ticket.part in self._parts_seen:
            return []
        if ticket.part < 0 or any(not self._first <= block.index < self._end for block in ticket.blocks):
            raise TransferError("the ticket lists a block that the request does not have", reason="refused")
        if any(block.index in self.blocks for block in ticket.blocks):
            raise TransferError("the ticket lists a block twice", reason="refused")
        self._parts_seen.add(ticket.part)
        self.blocks |= {block.index: block for block in ticket.blocks}
        if ticket.last:
            self._num_parts, self.last = ticket.part + 1, ticket
        if self.is_whole and not self._has_all():
            raise TransferError("the ticket does not list all blocks", reason="refused")
        return list(ticket.blocks)

    def _has_all(self) -> bool:
        if self._may_end_early:
            return not self.blocks or max(self.blocks) == self._first + len(self.blocks) - 1
        return len(self.blocks) == self._end - self._first


class Attempt:
    """One attempt to read KV of one sequence from one worker."""

    def __init__(self, attempt_id: str, sequence: Sequence, reader: Reader) -> None:
        self._id = attempt_id
        self._sequence = sequence
        self._reader = reader
        self.pulled_bytes = 0
        self.pull_s = 0.0
        self.pulling: list[int] = []
        """Our blocks that the latest pull writes; after `PullTimeout` those that may still be written."""

    async def _converse(
        self, connecting: Awaitable[Peer], receive: Callable[[Peer, Inbox], Awaitable[Result]]
    ) -> Result:
        """Ask a peer and take its answers. Whatever ends it early is a `TransferError`, or tells the peer to stop."""
        try:
            peer = await connecting
        except WorkerUnavailable as error:
            raise TransferError(str(error), reason="disconnect") from error
        except (PairingError, ProtocolError) as error:
            raise TransferError(str(error), reason="refused") from error
        with peer.inbox(self._id) as inbox:
            try:
                return await receive(peer, inbox)
            except WorkerUnavailable as error:
                raise TransferError(str(error), reason="disconnect") from error
            except BaseException:  # cancellation too
                self._withdraw(peer)
                raise

    def _withdraw(self, peer: Peer) -> None:
        """The owner need not go on, nor keep anything. It knows by itself where the link has ended."""
        with contextlib.suppress(WorkerUnavailable):
            peer.send(Cancel(request_id=self._id))

    async def _next(self, inbox: Inbox, timeout_s: float | None = None) -> TicketPart | Confirmed:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await inbox.get()
        except TimeoutError as error:
            raise TransferError("the other worker does not answer in time", reason="timeout") from error
        if isinstance(answer, WorkerUnavailable):
            raise answer
        if isinstance(answer, Failed):
            raise TransferError(f"the other worker refused: {answer.message}", reason="refused")
        return answer

    async def _next_ticket(self, inbox: Inbox, timeout_s: float | None = None) -> KVTicket:
        answer = await self._next(inbox, timeout_s)
        if isinstance(answer, Confirmed):
            raise TransferError("confirmed before the ticket was whole", reason="refused")
        return answer.ticket

    async def _pull(self, peer: Peer, blocks: list[TicketBlock], timeout_s: float) -> None:
        """Fetch those of the blocks that we do not hold yet, and compare their digests."""
        reader, sequence = self._reader, self._sequence
        first_missing = sequence.num_computed // reader.kv_cache.block_size
        missing = [block for block in blocks if block.index >= first_missing]
        if not missing:
            return
        remote = [block.block_id for block in missing]
        local = [sequence.block_ids[block.index] for block in missing]
        await reader.settle(local)
        started = time.monotonic()
        self.pulling = local
        await reader.transfer.pull(peer.description.transfer, remote, local, timeout_s=timeout_s)
        elapsed_s, num_bytes = time.monotonic() - started, len(missing) * reader.kv_cache.block_bytes
        self.pull_s += elapsed_s
        self.pulled_bytes += num_bytes
        reader.metrics.observe("kv_transfer_seconds", elapsed_s)
        reader.metrics.count("kv_transfer_bytes_total", num_bytes)
        for block, block_id in zip(missing, local):
            if reader.kv_cache.digest(block_id) != block.digest:
                raise TransferError(f"block {block.index} arrived with another digest", reason="digest")

    async def _confirm(
        self, peer: Peer, inbox: Inbox, blocks: Iterable[TicketBlock], timeout_s: float | None = None
    ) -> None:
        pairs = tuple((block.block_id, block.generation) for block in blocks)
        peer.send(Confirm(request_id=self._id, blocks=pairs))
        while isinstance(answer := await self._next(inbox, timeout_s), TicketPart):
            continue  # a part that came twice
        if answer.broken is not None:
            raise TransferError(f"the other worker's promise did not hold: {answer.broken}", reason=answer.broken)
