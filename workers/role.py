"""What workers of every role do: keep promises, make embeddings, fetch what others have, keep links to them alive."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from tandem.workers.connection import Connection
from tandem.workers.embedder import Embedder
from tandem.workers.engine import Engine
from tandem.workers.errors import ProtocolError
from tandem.workers.fill import Filler
from tandem.workers.metrics import WorkerMetrics
from tandem.workers.peers import Peers
from tandem.workers.promises import Promises
from tandem.workers.protocol import AnyMessage, Pair
from tandem.workers.sequence import Sequence
from tandem.workers.steps import StepOutput
from tandem.workers.tasks import Tasks
from tandem.workers.types import KVSource


@dataclass(frozen=True, slots=True)
class Services:
    """What every role is made of."""

    engine: Engine
    promises: Promises
    filler: Filler
    peers: Peers
    metrics: WorkerMetrics
    embedder: Embedder


class Role(ABC):
    """A worker's part in serving. Runs on the worker's event loop, next to the engine that it feeds."""

    name: str

    def __init__(self, services: Services) -> None:
        self.engine = services.engine
        self.promises = services.promises
        self.filler = services.filler
        self.peers = services.peers
        self.metrics = services.metrics
        self.embedder = services.embedder
        self.filler.source_of = self._source_of
        self._tasks = Tasks()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.promises.run())
            group.create_task(self.peers.run())

    def handle(self, connection: Connection, message: AnyMessage) -> None:
        """Raises `ProtocolError` for a message that a worker of this role does not take."""
        if isinstance(message, Pair):
            self.peers.meet(message.sources)
        elif not self.embedder.try_handle(connection, message) and not self.promises.try_handle(connection, message):
            raise ProtocolError(f"a {self.name} worker does not take {type(message).__name__}")

    def connection_lost(self, connection: Connection) -> None:
        """Nobody waits any more for what it asked for."""
        self.embedder.connection_lost(connection)
        self.promises.connection_lost(connection)

    async def close(self) -> None:
        """End what is under way; blocks that a pull may still write stay unused, since the worker is going."""
        await self.embedder.close()
        await self.promises.close()
        await self._tasks.cancel()
        await self.peers.close()
        await self.filler.close()

    @abstractmethod
    def on_outputs(self, outputs: list[StepOutput]) -> None:
        """A step ended."""

    @abstractmethod
    def on_incoming(self, sequence: Sequence) -> None:
        """The engine admitted a sequence whose KV, or its beginning, may be brought from elsewhere."""

    @abstractmethod
    def _source_of(self, sequence: Sequence) -> KVSource | None:
        """Which peer, if any, is said to hold the beginning of a sequence that this worker reads."""

    def _spawn_fill(self, sequence: Sequence, fill: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """However it ends, even before it began: a cancelled sequence's blocks are given back when nobody writes them
        any more."""
        task = self._tasks.spawn(fill, f"fill {sequence.request_id}")
        task.add_done_callback(lambda _: self.engine.release_incoming(sequence))
        return task
