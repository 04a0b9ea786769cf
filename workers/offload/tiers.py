"""The tiers below a worker's block pool: host memory, then local disk.

    pool ──evicted──> host memory ──given up──> disk ──given up──> gone
      ▲                    │                      │
      └────── restore ─────┴──────────────────────┘         copies stay where they were, as the most recently used

An evicted block is not copied at once: it waits, its bytes untouched, for a thread to copy it. Whoever is about to
overwrite it says so: a step (`before_step`) has what still waits copied on the spot, a fill (`settle`) by the thread.
So a long prompt that pushes out hundreds of blocks costs no step more than the blocks that this very step writes.

All state is on the event loop. Nothing here raises for lack of memory, room or speed: blocks are dropped, and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tandem.workers.batch import Batch
from tandem.workers.metrics import WorkerMetrics
from tandem.workers.offload.disk import DiskTier
from tandem.workers.offload.host import HostTier
from tandem.workers.offload.rates import MeasuredPath, PathSpeed
from tandem.workers.offload.records import Record, pack
from tandem.workers.offload.shelf import Entry
from tandem.workers.sequence import Sequence as KVSequence
from tandem.workers.tasks import Tasks
from tandem.workers.transfer.base import undisturbed
from tandem.workers.types import FillSource

COPY_BLOCKS = 8
"""Blocks that one job of the copying thread takes: its results, and cancellations, are seen between jobs."""
READ_TIMEOUT_S = 2.0
"""For one block from disk. A disk that takes longer is of no use."""


class BlockMemory(Protocol):
    """The worker's KV blocks, as `KVCache` has them. Both calls may come from any thread."""

    block_bytes: int

    def copy_out(self, block_id: int, out: npt.NDArray[np.uint8]) -> None: ...
    def copy_in(self, block_id: int, data: npt.NDArray[np.uint8]) -> None: ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """A full block that a sequence needs: its name, and the block of the pool that it is to go to."""

    key: bytes
    parent_key: bytes | None
    token_ids: tuple[int, ...]
    block_id: int


def wanted_blocks(sequence: KVSequence, block_size: int) -> list[Wanted]:
    """The `num_tier_blocks` blocks behind those that an INCOMING sequence has."""
    first, keys = sequence.num_computed // block_size, sequence.block_keys
    return [
        Wanted(
            keys[index],
            keys[index - 1] if index else None,
            tuple(sequence.token_ids[index * block_size : (index + 1) * block_size]),
            sequence.block_ids[index],
        )
        for index in range(first, first + sequence.num_tier_blocks)
    ]


@dataclass(frozen=True, slots=True)
class _Job:
    """A block to be copied out of the pool, into a slot of host memory."""

    block_id: int
    record: Record
    slot: int


