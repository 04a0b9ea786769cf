"""Reading the beginning of a prompt from whatever worker has it cached, instead of computing it.

Fetch ──> TicketPart* ──> pull + digests, part by part ──> Confirm ──> Confirmed ──> these blocks have arrived
"""

from __future__ import annotations

import time

from tandem.workers.attempt import Attempt, Reader, TicketReader
from tandem.workers.peers import Inbox, Peer, Peers
from tandem.workers.protocol import Fetch
from tandem.workers.sequence import Sequence
from tandem.workers.types import WorkerAddress

LEAST_PULL_TIMEOUT_S = 1.0
"""A pull that misses its deadline costs blocks in quarantine; the time that it may save is small beside that."""


class FetchAttempt(Attempt):
    """One attempt to get the blocks from `first` to before `end` of an INCOMING sequence. It gives up at its deadline,
    by when computing them would have been faster."""

    def __init__(
        self, fetch_id: str, sequence: Sequence, salt: str, reader: Reader, *, first: int, end: int, timeout_s: float
    ) -> None:
        super().__init__(fetch_id, sequence, reader)
        self._salt = salt
        self._first = first
        self._end = end
        self._deadline = time.monotonic() + timeout_s

    async def run(self, peers: Peers, address: WorkerAddress) -> int:
        """How many blocks have arrived, from `first` on: perhaps fewer than asked for, or none. Raises `TransferError`
        with the reason; `PullTimeout`: blocks may still be written. Cancelled: the pull in flight has ended."""
        return await self._converse(peers.get_within(address, self._left_s), self._receive)

    async def _receive(self, peer: Peer, inbox: Inbox) -> int:
        peer.send(self._question())
        ticket_reader = TicketReader(self._id, peer.address, self._end, first=self._first, may_end_early=True)
        while not ticket_reader.is_whole:
            ticket = await self._next_ticket(inbox, self._left_s)
            await self._pull(peer, ticket_reader.accept(ticket), max(self._left_s, LEAST_PULL_TIMEOUT_S))
        if ticket_reader.blocks:
            await self._confirm(peer, inbox, ticket_reader.blocks.values(), max(self._left_s, LEAST_PULL_TIMEOUT_S))
        return len(ticket_reader.blocks)

    def _question(self) -> Fetch:
        block_size = self._reader.kv_cache.block_size
        return Fetch(
            request_id=self._id,
            token_ids=tuple(self._sequence.token_ids[: self._end * block_size]),
            salt=self._salt,
            first_block=self._first,
            max_blocks=self._end - self._first,
            timeout_s=self._left_s,
        )

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())
