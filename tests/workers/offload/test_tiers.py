"""Host memory and disk together: what is held, where it came from, and what failure costs."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from offload_blocks import BLOCK_BYTES, BLOCK_SIZE, NAMESPACE, content, key_of, tokens_of

from tandem.workers.offload import disk as disk_module
from tandem.workers.offload.disk_file import DiskFile
from tandem.workers.offload.tiers import Wanted


async def test_an_evicted_block_goes_down_and_comes_back(make_stage: Any) -> None:
    stage = await make_stage(host=3, disk=8)
    await stage.save(13, 12, 11, 10)  # leaves first, as the pool does
    assert stage.tiers.num_blocks() == {"host": 3, "disk": 1}
    assert stage.num_held(10, 11, 12, 13, 14) == 4
    assert stage.num_held(11, 14) == 1
    assert await stage.restore(10, 11, 12, 13, 14) == ["host", "host", "host", "disk"]
    stage.tiers.check()
    assert stage.tiers.num_blocks() == {"host": 3, "disk": 1}, "copies stay"
    counters = stage.metrics.counters
    assert counters['kv_tier_bytes_total{tier="host",direction="out"}'] == 3 * BLOCK_BYTES
    assert counters['kv_tier_bytes_total{tier="disk",direction="in"}'] == BLOCK_BYTES


async def test_a_block_is_saved_before_it_is_overwritten(make_stage: Any) -> None:
    stage = await make_stage(host=16)
    blocks = stage.evict(*range(10, 20))
    stage.tiers.before_write(blocks[:3])
    stage.memory.blocks[blocks[:3]] = 255
    await stage.rest()
    assert await stage.restore(*range(10, 20)) == ["host"] * 10


@pytest.mark.parametrize("can_save", [True, False])
async def test_a_block_that_is_overwritten_while_a_thread_copies_it(make_stage: Any, can_save: bool) -> None:
    """The thread is made to sleep between looking and copying: what it brings is not kept."""
    stage = await make_stage(host=16)
    copy_out, started, go_on = stage.memory.copy_out, threading.Event(), threading.Event()

    def slowly(block_id: int, out: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            started.set()
            assert go_on.wait(5)
        copy_out(block_id, out)

    stage.memory.copy_out = slowly
    blocks = stage.evict(10, 11)
    await asyncio.to_thread(started.wait, 5)
    take_slot = stage.tiers._take_slot
    stage.tiers._take_slot = take_slot if can_save else lambda: None
    stage.tiers.before_write(blocks)
    stage.memory.blocks[blocks] = 255
    go_on.set()
    await stage.rest()
    assert await stage.restore(10, 11) == (["host", "host"] if can_save else [])


@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_a_restore_saves_what_it_overwrites(make_stage: Any, tier: str) -> None:
    stage = await make_stage(host=16 if tier == "host" else 0, disk=16)
    await stage.save(10)
    (block_id,) = stage.evict(20)
    wanted = [Wanted(key_of(10), None, tokens_of(10), block_id)]
    assert [found async for found in stage.tiers.restore(wanted)] == [(tier, 1)]
    assert (stage.memory.blocks[block_id] == content(10)).all()
    await stage.rest()
    assert await stage.restore(20) == [tier]


async def test_a_block_that_is_being_read_keeps_its_slot(make_stage: Any) -> None:
    stage = await make_stage(host=1, spare=1)
    await stage.save(10)
    copy_in, started, go_on = stage.memory.copy_in, threading.Event(), threading.Event()

    def slowly(block_id: int, data: Any) -> None:
        started.set()
        assert go_on.wait(5)
        copy_in(block_id, data)

    stage.memory.copy_in = slowly
    restoring = asyncio.create_task(stage.restore(10))
    await asyncio.to_thread(started.wait, 5)
    stage.tiers.before_write(stage.evict(20, 30))
    go_on.set()
    assert await restoring == ["host"]
    await stage.rest()


async def test_a_hit_compares_tokens_and_parent(make_stage: Any) -> None:
    stage = await make_stage(host=1, disk=4)
    await stage.save(12, 11)
    for name in (11, 12):
        for parent, tokens in ((b"other", tuple(range(name, name + 4))), (key_of(name - 1), (9, 9, 9, 9))):
            wanted = [Wanted(key_of(name), parent, tokens, 40)]
            assert [found async for found in stage.tiers.restore(wanted)] == []
    assert not stage.memory.blocks[40].any()


async def test_priority_then_last_use(make_stage: Any) -> None:
    stage = await make_stage(host=3)
    await stage.save(10, priority=80)
    await stage.save(20, 30, 40)  # 20 is the oldest of the default priority
    assert [stage.num_held(name) for name in (10, 20, 30, 40)] == [1, 0, 1, 1]
    await stage.restore(30)
    await stage.save(50)
    assert [stage.num_held(name) for name in (10, 30, 40, 50)] == [1, 1, 0, 1]


async def test_against_a_twin(make_stage: Any) -> None:
    """Host and disk as two lists that are sorted at each step."""
    rng = random.Random(3)
    stage = await make_stage(host=5, disk=9)
    tick = 0
    host: dict[int, tuple[int, int]] = {}
    disk: dict[int, tuple[int, int]] = {}

    def down(name: int, priority: int) -> None:
        if name in disk:
            return
        if len(disk) == 9:
            del disk[min(disk, key=lambda name: disk[name])]
        disk[name] = (priority, tick)

    for tick in range(600):
        name = rng.randrange(30) * 10
        if rng.random() < 0.6:
            priority = rng.choice([0, 35, 35, 90])
            await stage.save(name, priority=priority)
            if name in host:
                host[name] = (host[name][0], tick)
            else:
                host[name] = (priority, tick)
                if len(host) > 5:
                    victim = min(host, key=lambda name: host[name])
                    down(victim, host.pop(victim)[0])
        else:
            expected = ["host"] if name in host else ["disk"] if name in disk else []
            assert await stage.restore(name) == expected
            for tier in (host, disk):
                if expected and name in tier:
                    tier[name] = (tier[name][0], tick)
        for other in range(30):
            assert stage.num_held(other * 10) == (other * 10 in host or other * 10 in disk), (tick, other * 10)
    assert stage.tiers.num_blocks() == {"host": 5, "disk": 9}
    assert stage.metrics.counters.get('kv_tier_dropped_blocks_total{tier="disk"}', 0) == 0


async def test_disk_alone_and_found_again_after_a_restart(make_stage: Any) -> None:
    stage = await make_stage(disk=4)
    await stage.save(13, 12, 11, 10)
    assert stage.tiers.num_blocks() == {"disk": 4}
    await stage.tiers.close()
    stage = await make_stage(disk=4)
    assert await stage.restore(10, 11, 12, 13) == ["disk"] * 4
    await stage.save(20)  # 13 was written first, but what was restored counts as used from its end
    assert [stage.num_held(name) for name in (10, 11, 12, 13, 20)] == [1, 1, 1, 0, 1]


async def test_a_damaged_block_ends_a_restore_and_frees_its_slot(make_stage: Any, disk_path: Path) -> None:
    stage = await make_stage(disk=4)
    await stage.save(13, 12, 11, 10)
    with disk_path.open("r+b") as raw:
        raw.seek(4096 + 2 * 1536 + 1000)  # 11 is in slot 2
        raw.write(b"damage")
    assert stage.num_held(10, 11, 12) == 3
    assert await stage.restore(10, 11, 12) == ["disk"]
    assert stage.num_held(11) == 0
    assert stage.metrics.counters['disk{event="damaged"}'] == 1
    stage.tiers.check()
    await stage.save(11)
    assert await stage.restore(10, 11, 12) == ["disk"] * 3


class FailingFile(DiskFile):
    """Writes, or reads, fail with `error` while it is set."""

    error: int | None = None
    is_read_broken = False
    hang: threading.Event | None = None

    def write(self, *arguments: Any) -> None:
        if self.error is not None and not self.is_read_broken:
            raise OSError(self.error, os.strerror(self.error))
        super().write(*arguments)

    def read(self, *arguments: Any) -> bool:
        if self.hang is not None:
            self.hang.wait(10)
        if self.error is not None and self.is_read_broken:
            raise OSError(self.error, os.strerror(self.error))
        return super().read(*arguments)


@pytest.fixture
def failing(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FailingFile]:
    monkeypatch.setattr(disk_module, "PAUSE_S", 0.05)
    return []


async def make_failing(make_stage: Any, disk_path: Path, files: list[FailingFile], **sizes: int) -> Any:
    def open_file() -> DiskFile:
        files.append(FailingFile(disk_path, sizes["disk"], BLOCK_BYTES, BLOCK_SIZE, NAMESPACE))
        return files[-1]

    return await make_stage(open_file=open_file, **sizes)


@pytest.mark.parametrize("is_read_broken", [False, True])
async def test_a_disk_that_fails_pauses_the_tier_with_one_warning(
    make_stage: Any, disk_path: Path, failing: list[FailingFile], caplog: Any, is_read_broken: bool
) -> None:
    stage = await make_failing(make_stage, disk_path, failing, disk=8)
    await stage.save(10)
    failing[0].error, failing[0].is_read_broken = errno.ENOSPC, is_read_broken
    for _ in range(3):
        await stage.save(20)
        assert await stage.restore(10) in ([], ["disk"])
        await asyncio.sleep(0.07)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "No space left" in warnings[0].getMessage()
    failing[0].error = None
    await asyncio.sleep(0.07)
    await stage.save(20)
    assert await stage.restore(10) == ["disk"]
    assert await stage.restore(20) == ["disk"]
    stage.tiers.check()


async def test_a_disk_that_hangs_costs_its_deadline_once_and_writes_nothing_late(
    make_stage: Any, disk_path: Path, failing: list[FailingFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.workers.offload.tiers.READ_TIMEOUT_S", 0.05)
    stage = await make_failing(make_stage, disk_path, failing, disk=8)
    await stage.save(11, 10)
    failing[0].hang = threading.Event()
    assert await stage.restore(10, 11) == []
    assert stage.num_held(10) == 0
    failing[0].hang.set()
    await asyncio.sleep(0.07)
    assert not stage.memory.blocks[32:].any(), "a late read wrote into a block that may be somebody else's"
    failing[0].hang = None
    assert await stage.restore(10, 11) == ["disk", "disk"]


async def test_a_cancelled_restore_is_quiet_when_it_ends(
    make_stage: Any, disk_path: Path, failing: list[FailingFile]
) -> None:
    stage = await make_failing(make_stage, disk_path, failing, disk=8)
    await stage.save(10)
    failing[0].hang = threading.Event()
    task = asyncio.create_task(stage.restore(10))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    failing[0].hang.set()
    await asyncio.sleep(0.05)
    assert not stage.memory.blocks[32:].any()


async def test_a_slow_disk_drops_blocks_and_blocks_nobody(
    make_stage: Any, disk_path: Path, failing: list[FailingFile]
) -> None:
    stage = await make_failing(make_stage, disk_path, failing, disk=30, spare=4)
    gate = threading.Event()
    write = failing[0].write
    failing[0].write = lambda *arguments: (gate.wait(10), write(*arguments))  # type: ignore[method-assign]
    for start in range(0, 20, 4):
        blocks = stage.evict(*range(start, start + 4))
        stage.tiers.before_write(blocks)
        stage.memory.blocks[blocks] = 255
    gate.set()
    await stage.rest()
    assert stage.tiers.num_blocks()["disk"] == 4
    assert stage.metrics.counters['kv_tier_dropped_blocks_total{tier="host"}'] == 16


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB, where we may mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


async def test_a_full_disk(make_stage: Any, small_disk: Path) -> None:
    path = small_disk / "blocks.kv"
    stage = await make_stage(disk=100, open_file=lambda: DiskFile(path, 100, BLOCK_BYTES, BLOCK_SIZE, NAMESPACE))
    for name in range(0, 300, 10):
        await stage.save(name)
    assert stage.metrics.counters['disk{event="error"}'] >= 1
    assert stage.tiers.num_blocks()["disk"] >= 5
    assert not any(stage.num_held(name) for name in range(0, 300, 10)), "it is not paused"


async def test_a_file_that_cannot_be_opened_is_tried_again(
    make_stage: Any, disk_path: Path, failing: list[FailingFile]
) -> None:
    other = DiskFile(disk_path, 8, BLOCK_BYTES, BLOCK_SIZE, NAMESPACE)
    stage = await make_failing(make_stage, disk_path, failing, disk=8)
    await stage.save(10)
    assert stage.num_held(10) == 0
    other.close()
    await asyncio.sleep(0.15)
    await stage.save(10)
    assert await stage.restore(10) == ["disk"]
    assert content(10).any()
