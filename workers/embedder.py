"""Embeddings on a worker of any role: read a text like a prompt, pool its hidden states, forget it.

    Embed ──> sequence with `pooling` ──> (fill) ──> chunks, beside everybody else's ──> Embedded

Owned from `Embed` to its one answer: `Embedded`, `Failed`, or nothing after a `Cancel` or with a lost connection.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from tandem.workers.connection import Connection
from tandem.workers.engine import Engine
from tandem.workers.errors import ProtocolError, RequestError
from tandem.workers.fill import Filler
from tandem.workers.metrics import WorkerMetrics
from tandem.workers.pooling import Pooling
from tandem.workers.protocol import AnyMessage, Cancel, Embed, Embedded, Failed
from tandem.workers.sequence import Sequence
from tandem.workers.steps import StepOutput
from tandem.workers.tasks import Tasks
from tandem.workers.types import KVSource, WorkerAddress


@dataclass(slots=True, eq=False)
class _Reading:
    connection: Connection
    message: Embed
    sequence: Sequence
    fill: asyncio.Task[None] | None = None


class Embedder:
    """Beside a worker's role, which asks it first whether something is its affair."""

    def __init__(
        self, address: WorkerAddress, engine: Engine, filler: Filler, metrics: WorkerMetrics, pooling: Pooling
    ) -> None:
        self.engine = engine
        self.filler = filler
        self.metrics = metrics
        self.pooling = pooling
        self._prefix = f"{address.worker_id}.{address.epoch}.embedding-"
        self._numbers = itertools.count()
        self._readings: dict[Sequence, _Reading] = {}
        self._by_name: dict[tuple[Connection, str], _Reading] = {}
        self._tasks = Tasks()

    def try_handle(self, connection: Connection, message: AnyMessage) -> bool:
        """False: it is about something else."""
        match message:
            case Embed():
                self._begin(connection, message)
            case Cancel() if reading := self._by_name.get((connection, message.request_id)):
                self._cancel(reading)
            case _:
                return False
        return True

    def try_take(self, output: StepOutput) -> bool:
        """False: it is of a sequence of somebody else's."""
        reading = self._readings.get(output.sequence)
        if reading is None:
            return False
        if output.error is not None:
            self._forget(reading)
            self._refuse(reading.connection, reading.message, output.error, retryable=output.is_retryable)
        elif output.embedding is not None:
            self._forget(reading)
            self._answer(reading, output.embedding)
        return True

    def try_fill(self, sequence: Sequence) -> bool:
        """The engine admitted a sequence whose beginning may be brought from elsewhere. False: it is none of ours."""
        reading = self._readings.get(sequence)
        if reading is None:
            return False
        reading.fill = self._tasks.spawn(self._fill(reading), f"fill {sequence.request_id}")
        # However it ends, even before it began: a cancelled sequence's blocks are given back when nobody writes them.
        reading.fill.add_done_callback(lambda _: self.engine.release_incoming(sequence))
        return True

    def source_of(self, sequence: Sequence) -> KVSource | None:
        reading = self._readings.get(sequence)
        return None if reading is None else reading.message.source

    def connection_lost(self, connection: Connection) -> None:
        for reading in [reading for reading in self._readings.values() if reading.connection is connection]:
            self._cancel(reading)

    async def close(self) -> None:
        for reading in list(self._readings.values()):
            self._cancel(reading)
        await self._tasks.wait()

    # Inside

    def _begin(self, connection: Connection, message: Embed) -> None:
        name = (connection, message.request_id)
        if name in self._by_name:
            raise ProtocolError(f"request id {message.request_id!r} is in use on this connection")
        if self.pooling.refusal is not None:
            self._refuse(connection, message, self.pooling.refusal, code="unsupported_model")
            return
        try:
            sequence = self.engine.add_embedding(
                self._prefix + str(next(self._numbers)),
                message.token_ids,
                self.pooling.mode,
                salt=message.salt,
                retention=message.retention,
                priority=message.priority,
                num_source_blocks=0 if message.source is None else message.source.num_blocks,
            )
        except RequestError as error:
            self._refuse(connection, message, str(error), param=error.param, code=error.code)
            return
        self._readings[sequence] = self._by_name[name] = _Reading(connection, message, sequence)

    async def _fill(self, reading: _Reading) -> None:
        if await self.filler.fill(reading.sequence, reading.message.salt):
            self.engine.fill_ended(reading.sequence, reading.sequence.num_computed)

    def _cancel(self, reading: _Reading) -> None:
        self._forget(reading)
        if self.engine.cancel(reading.sequence.request_id):
            assert reading.fill is not None, "an INCOMING sequence that nobody fills"
            reading.fill.cancel()

    def _forget(self, reading: _Reading) -> None:
        del self._readings[reading.sequence]
        del self._by_name[reading.connection, reading.message.request_id]

    def _answer(self, reading: _Reading, embedding: bytes) -> None:
        sequence = reading.sequence
        self.metrics.observe("queue_seconds", sequence.queued_s)
        reading.connection.post(
            Embedded(
                request_id=reading.message.request_id,
                embedding=embedding,
                cached=sequence.cached,
                queue_s=sequence.queued_s,
            )
        )

    def _refuse(
        self,
        connection: Connection,
        message: Embed,
        reason: str,
        *,
        retryable: bool = False,
        param: str | None = None,
        code: str = "internal_error",
    ) -> None:
        connection.post(
            Failed(request_id=message.request_id, message=reason, retryable=retryable, param=param, code=code)
        )
