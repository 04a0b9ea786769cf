"""The decode worker: owns every request from `Submit` to its one terminal message.

    Submit ─> engine ─> fill ─┬─ prompt missing, a prefill worker is named ─> handover ─┬─> joins ─> Tokens ... finish
                              └─ little is missing, or nobody is left ─> prefills here ─┘

The same class serves the aggregated role: then no prefill worker is ever named, and nothing is handed over.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict

import msgspec

from tandem.workers.active_request import ActiveRequest
from tandem.workers.connection import Connection
from tandem.workers.errors import PairingError, ProtocolError, RequestError, WorkerUnavailable
from tandem.workers.grammar import GrammarCache
from tandem.workers.protocol import (
    AnyMessage,
    Cancel,
    Failed,
    FinishChoice,
    Pair,
    Paired,
    Started,
    Submit,
    Tokens,
    UsePrefill,
)
from tandem.workers.receiver import Receiver
from tandem.workers.role import Role, Services
from tandem.workers.sequence import Sequence
from tandem.workers.steps import StepOutput
from tandem.workers.types import KVSource, TokenChunk, WorkerAddress

logger = logging.getLogger(__name__)

PAIRING_ATTEMPTS = 5
PAIRING_PAUSE_S = 1.0
"""A first pull may fail while the other side is busy starting; a difference between the two is final at once."""


class DecodeWorker(Role):
    """Answers gateways."""

    name = "decode"

    def __init__(self, services: Services, address: WorkerAddress) -> None:
        super().__init__(services)
        self.address = address
        self._receiver = Receiver(address, self.engine, self.filler, self.peers)
        self._requests: dict[tuple[Connection, str], ActiveRequest] = {}
        self._by_engine_id: dict[str, ActiveRequest] = {}
        self._numbers = itertools.count()

    def handle(self, connection: Connection, message: AnyMessage) -> None:
        match message:
            case Submit():
                self._submit(connection, message)
            case Cancel() if active := self._requests.get((connection, message.request_id)):
                self._cancel(active)
            case FinishChoice():
                if active := self._requests.get((connection, message.request_id)):
                    self._finish_choice(active, message.choice)
            case UsePrefill():
                if active := self._requests.get((connection, message.request_id)):
                    active.use_prefill(message)
            case Pair():
                for address in message.prefill:
                    self._tasks.spawn(self._pair(connection, address), f"pair with {address.worker_id}")
                super().handle(connection, message)
            case _:
                super().handle(connection, message)

    def connection_lost(self, connection: Connection) -> None:
        for active in [active for active in self._requests.values() if active.connection is connection]:
            self._cancel(active)
        super().connection_lost(connection)

    async def close(self) -> None:
        for active in list(self._requests.values()):
            self._cancel(active)
        await super().close()

    def on_outputs(self, outputs: list[StepOutput]) -> None:
        """A step ended: one frame per gateway connection carries the tokens of all its requests."""
        chunks: dict[Connection, list[TokenChunk]] = defaultdict(list)
        for output in outputs:
            if self.embedder.try_take(output):
                continue
            active = self._by_engine_id.get(output.sequence.request_id)
            if active is None:
                continue
            if output.error is not None:
                # what no worker can go on with is the request's own contradiction, and its client is told
                code = "internal_error" if output.is_retryable else "invalid_request"
                self._fail(active, output.error, retryable=output.is_retryable, code=code)
            elif output.answers:
                self._start(active)
                answers = tuple(active.whole_chunk(answer) for answer in output.answers)
                active.connection.post(Tokens(chunks=answers))  # alone: their logprobs may fill a frame
                self._forget(active)
            elif output.token is not None:
                self._start(active)
                chunks[active.connection].append(active.chunk(output))
                if output.finish_reason is not None:
                    self._close_choice(active, output.sequence.choice)
        for connection, batch in chunks.items():
            connection.post(Tokens(chunks=tuple(batch)))

    def on_incoming(self, sequence: Sequence) -> None:
        if self.embedder.try_fill(sequence):
            return
        active = self._by_engine_id[sequence.request_id]
        active.fills[sequence.choice] = self._spawn_fill(sequence, self._fill(active, sequence))

    # A request's beginning and end

    def _submit(self, connection: Connection, message: Submit) -> None:
        request = message.request
        if (connection, request.request_id) in self._requests:
            raise ProtocolError(f"request id {request.request_id!r} is in use on this connection")
        engine_id = f"{self.address.worker_id}.{self.address.epoch}.{next(self._numbers)}"
        active = ActiveRequest(connection, request, engine_id, message.prefill, message.source)
        active.open_choices = {choice.index for choice in request.choices}
        self._requests[connection, request.request_id] = active
        self._by_engine_id[engine_id] = active
        if message.timeout_s is not None:
            loop = asyncio.get_running_loop()
            active.deadline = loop.call_later(message.timeout_s, self._end_late, active)
        if request.sampling.grammar is None or self.engine.grammars is None:
            self._begin(active)
        else:
            self._tasks.spawn(self._prepare(active, self.engine.grammars, request.sampling.grammar), "grammar")

    async def _prepare(self, active: ActiveRequest, grammars: GrammarCache, text: str) -> None:
        """Compile the grammar, then begin, unless the request has ended meanwhile."""
        try:
            await grammars.prepare(text)
        except RequestError as error:
            if self._by_engine_id.get(active.engine_id) is active:
                self._refuse(active, error)
        else:
            if self._by_engine_id.get(active.engine_id) is active:
                self._begin(active)

    def _begin(self, active: ActiveRequest) -> None:
        choices = tuple(choice for choice in active.request.choices if choice.index in active.open_choices)
        request = msgspec.structs.replace(active.request, request_id=active.engine_id, choices=choices)
        try:
            if active.prefill is not None:
                active.sequences = self.engine.add(request, wants_remote=True)
            else:
                num_source_blocks = 0 if active.source is None else active.source.num_blocks
                active.sequences = self.engine.add(request, num_source_blocks=num_source_blocks)
        except RequestError as error:
            self._refuse(active, error)

    def _refuse(self, active: ActiveRequest, error: RequestError) -> None:
        self._fail(active, str(error), retryable=False, param=error.param, code=error.code)

    def _start(self, active: ActiveRequest) -> None:
        """Before the first token: say which way the prompt was read. The first choice is the one that read it."""
        if active.is_started:
            return
        active.is_started = True
        sequence, delivered = active.sequences[0], active.delivered
        handover_s = None
        if delivered is not None:
            handover_s = (sequence.joined_at or delivered.prefill_ended_at) - delivered.prefill_ended_at
            self.metrics.observe("handover_seconds", handover_s)
        self.metrics.observe("queue_seconds", sequence.queued_s)
        active.connection.post(
            Started(
                request_id=active.request.request_id,
                path="local" if delivered is None else "remote",
                prefill_worker=self.address.worker_id if delivered is None else delivered.worker_id,
                decode_worker=self.address.worker_id,
                cached=sequence.cached if delivered is None else delivered.cached,
                queue_s=sequence.queued_s,
                handover_s=handover_s,
                prompt_logprobs=tuple(sequence.prompt_logprobs),
            )
        )

    def _close_choice(self, active: ActiveRequest, choice: int) -> None:
        active.open_choices.discard(choice)
        if not active.open_choices:
            self._forget(active)

    def _finish_choice(self, active: ActiveRequest, choice: int) -> None:
        if choice in active.open_choices:
            self._stop(active, choice)
            self._close_choice(active, choice)

    def _cancel(self, active: ActiveRequest) -> None:
        """Free every block here, now or when the pull in flight has ended, and on the prefill worker."""
        self._forget(active)
        self._stop(active)

    def _stop(self, active: ActiveRequest, choice: int | None = None) -> None:
        for sequence in self.engine.cancel(active.engine_id, choice):
            active.fills[sequence.choice].cancel()

    def _fail(
        self, active: ActiveRequest, message: str, *, retryable: bool, code: str, param: str | None = None
    ) -> None:
        self._cancel(active)
        active.connection.post(
            Failed(request_id=active.request.request_id, message=message, retryable=retryable, param=param, code=code)
        )

    def _end_late(self, active: ActiveRequest) -> None:
        """The gateway's deadline, and ours should the gateway be unable to keep it."""
        self._fail(active, "the deadline has passed", retryable=False, code="timeout")

    def _forget(self, active: ActiveRequest) -> None:
        self._requests.pop((active.connection, active.request.request_id), None)
        self._by_engine_id.pop(active.engine_id, None)
        if active.deadline is not None:
            active.deadline.cancel()

    # Fills

    def _source_of(self, sequence: Sequence) -> KVSource | None:
        """Whence this worker may fetch: only if it is to read the prompt itself."""
        active = self._by_engine_id.get(sequence.request_id)
        if active is None:
            return self.embedder.source_of(sequence)
        return None if active.prefill is not None else active.source

    async def _fill(self, active: ActiveRequest, sequence: Sequence) -> None:
        """Bring what exists already; have the rest handed over, or compute it here."""
        if not await self.filler.fill(sequence, active.request.salt):
            return
        if sequence.wants_remote and sequence.num_uncomputed > self.engine.config.local_prefill_tokens:
            output = await self._receiver.receive(active, sequence)
            if output is not None:
                self.on_outputs([output])
        else:
            self.engine.fill_ended(sequence, sequence.num_computed)

    async def _pair(self, connection: Connection, address: WorkerAddress) -> None:
        for remaining in reversed(range(PAIRING_ATTEMPTS)):
            try:
                path = (await self.peers.get(address)).path
                break
            except (PairingError, ProtocolError, WorkerUnavailable) as error:
                logger.warning("pairing with %s failed: %s", address.worker_id, error)
                if isinstance(error, WorkerUnavailable) and remaining:
                    await asyncio.sleep(PAIRING_PAUSE_S)
                    continue
                connection.post(Paired(prefill_worker=address.worker_id, error=str(error)))
                return
        connection.post(
            Paired(prefill_worker=address.worker_id, transport=path.transport, gigabytes_per_s=path.gigabytes_per_s)
        )
