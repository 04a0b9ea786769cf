"""Tiers under a pool of plain memory, whose blocks' bytes follow from their names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from offload_blocks import BLOCK_BYTES, BLOCK_SIZE, NAMESPACE, content, key_of, parent_of, tokens_of

from tandem.workers.metrics import WorkerMetrics
from tandem.workers.offload.disk import DiskTier
from tandem.workers.offload.disk_file import DiskFile
from tandem.workers.offload.host import HostTier
from tandem.workers.offload.tiers import Tiers, Wanted


class Memory:
    """A pool of blocks. The first half is for what is evicted, the second for what is restored."""

    block_bytes = BLOCK_BYTES

    def __init__(self, num_blocks: int = 64) -> None:
        self.blocks = np.zeros((num_blocks, BLOCK_BYTES), dtype=np.uint8)

    def copy_out(self, block_id: int, out: npt.NDArray[np.uint8]) -> None:
        np.copyto(out, self.blocks[block_id])

    def copy_in(self, block_id: int, data: npt.NDArray[np.uint8]) -> None:
        np.copyto(self.blocks[block_id], data)


class Stage:
    """Tiers, and the hands of a pool above them."""

    tiers: Tiers

    def __init__(self, memory: Memory, metrics: WorkerMetrics) -> None:
        self.memory, self.metrics = memory, metrics
        self.next_block = 0
        self.told: set[tuple[str, bytes]] = set()
        """What the tiers hold, as far as their events tell."""

    def on_event(self, kind: str, key: bytes, tier: str) -> None:
        assert ((tier, key) in self.told) == (kind == "removed"), f"{key!r} was {kind} in {tier} twice"
        (self.told.add if kind == "stored" else self.told.discard)((tier, key))

    def evict(self, *names: int, priority: int = 35) -> list[int]:
        """As the pool does; returns the blocks, whose bytes are still there."""
        blocks: list[int] = []
        for name in names:
            block_id = self.next_block = (self.next_block + 1) % 32
            self.memory.blocks[block_id] = content(name)
            self.tiers.on_evict(key_of(name), parent_of(name), tokens_of(name), block_id, priority)
            blocks.append(block_id)
        return blocks

    async def rest(self) -> None:
        async with asyncio.timeout(5):
            while not self.tiers.is_at_rest:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        self.tiers.check()
        held = self.tiers.num_blocks()
        assert {tier: sum(tier == each for each, _ in self.told) for tier in held} == held

    async def save(self, *names: int, priority: int = 35) -> None:
        """Evict and wait until all is where it belongs."""
        for name in names:
            self.evict(name, priority=priority)
            await self.rest()

    async def restore(self, *names: int) -> list[str]:
        """Where each block came from; those that came are compared with what they should be."""
        wanted = [Wanted(key_of(n), parent_of(n), tokens_of(n), 32 + i) for i, n in enumerate(names)]
        self.memory.blocks[32:] = 0
        sources: list[str] = []
        async for source, num_blocks in self.tiers.restore(wanted):
            sources += [source] * num_blocks
        for index, name in enumerate(names[: len(sources)]):
            assert np.array_equal(self.memory.blocks[32 + index], content(name)), f"block {name} has other bytes"
        assert not self.memory.blocks[32 + len(sources) :].any(), "something was written beyond"
        return sources

    def num_held(self, *names: int) -> int:
        return self.tiers.num_held([key_of(name) for name in names])


@pytest.fixture
def disk_path(tmp_path: Path) -> Path:
    return tmp_path / "tier" / "blocks.kv"


@pytest.fixture
async def make_stage(disk_path: Path) -> Any:
    stages: list[Stage] = []

    async def make(
        *, host: int = 0, disk: int = 0, spare: int = 4, open_file: Callable[[], DiskFile] | None = None
    ) -> Stage:
        metrics, memory = WorkerMetrics(), Memory()
        stage = Stage(memory, metrics)
        tier = None
        if disk:
            opened = open_file or (lambda: DiskFile(disk_path, disk, BLOCK_BYTES, BLOCK_SIZE, NAMESPACE))
            tier = DiskTier(opened, disk, BLOCK_BYTES, lambda event: metrics.count("disk", event=event), stage.on_event)
        stage.tiers = Tiers(memory, BLOCK_SIZE, HostTier(host, spare, BLOCK_BYTES, stage.on_event), tier, metrics)
        stages.append(stage)
        stage.tiers.start()
        await stage.rest()
        return stage

    yield make
    for stage in stages:
        await stage.tiers.close()
