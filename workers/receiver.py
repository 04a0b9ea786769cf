"""A sequence's KV from prefill workers, one after another, until one has delivered or nobody is left.

asked ─┬─ delivered ─────────────> it joins the batch, with its first token
       ├─ lost, refused or late ──> NeedPrefill ──> UsePrefill: the next one, or nobody
       └─ anything else, nobody ──> it is computed here
"""

from __future__ import annotations

import asyncio
import itertools

from tandem.workers.active_request import ActiveRequest
from tandem.workers.engine import Engine
from tandem.workers.errors import TransferError
from tandem.workers.fill import Filler
from tandem.workers.handover import Handover
from tandem.workers.peers import Peers
from tandem.workers.protocol import NeedPrefill
from tandem.workers.sequence import Sequence
from tandem.workers.steps import StepOutput
from tandem.workers.transfer.base import PullTimeout
from tandem.workers.types import KVSource, WorkerAddress

NEED_PREFILL_TIMEOUT_S = 5.0
"""How long the gateway may think about another prefill worker before this one reads the prompt itself."""


class Receiver:
    """Of one decode worker, whose address is `address`."""

    def __init__(self, address: WorkerAddress, engine: Engine, filler: Filler, peers: Peers) -> None:
        self._address = address
        self._engine = engine
        self._filler = filler
        self._peers = peers

    async def receive(self, active: ActiveRequest, sequence: Sequence) -> StepOutput | None:
        """Get the KV of an INCOMING sequence that `wants_remote`. Returns its first token, which counts as sampled
        here; None: it is computed here, or was cancelled."""
        for attempt in itertools.count():
            if active.prefill is None:
                break
            handover = self._handover(f"{active.engine_id}.{sequence.choice}.{attempt}", active, sequence)
            try:
                delivered = await handover.run(self._peers, active.prefill)
            except TransferError as error:
                self._filler.count_failure(f"handover of request {active.request.request_id}", error)
                if isinstance(error, PullTimeout) and not self._filler.set_aside(sequence, handover.pulling, error):
                    active.prefill = None
                    return None  # back in the queue: it computes everything here
                if sequence.is_finished:
                    return None
                active.prefill = await self._next_prefill(active, error)
            else:
                if sequence is active.sequences[0]:
                    active.delivered = delivered
                return self._engine.handover_finished(sequence, delivered.first_token, delivered.prompt_logprobs)
        self._engine.fill_ended(sequence, sequence.num_computed)
        return None

    # Inside

    def _handover(self, handover_id: str, active: ActiveRequest, sequence: Sequence) -> Handover:
        return Handover(
            handover_id,
            sequence,
            active.request.salt,
            self._filler.reader,
            source=self._best_source(active, sequence),
            pull_timeout_s=self._engine.config.pull_timeout_s,
        )

    def _best_source(self, active: ActiveRequest, sequence: Sequence) -> KVSource | None:
        """Where the prefill worker finds more of this prompt than with itself: perhaps here, an earlier answer above
        all."""
        num_here = sequence.num_computed // self._engine.config.block_size
        if num_here == 0 or (active.source is not None and active.source.num_blocks > num_here):
            return active.source
        return KVSource(address=self._address, num_blocks=num_here)

    async def _next_prefill(self, active: ActiveRequest, error: TransferError) -> WorkerAddress | None:
        """Who else? Only a worker that is lost or refuses is replaced; after any other failure we compute here."""
        if error.reason not in ("disconnect", "refused", "timeout") or active.prefill is None:
            return None
        if active.replacement is None or active.replacement.done():
            active.replacement = asyncio.get_running_loop().create_future()
            question = NeedPrefill(
                request_id=active.request.request_id, failed_worker=active.prefill.worker_id, reason=error.reason
            )
            active.connection.post(question)
        try:
            async with asyncio.timeout(NEED_PREFILL_TIMEOUT_S):
                return await asyncio.shield(active.replacement)
        except TimeoutError:
            return None
