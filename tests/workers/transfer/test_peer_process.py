"""The contract between processes: peers that live, that are killed, and that stand still."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import Any

import pytest
import torch

from tandem.workers.errors import TransferError
from tandem.workers.transfer.backends import create_transfer
from tandem.workers.transfer.base import KVPoolMemory, PullTimeout

StartPeer = Any
MakeTransfer = Any


@pytest.fixture(params=["nixl", "nccl"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_scattered_blocks_arrive_and_the_next_peer_is_as_good_after_a_kill(
    backend: str, make: MakeTransfer, start_peer: StartPeer, empty_pool: KVPoolMemory
) -> None:
    reader = make(empty_pool)
    peer = await start_peer(backend)
    remote, local = random.Random(1).sample(range(64), 30), random.Random(2).sample(range(64), 30)
    await reader.pull(peer.description, remote, local, timeout_s=10.0)
    expected = torch.zeros_like(peer.expected)
    expected[local] = peer.expected[remote]
    assert torch.equal(empty_pool.blocks, expected)
    assert reader.transport_of(peer.description) in {"nixl": ("cma", "tcp", "ucx"), "nccl": ("gloo",)}[backend]

    peer.kill()
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(TransferError) as caught:
            await reader.pull(peer.description, [0], [0], timeout_s=5.0)
        assert caught.value.reason == "disconnect"
        assert time.monotonic() - started < 3.0
    await reader.forget(peer.description)

    successor = await start_peer(backend)
    await reader.pull(successor.description, [1], [1], timeout_s=10.0)
    assert torch.equal(empty_pool.blocks[1], successor.expected[1])


async def test_a_peer_killed_before_the_first_pull(
    backend: str, make: MakeTransfer, start_peer: StartPeer, empty_pool: KVPoolMemory
) -> None:
    reader = make(empty_pool)
    peer = await start_peer(backend)
    peer.kill()
    with pytest.raises(TransferError) as caught:
        await reader.pull(peer.description, [0], [0], timeout_s=3.0)
    assert caught.value.reason == "disconnect"
    assert not empty_pool.blocks.any()


async def test_a_peer_killed_during_a_pull(backend: str, make: MakeTransfer, start_peer: StartPeer) -> None:
    num_blocks, block_bytes = 2, 128 << 20  # few messages, so that the kill hits the middle of one
    pool = KVPoolMemory.of(torch.ones((num_blocks, block_bytes), dtype=torch.uint8))
    reader = make(pool)
    peer = await start_peer(backend, num_blocks, block_bytes)
    await reader.pull(peer.description, [0], [0], timeout_s=10.0)
    order = [1, 0]
    pulling = asyncio.ensure_future(reader.pull(peer.description, order, order, timeout_s=10.0))
    await asyncio.sleep(0.015 if backend == "nixl" else 0.08)  # gloo's source gathers the block first
    started = time.monotonic()
    peer.kill()
    try:
        await pulling
    except TransferError as error:
        assert error.reason == "disconnect"  # noqa: PT017  (the copy may also have won the race)
    else:
        assert torch.equal(pool.blocks, peer.expected)
    assert time.monotonic() - started < 3.0


async def test_a_peer_that_stands_still_costs_at_most_the_deadline(
    backend: str, make: MakeTransfer, start_peer: StartPeer, empty_pool: KVPoolMemory
) -> None:
    reader = make(empty_pool)
    peer = await start_peer(backend)
    await reader.pull(peer.description, [0], [0], timeout_s=10.0)
    peer.send_signal(signal.SIGSTOP)
    longest_gap = 0.0

    async def tick() -> None:
        nonlocal longest_gap
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            longest_gap = max(longest_gap, time.monotonic() - before)

    ticking = asyncio.ensure_future(tick())
    started = time.monotonic()
    try:
        await reader.pull(peer.description, [1], [1], timeout_s=1.0)
    except TransferError as error:
        assert error.reason == "timeout"  # noqa: PT017  (one-sided reads succeed)
    else:
        assert torch.equal(empty_pool.blocks[1], peer.expected[1])
    assert time.monotonic() - started < 5.0
    ticking.cancel()
    assert longest_gap < 0.8  # a pull in the loop would hold it up for 1 s
    peer.send_signal(signal.SIGCONT)
    await reader.pull(peer.description, [2], [2], timeout_s=10.0)
    assert torch.equal(empty_pool.blocks[2], peer.expected[2])


@pytest.mark.parametrize("forgotten", [False, True])
async def test_a_read_that_hangs_settles_when_its_bytes_have_landed_and_not_before(
    forgotten: bool, make: MakeTransfer, start_peer: StartPeer, empty_pool: KVPoolMemory
) -> None:
    if make.name != "nixl":
        pytest.skip("received blocks are staged: nothing lands late")
    reader = make(empty_pool)
    peer = await start_peer("nixl")
    peer.send_signal(signal.SIGSTOP)
    with pytest.raises(PullTimeout) as caught:
        # long enough to get as far as the read on a busy machine: the peer was never met before
        await reader.pull(peer.description, [5], [6], timeout_s=1.0)
    assert caught.value.reason == "timeout"
    settled = asyncio.ensure_future(caught.value.settled)
    if forgotten:
        await reader.forget(peer.description)
    await asyncio.sleep(0.2)
    assert not settled.done()
    peer.send_signal(signal.SIGCONT)
    await asyncio.wait_for(settled, 10.0)
    assert torch.equal(empty_pool.blocks[6], peer.expected[5])  # it landed late, as announced
    empty_pool.blocks.zero_()
    await asyncio.sleep(0.2)
    assert not empty_pool.blocks.any()
    await reader.pull(peer.description, [7], [8], timeout_s=10.0)
    assert torch.equal(empty_pool.blocks[8], peer.expected[7])


@pytest.mark.parametrize("tls", ["all", "tcp"])
async def test_the_named_transport_is_the_one_in_use(
    tls: str, start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    peer = await start_peer("nixl")
    monkeypatch.setenv("UCX_PROTO_INFO", "y")
    pool = KVPoolMemory.of(torch.zeros((64, 24 * 1024), dtype=torch.uint8))
    reader = create_transfer("nixl", pool, "reader", 0, "cpu")
    await reader.pull(peer.description, list(range(64)), list(range(64)), timeout_s=10.0)
    await reader.close()
    assert torch.equal(pool.blocks, peer.expected)
    named = reader.transport_of(peer.description)
    chosen = [
        line for line in _tables_of(capfd.readouterr().out, "remote memory read") if "zero-copy" in line or "/" in line
    ]
    assert any(f"{named}/" in line for line in chosen), (named, chosen)


def _tables_of(text: str, title: str) -> list[str]:
    """Lines of UCX's protocol tables from one that has `title` to the end of its table."""
    found: list[str] = []
    lines_left = 0
    for line in text.splitlines():
        if title in line:
            lines_left = 6
        if lines_left:
            found.append(line)
            lines_left -= 1
    return found


