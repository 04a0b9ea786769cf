"""The decode worker's half of a handover: ask, pull what the ticket lists while the rest is being computed, verify.

    Prefill ──> TicketPart* ──> pull + digests, part by part ──> Confirm ──> Confirmed ──> it joins the batch

Parts may arrive twice or out of order; a block is accepted once. Nothing is used before every digest has matched and
the prefill worker has confirmed that its promise held. Any failure is a `TransferError`, and costs a recompute only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from tandem.workers.batch import SampledToken
from tandem.workers.errors import PairingError, ProtocolError, TransferError, WorkerUnavailable
from tandem.workers.kv_cache import KVCache
from tandem.workers.metrics import WorkerMetrics
from tandem.workers.peers import Inbox, PrefillPeer, PrefillPeers
from tandem.workers.protocol import Cancel, Confirm, Confirmed, Failed, Prefill, TicketPart
from tandem.workers.sequence import Sequence
from tandem.workers.transfer.base import Transfer
from tandem.workers.types import CachedTokens, KVTicket, TicketBlock, WorkerAddress


@dataclass(frozen=True, slots=True)
class Delivered:
    """A handover that succeeded: all KV of the sequence is in its blocks, and this is the token that follows."""

    worker_id: str
    first_token: SampledToken
    cached: CachedTokens
    prefill_ended_at: float
    """`time.monotonic()` when the last part of the ticket arrived here: the clocks of two hosts cannot be compared."""


class TicketReader:
    """Puts a ticket together from its parts. Knows when it is whole; refuses what does not fit the request."""

    def __init__(self, request_id: str, address: WorkerAddress, num_blocks: int) -> None:
        self._request_id = request_id
        self._address = address
        self._num_blocks = num_blocks
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
        if ticket.part < 0 or any(not 0 <= block.index < self._num_blocks for block in ticket.blocks):
            raise TransferError("the ticket lists a block that the request does not have", reason="refused")
        if any(block.index in self.blocks for block in ticket.blocks):
            raise TransferError("the ticket lists a block twice", reason="refused")
        self._parts_seen.add(ticket.part)
        self.blocks |= {block.index: block for block in ticket.blocks}
        if ticket.last:
            self._num_parts, self.last = ticket.part + 1, ticket
        if self.is_whole and len(self.blocks) != self._num_blocks:
            raise TransferError("the ticket does not list all blocks", reason="refused")
        return list(ticket.blocks)


class Handover:
    """One attempt to get one sequence's KV from one prefill worker."""

    def __init__(
        self,
        handover_id: str,
        sequence: Sequence,
        salt: str,
        *,
        kv_cache: KVCache,
        transfer: Transfer,
        metrics: WorkerMetrics,
        pull_timeout_s: float,
    ) -> None:
        self._id = handover_id
        self._sequence = sequence
        self._salt = salt
        self._kv_cache = kv_cache
        self._transfer = transfer
        self._metrics = metrics
        self._pull_timeout_s = pull_timeout_s
        self.pulling: list[int] = []
        """Our blocks that the latest pull writes; after `PullTimeout` those that may still be written."""

    async def run(self, peers: PrefillPeers, address: WorkerAddress) -> Delivered:
        """Raises `TransferError` with the reason ("disconnect" and "refused": another prefill worker may do), or
        `PullTimeout`, after which blocks may still be written. Cancelled: the prefill worker is told, and the pull in
        flight has ended."""
        try:
            peer = await peers.get(address)
        except WorkerUnavailable as error:
            raise TransferError(str(error), reason="disconnect") from error
        except (PairingError, ProtocolError) as error:
            raise TransferError(str(error), reason="refused") from error
        with peer.inbox(self._id) as inbox:
            try:
                return await self._receive(peer, inbox)
            except WorkerUnavailable as error:
                raise TransferError(str(error), reason="disconnect") from error
            except BaseException:  # cancellation too: in every case the prefill worker need not go on
                if peer.is_alive:
                    peer.send(Cancel(request_id=self._id))
                raise

    async def _receive(self, peer: PrefillPeer, inbox: Inbox) -> Delivered:
        peer.send(self._question())
        reader = TicketReader(self._id, peer.address, len(self._sequence.block_ids))
        prefill_ended_at = time.monotonic()
        while not reader.is_whole:
            answer = await self._next(inbox)
            if isinstance(answer, Confirmed):
                raise TransferError("confirmed before the ticket was whole", reason="refused")
            ticket = answer.ticket
            if ticket.last:
                prefill_ended_at = time.monotonic()
            await self._pull(peer, reader.accept(ticket))
        await self._confirm(peer, inbox, reader.blocks.values())
        assert reader.last is not None
        first_token = _checked_first_token(reader.last)
        return Delivered(peer.address.worker_id, first_token, reader.last.cached, prefill_ended_at)

    def _question(self) -> Prefill:
        sequence = self._sequence
        return Prefill(
            request_id=self._id,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=sequence.params,
            choice=sequence.choice,
            salt=self._salt,
            retention=sequence.retention,
        )

    async def _next(self, inbox: Inbox) -> TicketPart | Confirmed:
        answer = await inbox.get()
        if isinstance(answer, WorkerUnavailable):
            raise answer
        if isinstance(answer, Failed):
            raise TransferError(f"the prefill worker refused: {answer.message}", reason="refused")
        return answer

    async def _pull(self, peer: PrefillPeer, blocks: list[TicketBlock]) -> None:
        """Fetch those of the blocks that we did not hold when the sequence was admitted, and compare their digests."""
        first_missing = self._sequence.num_registered
        missing = [block for block in blocks if block.index >= first_missing]
        if not missing:
            return
        remote = [block.block_id for block in missing]
        local = [self._sequence.block_ids[block.index] for block in missing]
        started = time.monotonic()
        self.pulling = local
        await self._transfer.pull(peer.description.transfer, remote, local, timeout_s=self._pull_timeout_s)
        self._metrics.observe("kv_transfer_seconds", time.monotonic() - started)
        self._metrics.count("kv_transfer_bytes_total", len(missing) * self._kv_cache.block_bytes)
        for block, block_id in zip(missing, local):
            if self._kv_cache.digest(block_id) != block.digest:
                raise TransferError(f"block {block.index} arrived with another digest", reason="digest")

    async def _confirm(self, peer: PrefillPeer, inbox: Inbox, blocks: Iterable[TicketBlock]) -> None:
        pairs = tuple((block.block_id, block.generation) for block in blocks)
        peer.send(Confirm(request_id=self._id, blocks=pairs))
        while isinstance(answer := await self._next(inbox), TicketPart):
            continue  # a part that came twice
        if answer.broken is not None:
            raise TransferError(f"the prefill worker's promise did not hold: {answer.broken}", reason=answer.broken)


def _checked_first_token(ticket: KVTicket) -> SampledToken:
    chunk = ticket.first_token
    if chunk is None or len(chunk.token_ids) != 1:
        raise TransferError("the last part of the ticket must carry exactly one token", reason="refused")
    return SampledToken(chunk.token_ids[0], None if chunk.logprobs is None else chunk.logprobs[0])
