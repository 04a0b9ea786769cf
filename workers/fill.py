"""Filling the blocks of an INCOMING sequence with KV that exists already: this worker's tiers first, then a peer.

    pool ──> tiers (host memory, disk) ──> a peer that holds more ──> the rest: handed over, or computed here

Each source is used only where it is expected to beat computing, and each failure costs a recompute of what it would
have brought. Whatever has arrived and was checked stays.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable

from tandem.workers.attempt import Reader
from tandem.workers.engine import Engine
from tandem.workers.errors import TransferError
from tandem.workers.fetch import FetchAttempt
from tandem.workers.offload.rates import MeasuredPath, PathSpeed, compute_seconds
from tandem.workers.offload.tiers import Tiers, wanted_blocks
from tandem.workers.peers import Peers
from tandem.workers.sequence import Sequence
from tandem.workers.tasks import Tasks
from tandem.workers.transfer.base import PullTimeout
from tandem.workers.types import KVSource, WorkerAddress, WorkerSpeeds

logger = logging.getLogger(__name__)

PEER_LATENCY_S = 0.005
"""Of a fetch: three messages and the source's look-up."""
PAIRING_S = 0.1
"""More for the first fetch from a worker."""
MAX_PATHS = 1024
"""Incarnations of peers whose speed is remembered."""
AVOID_S = 10.0
"""How long a peer is not asked again after it failed to deliver."""
WORTH_IT = 2.0
"""A fetch may take so many times as long as computing: it leaves this worker to others meanwhile. It also keeps a turn
of a conversation from costing the answer before it again where that answer is short."""
ALWAYS_WORTH_IT_S = 0.01
"""A fetch that takes no longer is made however fast computing is: what one worker has computed, no other does again."""
LEAST_FETCH_S = 0.25
"""A fetch that pays if all goes well is given so long at least: a peer that is busy for a moment would otherwise be
taken for one that fails, and be left alone for `AVOID_S`."""
USUAL_PEER = PathSpeed(bytes_per_s=1e9, latency_s=PEER_LATENCY_S)
UNKNOWN_PEER = PathSpeed(bytes_per_s=1e9, latency_s=PEER_LATENCY_S + PAIRING_S)


