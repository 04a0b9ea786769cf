"""A worker's links to others whose KV it reads: one connection per incarnation, paired once, shared by all attempts.

Pairing compares what KV depends on, then moves a known pattern through the real path and measures it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tandem.workers.connection import Connection, connect
from tandem.workers.errors import PairingError, ProtocolError, TransferError, WorkerUnavailable
from tandem.workers.identity import difference
from tandem.workers.kv_cache import KVCache
from tandem.workers.protocol import (
    AnyMessage,
    Confirmed,
    Describe,
    Description,
    Failed,
    Message,
    Renew,
    Renewed,
    TicketPart,
)
from tandem.workers.transfer.base import NUM_PATTERN_BLOCKS, NUM_PROBE_BLOCKS, Transfer, probe_pattern
from tandem.workers.types import ModelIdentity, WorkerAddress

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0
MAX_MISSED_BEATS = 3

PeerAnswer = TicketPart | Confirmed | Failed
Inbox = asyncio.Queue[PeerAnswer | WorkerUnavailable]


@dataclass(frozen=True, slots=True)
class Measured:
    """The path to a peer, as the probe found it."""

    transport: str
    gigabytes_per_s: float


def write_probe_pattern(kv_cache: KVCache) -> None:
    """Fill the pattern's blocks with what a peer expects to read there."""
    for index, rows in enumerate(_pattern_blocks(kv_cache)):
        kv_cache.copy_in(kv_cache.num_blocks + index, rows)


def _pattern_blocks(kv_cache: KVCache) -> NDArray[np.uint8]:
    """[NUM_PATTERN_BLOCKS, block_bytes]"""
    return probe_pattern(NUM_PATTERN_BLOCKS * kv_cache.block_bytes).reshape(NUM_PATTERN_BLOCKS, -1)


class Peer:
    """A paired worker. Answers go to one inbox per request; when the link breaks, each inbox is told."""

    def __init__(
        self, address: WorkerAddress, connection: Connection, description: Description, path: Measured
    ) -> None:
        self.address = address
        self.description = description
        self.path = path
        self._connection = connection
        self._inboxes: dict[str, Inbox] = {}
        self._last_heard = time.monotonic()
        self._reader = asyncio.create_task(self._read(), name=f"read {address.worker_id}")

    @property
    def is_alive(self) -> bool:
        return not self._reader.done()

    def send(self, message: Message) -> None:
        """Raises `WorkerUnavailable` when the link is broken."""
        self._connection.send(message)

    @contextlib.contextmanager
    def inbox(self, request_id: str) -> Iterator[Inbox]:
        """Where the answers to one request arrive. Answers to requests without an inbox are dropped."""
        inbox: Inbox = asyncio.Queue()
        self._inboxes[request_id] = inbox
        if not self.is_alive:
            inbox.put_nowait(WorkerUnavailable(f"worker {self.address.worker_id} is gone"))
        try:
            yield inbox
        finally:
            del self._inboxes[request_id]

    def beat(self, *, silence_s: float) -> None:
        """Renew the leases of all open requests; end the link if the peer has said nothing for `silence_s`."""
        if not self._connection.is_open:
            return
        if time.monotonic() - self._last_heard > silence_s:
            logger.warning("worker %s is silent: its link is dropped", self.address.worker_id)
            self._connection.abort()
            return
        self._connection.post(Renew(request_ids=tuple(self._inboxes)))

    async def close(self) -> None:
        self._connection.abort()
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        """However it ends, nobody waits any longer for what will not come."""
        reason = "its answers are not read any more"
        try:
            while True:
                self._take(await self._connection.receive())
        except (WorkerUnavailable, ProtocolError) as error:
            reason = str(error)
        finally:
            self._connection.abort()
            for inbox in self._inboxes.values():
                inbox.put_nowait(WorkerUnavailable(f"worker {self.address.worker_id} is lost: {reason}"))

    def _take(self, answer: AnyMessage) -> None:
        self._last_heard = time.monotonic()
        if isinstance(answer, Renewed):
            return
        if not isinstance(answer, TicketPart | Confirmed | Failed):
            raise ProtocolError(f"a peer does not say {type(answer).__name__}")
        request_id = answer.ticket.request_id if isinstance(answer, TicketPart) else answer.request_id
        if inbox := self._inboxes.get(request_id):
            inbox.put_nowait(answer)