class Tiers:
    """What `Admission.tiers` and `PrefixCache.on_evict` ask and tell, and `restore`. Call `start` first."""

    def __init__(
        self, memory: BlockMemory, block_size: int, host: HostTier, disk: DiskTier | None, metrics: WorkerMetrics
    ) -> None:
        self._memory = memory
        self._block_size = block_size
        self._host = host
        self._disk = disk
        self._metrics = metrics
        self._host_path = MeasuredPath(PathSpeed(bytes_per_s=4e9, latency_s=0.0003))
        self._waiting: dict[int, Record] = {}
        """Evicted blocks by id, oldest first: their bytes are in the pool still."""
        self._copier = ThreadPoolExecutor(1, "kv-tier-copy")
        self._saving: asyncio.Task[None] | None = None
        self._slot_came_back = asyncio.Event()
        self._tasks = Tasks()
        self._is_closed = False

    def start(self) -> None:
        """Find out how fast memory is copied and, in time, what the disk holds: a slow one delays no worker's start."""
        started = time.perf_counter()
        slot, _ = self._host.take_slot()
        if slot is not None:
            for _ in range(2):
                started = time.perf_counter()
                self._memory.copy_out(0, self._host.slot_bytes(slot))
            self._host_path.start_at(self._memory.block_bytes / max(time.perf_counter() - started, 1e-9))
            self._host.give_back(slot)
        if self._disk is not None:
            self._tasks.spawn(self._disk.open(), "open the disk tier")

    async def close(self) -> None:
        """Blocks on their way are lost, except those that a thread is copying at this moment."""
        self._is_closed = True
        self._waiting.clear()
        if self._disk is not None:
            self._disk.close()
        await self._tasks.cancel()
        self._copier.shutdown()

    # Asked at admission

    def num_held(self, keys: Sequence[bytes]) -> int:
        """How many of these keys, from the first on, are held without a gap."""
        for index, key in enumerate(keys):
            if key not in self._host and (self._disk is None or key not in self._disk):
                return index
        return len(keys)

    def seconds(self, keys: Sequence[bytes]) -> float:
        """How long it would take to bring these blocks back, as far as we know."""
        num_host = sum(key in self._host for key in keys)
        num_bytes = self._memory.block_bytes
        seconds = self._host_path.speed.seconds(num_host * num_bytes) if num_host else 0.0
        if self._disk is not None and num_host < len(keys):
            seconds += self._disk.path.speed.seconds((len(keys) - num_host) * num_bytes)
        return seconds

    # Saving

    def on_evict(
        self, key: bytes, parent_key: bytes | None, token_ids: tuple[int, ...], block_id: int, priority: int
    ) -> None:
        """The pool gives this block up. Its bytes stay in place until `before_write`."""
        if self._is_closed:
            return
        self._waiting.pop(block_id, None)
        if key in self._host:
            self._host.touch(key)
        elif self._host.capacity == 0 and self._disk is not None and self._disk.will_hold(key):
            self._disk.touch(key)
        else:
            self._waiting[block_id] = Record(key, parent_key, pack(token_ids), priority)
            if self._saving is None:
                self._saving = self._tasks.spawn(self._save_waiting(), "save evicted blocks")

    def before_write(self, block_ids: Iterable[int]) -> None:
        """These blocks are about to be overwritten: copy those that wait, now."""
        jobs = self._take_waiting(block_ids)
        self._copy_out(jobs)
        for job in jobs:
            self._put(job.record, job.slot)

    async def settle(self, block_ids: Iterable[int]) -> None:
        """As `before_write`, in the thread: for blocks that nobody but the caller may write meanwhile."""
        if jobs := self._take_waiting(block_ids):
            await undisturbed(self._save(jobs))

    def before_step(self, batch: Batch) -> None:
        """What this batch overwrites: the blocks of the tokens that it computes, and those that it copies into."""
        if self._waiting:
            size = self._block_size
            for item in batch.items:
                end = item.start + len(item.token_ids)
                self.before_write(item.block_ids[item.start // size : -(-end // size)])
            self.before_write(copy.destination for copy in batch.copies)

    def _take_waiting(self, block_ids: Iterable[int]) -> list[_Job]:
        if not self._waiting:
            return []
        jobs: list[_Job] = []
        for block_id in block_ids:
            record = self._waiting.pop(block_id, None)
            if record is not None and (slot := self._take_slot()) is not None:
                jobs.append(_Job(block_id, record, slot))
        return jobs

    async def _save(self, jobs: list[_Job]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._copier, self._copy_out, jobs)
        for job in jobs:
            self._put(job.record, job.slot)

    async def _save_waiting(self) -> None:
        """In the thread, a few at a time, until none waits."""
        await asyncio.sleep(0)  # not in the middle of a schedule: more of them come with it
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                jobs: list[_Job] = []
                for block_id, record in self._waiting.items():
                    if len(jobs) == COPY_BLOCKS or (slot := self._host.take_free_slot()) is None:
                        break
                    jobs.append(_Job(block_id, record, slot))
                if not jobs:  # the disk is slower than the pool: wait for it while nobody needs the blocks
                    self._slot_came_back.clear()
                    await self._slot_came_back.wait()
                    continue
                await loop.run_in_executor(self._copier, self._copy_out, jobs)
                for job in jobs:
                    if self._waiting.get(job.block_id) is job.record:
                        del self._waiting[job.block_id]
                        self._put(job.record, job.slot)
                    else:  # overwritten meanwhile: somebody else was faster to save it
                        self._give_back(job.slot)
        finally:
            self._saving = None

    def _copy_out(self, jobs: list[_Job]) -> None:
        for job in jobs:
            self._memory.copy_out(job.block_id, self._host.slot_bytes(job.slot))

    def _take_slot(self) -> int | None:
        slot, num_lost = self._host.take_slot()
        if slot is None or num_lost:
            self._metrics.count("kv_tier_dropped_blocks_total", tier="disk" if num_lost else "host")
        return slot

    def _put(self, record: Record, slot: int) -> None:
        if self._host.capacity:
            self._count_bytes("host", "in", 1)
        for victim in self._host.put(record, slot):
            if self._host.capacity:
                self._metrics.count("kv_tier_evicted_blocks_total", tier="host")
            if self._disk is not None and self._disk.is_on and not self._disk.will_hold(victim.record.key):
                self._tasks.spawn(self._write(self._disk, victim), "write a block to disk")
            else:
                self._give_back(victim.slot)

    async def _write(self, disk: DiskTier, victim: Entry) -> None:
        try:
            if await disk.write(victim.record, self._host.slot_bytes(victim.slot)):
                self._count_bytes("disk", "in", 1)
            else:
                self._metrics.count("kv_tier_dropped_blocks_total", tier="disk")
        finally:
            self._give_back(victim.slot)

    def _give_back(self, slot: int) -> None:
        self._host.give_back(slot)
        self._slot_came_back.set()

    # Restoring

    async def restore(self, wanted: Sequence[Wanted]) -> AsyncGenerator[tuple[FillSource, int], None]:
        """Bring blocks back, first to last, into blocks of the pool that nobody else writes. Yields whence and how many
        more have arrived, checked; ends at the first that is not held or damaged.

        When this ends, however it does, nothing is written into any of the blocks any more.
        """
        index = 0
        try:
            while index < len(wanted):
                await self.settle(block.block_id for block in wanted[index : index + COPY_BLOCKS])
                entries = self._held_in_host(wanted[index : index + COPY_BLOCKS])
                if entries:
                    await self._read_host(entries, [block.block_id for block in wanted[index : index + len(entries)]])
                elif not await self._read_disk(wanted[index]):
                    return
                source: FillSource = "host" if entries else "disk"
                num_arrived = max(1, len(entries))
                index += num_arrived
                self._count_bytes(source, "out", num_arrived)
                yield source, num_arrived
        finally:
            self._touch(wanted[:index])

    def _touch(self, blocks: Sequence[Wanted]) -> None:
        """Used just now, the beginning last: without it the rest is useless."""
        for block in reversed(blocks):
            self._host.touch(block.key)
            if self._disk is not None:
                self._disk.touch(block.key)

    def _held_in_host(self, wanted: Sequence[Wanted]) -> list[Entry]:
        entries: list[Entry] = []
        for block in wanted:
            entry = self._host.find(block.key, block.parent_key, pack(block.token_ids))
            if entry is None:
                break
            entries.append(entry)
        return entries

    async def _read_host(self, entries: list[Entry], block_ids: list[int]) -> None:
        def copy() -> None:
            for entry, block_id in zip(entries, block_ids, strict=True):
                self._memory.copy_in(block_id, self._host.slot_bytes(entry.slot))

        async def run() -> None:
            await asyncio.get_running_loop().run_in_executor(self._copier, copy)

        started = time.perf_counter()
        for entry in entries:
            self._host.begin_read(entry)
        try:
            await undisturbed(run())
        finally:
            for entry in entries:
                self._host.end_read(entry)
        self._host_path.observe(len(entries) * self._memory.block_bytes, time.perf_counter() - started)

    async def _read_disk(self, block: Wanted) -> bool:
        disk = self._disk
        entry = None if disk is None else disk.find(block.key, block.parent_key, pack(block.token_ids))
        if disk is None or entry is None:
            return False
        started = time.perf_counter()
        is_good = await disk.read(entry, lambda data: self._memory.copy_in(block.block_id, data), READ_TIMEOUT_S)
        if is_good:
            disk.path.observe(self._memory.block_bytes, time.perf_counter() - started)
        return is_good

    # For people, and for tests

    def num_blocks(self) -> dict[str, int]:
        """Blocks held, by tier; only those that were asked for."""
        held = {"host": len(self._host)} if self._host.capacity else {}
        return held if self._disk is None else held | {"disk": len(self._disk)}

    @property
    def is_at_rest(self) -> bool:
        return not self._tasks and not self._waiting

    def check(self) -> None:
        """Raises AssertionError when a slot is lost. At rest only."""
        assert self.is_at_rest, "blocks are on their way"
        self._host.check()
        if self._disk is not None:
            self._disk.check()

    def _count_bytes(self, tier: str, direction: str, num_blocks: int) -> None:
        self._metrics.count(
            "kv_tier_bytes_total", num_blocks * self._memory.block_bytes, tier=tier, direction=direction
        )
