"""The decode worker's half of a handover: ask, pull what the ticket lists while the rest is being computed, verify.

Prefill ──> TicketPart* ──> pull + digests, part by part ──> Confirm ──> Confirmed ──> it joins the batch
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from tandem.workers.attempt import Attempt, Reader, TicketReader
from tandem.workers.batch import SampledToken
from tandem.workers.errors import TransferError
from tandem.workers.peers import Inbox, Peer, Peers
from tandem.workers.protocol import Prefill
from tandem.workers.sequence import Sequence
from tandem.workers.types import CachedTokens, KVSource, KVTicket, SamplingParams, TokenLogprobs, WorkerAddress


@dataclass(frozen=True, slots=True)
class Delivered:
    """A handover that succeeded: all KV of the sequence is in its blocks, and this is the token that follows."""

    worker_id: str
    first_token: SampledToken
    cached: CachedTokens
    prefill_ended_at: float
    """`time.monotonic()` when the last part of the ticket arrived here: the clocks of two hosts cannot be compared."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Handover(Attempt):
    """One attempt to get all missing KV of one sequence from one prefill worker. `source` is passed on to it."""

    def __init__(
        self,
        handover_id: str,
        sequence: Sequence,
        salt: str,
        reader: Reader,
        *,
        source: KVSource | None,
        pull_timeout_s: float,
    ) -> None:
        super().__init__(handover_id, sequence, reader)
        self._salt = salt
        self._source = source
        self._pull_timeout_s = pull_timeout_s

    async def run(self, peers: Peers, address: WorkerAddress) -> Delivered:
        """Raises `TransferError` with the reason ("disconnect" and "refused": another prefill worker may do), or
        `PullTimeout`, after which blocks may still be written. Cancelled: the prefill worker is told, and the pull in
        flight has ended."""
        return await self._converse(peers.get(address), self._receive)

    async def _receive(self, peer: Peer, inbox: Inbox) -> Delivered:
        peer.send(self._question())
        ticket_reader = TicketReader(self._id, peer.address, len(self._sequence.block_ids))
        prefill_ended_at = time.monotonic()
        while not ticket_reader.is_whole:
            ticket = await self._next_ticket(inbox)
            if ticket.last:
                prefill_ended_at = time.monotonic()
            await self._pull(peer, ticket_reader.accept(ticket), self._pull_timeout_s)
        await self._confirm(peer, inbox, ticket_reader.blocks.values())
        assert ticket_reader.last is not None
        first_token = _checked_first_token(ticket_reader.last)
        prompt_logprobs = ticket_reader.last.prompt_logprobs
        if self._sequence.scores_prompt and len(prompt_logprobs) != self._sequence.num_prompt_tokens - 1:
            raise TransferError("the last part of the ticket must carry the prompt's logprobs", reason="refused")
        return Delivered(
            *(peer.address.worker_id, first_token, ticket_reader.last.cached, prefill_ended_at), prompt_logprobs
        )

    def _sampling(self) -> SamplingParams:
        """What the prefill worker is to know: it reads one sequence, whoever goes on with it and how."""
        params = msgspec.structs.replace(self._sequence.params, beam_width=None)
        return params if self._sequence.scores_prompt else msgspec.structs.replace(params, num_prompt_logprobs=None)

    def _question(self) -> Prefill:
        sequence = self._sequence
        return Prefill(
            request_id=self._id,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=self._sampling(),
            choice=sequence.choice,
            salt=self._salt,
            retention=sequence.retention,
            priority=sequence.priority,
            source=self._source,
        )


def _checked_first_token(ticket: KVTicket) -> SampledToken:
    chunk = ticket.first_token
    if chunk is None or len(chunk.token_ids) != 1:
        raise TransferError("the last part of the ticket must carry exactly one token", reason="refused")
    return SampledToken(chunk.token_ids[0], None if chunk.logprobs is None else chunk.logprobs[0])