class Peers:
    """All links of one worker. A pair is made once, however many requests ask for it at the same time."""

    def __init__(
        self,
        identity: ModelIdentity,
        kv_cache: KVCache,
        transfer: Transfer,
        *,
        key: bytes,
        name: str,
        heartbeat_s: float,
    ) -> None:
        self._identity = identity
        self._kv_cache = kv_cache
        self._transfer = transfer
        self._key = key
        self._name = name
        self._heartbeat_s = heartbeat_s
        self._peers: dict[str, Peer] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._pairing: dict[WorkerAddress, asyncio.Task[Peer]] = {}
        """Begun for somebody who asks later, or may not wait to the end."""
        self._probe_lock = asyncio.Lock()  # all of them arrive in the same blocks of ours

    async def run(self) -> None:
        """Keep the leases of everything under way, and drop peers that have fallen silent."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            for peer in list(self._peers.values()):
                peer.beat(silence_s=MAX_MISSED_BEATS * self._heartbeat_s)

    async def get(self, address: WorkerAddress) -> Peer:
        """The paired link to this incarnation. Raises `WorkerUnavailable`, `PairingError` or `ProtocolError`."""
        async with self._locks.setdefault(address.worker_id, asyncio.Lock()):
            known = self._peers.get(address.worker_id)
            if known is not None:
                if known.is_alive and known.address == address:
                    return known
                if known.is_alive and known.address.epoch > address.epoch:
                    raise WorkerUnavailable(f"worker {address.worker_id} has a newer epoch")
                del self._peers[address.worker_id]
                await known.close()
                await self._transfer.forget(known.description.transfer)
            self._peers[address.worker_id] = peer = await self._pair(address)
            return peer

    async def get_within(self, address: WorkerAddress, timeout_s: float) -> Peer:
        """As `get`, but whoever asks waits no longer than this (`WorkerUnavailable`). The pairing goes on, for the next
        who asks."""
        task = self._begin(address)
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            raise WorkerUnavailable(f"pairing with worker {address.worker_id} takes too long")
        return task.result()

    def prepare(self, address: WorkerAddress) -> None:
        """Begin to pair, for whoever asks later."""
        self._begin(address)

    def meet(self, addresses: Iterable[WorkerAddress]) -> None:
        """Pair with all that may be asked some day; not where every link takes memory of a GPU."""
        if self._transfer.name != "nccl":
            for address in addresses:
                self.prepare(address)

    def path_to(self, address: WorkerAddress) -> Measured | None:
        """What the probe found of the path to this worker; None when there is no link (yet)."""
        peer = self._peers.get(address.worker_id)
        return peer.path if peer is not None and peer.is_alive and peer.address == address else None

    async def close(self) -> None:
        if pairing := list(self._pairing.values()):
            for task in pairing:
                task.cancel()
            await asyncio.wait(pairing)
        for peer in self._peers.values():
            await peer.close()
            await self._transfer.forget(peer.description.transfer)
        self._peers.clear()

    # Inside

    def _begin(self, address: WorkerAddress) -> asyncio.Task[Peer]:
        """Once at a time, whoever asks meanwhile."""
        task = self._pairing.get(address)
        if task is None:
            name = f"pair with {address.worker_id} epoch {address.epoch}"
            task = self._pairing[address] = asyncio.create_task(self.get(address), name=name)
            task.add_done_callback(partial(self._pairing_ended, address))
        return task

    def _pairing_ended(self, address: WorkerAddress, task: asyncio.Task[Peer]) -> None:
        del self._pairing[address]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("%s failed: %s", task.get_name(), error)

    async def _pair(self, address: WorkerAddress) -> Peer:
        connection = await connect(address, key=self._key, peer=self._name)
        try:
            connection.send(Describe())
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                description = await connection.receive_expected(Description)
            if (reason := difference(self._identity, description.identity)) is not None:
                raise PairingError(reason)
            if description.transfer_name != self._transfer.name:
                raise PairingError(
                    f"transfer differs: ours {self._transfer.name!r}, theirs {description.transfer_name!r}"
                )
            path = await self._probe(description)
        except TimeoutError as error:
            connection.abort()
            raise WorkerUnavailable(f"worker {address.worker_id} does not describe itself") from error
        except BaseException:
            connection.abort()
            raise
        logger.info("paired with %s over %s: %.2f GB/s", address.worker_id, path.transport, path.gigabytes_per_s)
        return Peer(address, connection, description, path)

    async def _probe(self, description: Description) -> Measured:
        """Pull the known pattern twice, check it, time the second (the first wires the transport up)."""
        remote = list(range(description.probe_block, description.probe_block + NUM_PATTERN_BLOCKS))
        first = self._kv_cache.num_blocks
        local = list(range(first + NUM_PATTERN_BLOCKS, first + NUM_PROBE_BLOCKS))
        expected = _pattern_blocks(self._kv_cache)
        async with self._probe_lock:
            elapsed = 0.0
            arrived = np.zeros(self._kv_cache.block_bytes, np.uint8)
            for block_id in local:
                self._kv_cache.copy_in(block_id, arrived)
            for _ in range(2):
                started = time.perf_counter()
                try:
                    await self._transfer.pull(description.transfer, remote, local, timeout_s=PROBE_TIMEOUT_S)
                except TransferError as error:
                    raise WorkerUnavailable(f"the first pull failed ({error.reason}): {error}") from error
                elapsed = time.perf_counter() - started
            for block_id, rows in zip(local, expected):
                self._kv_cache.copy_out(block_id, arrived)
                if not np.array_equal(arrived, rows):
                    raise PairingError("the first pull did not deliver the known pattern")
        num_bytes = NUM_PATTERN_BLOCKS * self._kv_cache.block_bytes
        return Measured(self._transfer.transport_of(description.transfer), num_bytes / elapsed / 1e9)