async def test_settings_that_cannot_work_are_a_users_mistake(
    empty_pool: KVPoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.workers.errors import UserError

    for setting in ("cma,self", "^tcp", "sysv"):
        monkeypatch.setenv("UCX_TLS", setting)
        with pytest.raises(UserError, match="must allow tcp"):
            create_transfer("nixl", empty_pool, "reader", 0, "cpu")


async def test_a_missing_library_is_a_users_mistake(empty_pool: KVPoolMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.workers.errors import UserError
    from tandem.workers.transfer import nixl_library

    monkeypatch.setattr(nixl_library, "_MODULES", ("no_such_library",))
    with pytest.raises(UserError, match="pip install nixl-cu12"):
        create_transfer("nixl", empty_pool, "reader", 0, "cpu")


async def test_nothing_is_left_behind(backend: str, make: MakeTransfer) -> None:
    source_pool = KVPoolMemory.of(torch.ones((8, 4096), dtype=torch.uint8))
    reader_pool = KVPoolMemory.of(torch.zeros((8, 4096), dtype=torch.uint8))

    async def once() -> None:
        source, reader = make(source_pool), make(reader_pool)
        await reader.pull(source.describe(), [0], [0], timeout_s=10.0)
        await make.close(reader)
        await make.close(source)

    await once()
    await asyncio.sleep(0.1)
    before = _num_threads(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await once()
    await asyncio.sleep(0.2)
    after = _num_threads(), len(os.listdir("/proc/self/fd"))
    assert after[0] <= before[0] + 1
    assert after[1] <= before[1] + 2


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


async def test_a_silent_group_does_not_hide_that_the_peer_has_gone(
    make: MakeTransfer, empty_pool: KVPoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if make.name != "nccl":
        pytest.skip("NIXL has no group")
    from tandem.workers.transfer import nccl

    kept: list[Any] = []

    def dies(group: Any, *_: Any) -> None:
        kept.append(group._group)  # gloo sees no end of the connection, as in the middle of a message
        raise ConnectionError

    source = make(KVPoolMemory.of(torch.ones_like(empty_pool.blocks)))
    reader = make(empty_pool)
    monkeypatch.setattr(nccl._Group, "send", dies)
    started = time.monotonic()
    with pytest.raises(TransferError) as caught:
        await reader.pull(source.describe(), [1], [1], timeout_s=5.0)
    assert caught.value.reason == "disconnect"
    assert time.monotonic() - started < 3.0
    kept.clear()