class Filler:
    """Used by every role. `source_of` says which peer, if any, is said to hold the beginning of a sequence."""

    def __init__(
        self,
        address: WorkerAddress,
        engine: Engine,
        reader: Reader,
        peers: Peers,
        tiers: Tiers | None,
        speeds: Callable[[], WorkerSpeeds],
    ) -> None:
        self.address = address
        self.engine = engine
        self.reader = reader
        self.peers = peers
        self.tiers = tiers
        self.source_of: Callable[[Sequence], KVSource | None] = lambda sequence: None
        self._speeds = speeds
        self._block_size = engine.config.block_size
        self._paths: dict[WorkerAddress, MeasuredPath] = {}
        self._avoided_until: dict[WorkerAddress, float] = {}
        self._numbers = itertools.count()
        self._tasks = Tasks()
        engine.scheduler.admission.is_fill_faster = self.is_fill_faster
        if tiers is not None:
            engine.scheduler.admission.tiers = tiers
            engine.cache.on_evict = tiers.on_evict
            engine.before_step = tiers.before_step

    async def close(self) -> None:
        """All fills must have ended. A late writer may never settle, and is the transport's to stop."""
        await self._tasks.cancel()

    def is_fill_faster(self, sequence: Sequence) -> bool:
        """What the scheduler asks at admission: does any source pay?"""
        if self._do_tiers_pay(sequence, sequence.num_pool_blocks):
            return True
        source = self.source_of(sequence)
        said = min(sequence.num_source_blocks, self._num_matchable(sequence))
        return source is not None and self._does_peer_pay(source, sequence.num_pool_blocks, said)

    async def fill(self, sequence: Sequence, salt: str) -> bool:
        """Bring what pays. False: the sequence is not INCOMING any more (cancelled, or back in the queue)."""
        await self._restore(sequence)
        source = self.source_of(sequence)
        if source is not None and not sequence.is_finished:
            return await self._fetch(sequence, salt, source)
        return not sequence.is_finished

    def set_aside(self, sequence: Sequence, block_ids: list[int], error: PullTimeout) -> bool:
        """The pull may still write into these blocks: nobody gets them before it has settled. False: there were no
        others, and the sequence is back in the queue."""

        async def end_quarantine() -> None:
            await error.settled
            self.engine.end_quarantine(block_ids)

        is_alive = self.engine.quarantine(sequence, block_ids)
        self._tasks.spawn(end_quarantine(), "end of quarantine")
        return is_alive

    def count_failure(self, what: str, error: TransferError) -> None:
        logger.warning("%s failed (%s): %s", what, error.reason, error)
        self.reader.metrics.count("kv_transfer_failures_total", reason=error.reason)

    # Tiers

    async def _restore(self, sequence: Sequence) -> None:
        first = sequence.num_computed // self._block_size
        if self.tiers is None or not self._do_tiers_pay(sequence, first):
            return
        num_tokens = first * self._block_size
        async for source, num_blocks in self.tiers.restore(wanted_blocks(sequence, self._block_size)):
            num_tokens += num_blocks * self._block_size
            self.engine.blocks_arrived(sequence, num_tokens, source)

    def _do_tiers_pay(self, sequence: Sequence, first: int) -> bool:
        end = first + sequence.num_tier_blocks
        if self.tiers is None or end == first:
            return False
        return self.tiers.seconds(sequence.block_keys[first:end]) < self._compute_s(first, end)

    # A peer

    async def _fetch(self, sequence: Sequence, salt: str, source: KVSource) -> bool:
        first, matchable = sequence.num_computed // self._block_size, self._num_matchable(sequence)
        said = min(sequence.num_source_blocks, matchable)
        if not self._does_peer_pay(source, first, said):
            return True
        fetch = FetchAttempt(
            f"{sequence.request_id}.{sequence.choice}.{self.address.worker_id}.{next(self._numbers)}",
            sequence,
            salt,
            self.reader,
            first=first,
            end=matchable,  # what is said of the peer may be older than its latest blocks
            timeout_s=max(LEAST_FETCH_S, self._bearable_s(first, said)),
        )
        try:
            num_blocks = await fetch.run(self.peers, source.address)
        except TransferError as error:
            self._count_fetch("failed")
            self._avoid(source.address)
            self.count_failure(f"fetch from {source.address.worker_id}", error)
            is_alive = not isinstance(error, PullTimeout) or self.set_aside(sequence, fetch.pulling, error)
            return is_alive and not sequence.is_finished
        self._count_fetch("whole" if num_blocks >= said - first else "part" if num_blocks else "nothing")
        self._observe(source.address, fetch)
        self.engine.blocks_arrived(sequence, (first + num_blocks) * self._block_size, "peer")
        return not sequence.is_finished

    def _num_matchable(self, sequence: Sequence) -> int:
        """Blocks that somebody else may bring: the last token is always computed here."""
        return (len(sequence.token_ids) - 1) // self._block_size

    def _does_peer_pay(self, source: KVSource, first: int, end: int) -> bool:
        if source.address.worker_id == self.address.worker_id or end <= first:
            return False
        if self._avoided_until.get(source.address, 0.0) > time.monotonic():
            self._count_fetch("avoided")
            return False
        num_bytes, bearable_s = (end - first) * self.reader.kv_cache.block_bytes, self._bearable_s(first, end)
        path = self._path_to(source.address)
        if path is UNKNOWN_PEER and USUAL_PEER.seconds(num_bytes) < bearable_s:
            self.peers.prepare(source.address)  # too late for this prompt perhaps, not for the next
        if path.seconds(num_bytes) < bearable_s:
            return True
        self._count_fetch("declined")
        return False

    def _bearable_s(self, first: int, end: int) -> float:
        return max(ALWAYS_WORTH_IT_S, WORTH_IT * self._compute_s(first, end))

    def _path_to(self, address: WorkerAddress) -> PathSpeed:
        path = self._measured_path(address)
        return UNKNOWN_PEER if path is None else path.speed

    def _measured_path(self, address: WorkerAddress) -> MeasuredPath | None:
        """What pulls from this worker really deliver; before the first one, what the probe found. None: a stranger."""
        path = self._paths.get(address)
        if path is None and (measured := self.peers.path_to(address)) is not None:
            if len(self._paths) >= MAX_PATHS:
                self._paths.clear()
            path = self._paths[address] = MeasuredPath(USUAL_PEER)
            path.begin_at(measured.gigabytes_per_s * 1e9)
        return path

    def _observe(self, address: WorkerAddress, fetch: FetchAttempt) -> None:
        path = self._measured_path(address)
        if path is not None and fetch.pull_s > 0:
            path.observe(fetch.pulled_bytes, fetch.pull_s + PEER_LATENCY_S)

    def _avoid(self, address: WorkerAddress) -> None:
        if len(self._avoided_until) >= MAX_PATHS:
            self._avoided_until.clear()
        self._avoided_until[address] = time.monotonic() + AVOID_S

    def _compute_s(self, first: int, end: int) -> float:
        return compute_seconds(self._speeds(), first * self._block_size, end * self._block_size)

    def _count_fetch(self, outcome: str) -> None:
        self.reader.metrics.count("kv_fetches_total", outcome=outcome)
