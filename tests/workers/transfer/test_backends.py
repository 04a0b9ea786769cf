"""The contract of `Transfer`, over every transport, inside one process."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from tandem.workers.errors import TransferError, UserError
from tandem.workers.transfer.backends import create_transfer
from tandem.workers.transfer.base import KVPoolMemory, check_pull, probe_pattern, undisturbed

Pair = Any


async def pull(pair: Pair, remote: list[int], local: list[int], timeout_s: float = 10.0) -> None:
    await pair.reader.pull(pair.description, remote, local, timeout_s=timeout_s)


def assert_only_these_arrived(pair: Pair, before: torch.Tensor, remote: list[int], local: list[int]) -> None:
    expected = before.clone()
    expected[local] = pair.source_pool.blocks[remote]
    assert torch.equal(pair.reader_pool.blocks, expected)


SELECTIONS: dict[str, Callable[[int], tuple[list[int], list[int]]]] = {
    "none": lambda n: ([], []),
    "one": lambda n: ([5], [9]),
    "last": lambda n: ([n - 1], [n - 1]),
    "adjacent": lambda n: (list(range(4, 20)), list(range(30, 46))),
    "adjacent on one side": lambda n: (list(range(4, 20)), list(range(45, 29, -1))),
    "two runs": lambda n: ([1, 2, 3, 10, 11], [7, 8, 9, 10, 11]),
    "all": lambda n: (list(range(n)), list(range(n))),
    "same source block twice": lambda n: ([3, 3], [0, 1]),
    "scattered": lambda n: (random.Random(1).sample(range(n), 40), random.Random(2).sample(range(n), 40)),
}


@pytest.mark.parametrize("selection", SELECTIONS)
async def test_the_named_blocks_arrive_and_nothing_else_changes(pair: Pair, selection: str) -> None:
    remote, local = SELECTIONS[selection](pair.source_pool.num_blocks)
    before = pair.reader_pool.blocks.clone()
    await pull(pair, remote, local)
    assert_only_these_arrived(pair, before, remote, local)


async def test_pulls_at_the_same_time_do_not_mix(pair: Pair) -> None:
    before = pair.reader_pool.blocks.clone()
    order = random.Random(3).sample(range(64), 64)
    remote = random.Random(4).sample(range(64), 64)
    await asyncio.gather(*(pull(pair, remote[i : i + 8], order[i : i + 8]) for i in range(0, 64, 8)))
    assert_only_these_arrived(pair, before, remote, order)


async def test_a_pull_sees_what_the_source_writes_between_pulls(pair: Pair) -> None:
    await pull(pair, [1], [1])
    pair.source_pool.blocks[1].fill_(7)
    await pull(pair, [1], [1])
    assert bool((pair.reader_pool.blocks[1] == 7).all())


@pytest.mark.parametrize(
    ("remote", "local"),
    [([64], [0]), ([-1], [0]), ([0], [64]), ([0], [-1]), ([0, 1], [0]), ([0], [0, 1]), ([], [1]), ([0, 1], [2, 2])],
)
async def test_a_pull_outside_the_named_pools_is_refused(pair: Pair, remote: list[int], local: list[int]) -> None:
    before = pair.reader_pool.blocks.clone()
    with pytest.raises(TransferError) as caught:
        await pull(pair, remote, local)
    assert caught.value.reason == "refused"
    assert torch.equal(pair.reader_pool.blocks, before)
    await pull(pair, [2], [3])  # still usable
    assert_only_these_arrived(pair, before, [2], [3])


async def test_a_peer_with_other_block_bytes_is_refused(pair: Pair) -> None:
    other = pair.make(KVPoolMemory.of(torch.zeros((64, 4096), dtype=torch.uint8)))
    with pytest.raises(TransferError, match="block_bytes differs: ours 24576, theirs 4096") as caught:
        await pair.reader.pull(other.describe(), [0], [0], timeout_s=5.0)
    assert caught.value.reason == "refused"


@pytest.mark.parametrize(
    "description",
    [
        b"",
        b"\xff" * 100,
        b"\x80\x04\x95\x10",
        msgspec.msgpack.encode({"type": "other", "agent": "a"}),
        msgspec.msgpack.encode([1, 2, 3]),
        bytes(2 << 20),
    ],
)
async def test_a_foreign_description_is_refused(pair: Pair, description: bytes) -> None:
    with pytest.raises(TransferError) as caught:
        await pair.reader.pull(description, [0], [0], timeout_s=1.0)
    assert caught.value.reason == "refused"
    await pull(pair, [0], [0])


async def test_every_field_of_a_description_is_checked(pair: Pair) -> None:
    fields = msgspec.msgpack.decode(pair.description)
    for name in fields:
        for value in (None, -1, "nonsense", 1 << 63):
            spoilt = msgspec.msgpack.encode(fields | {name: value})
            if isinstance(value, type(fields[name])) and name in ("host", "pool_id"):
                continue  # another name, as good as any: nobody is there
            try:
                await pair.reader.pull(spoilt, [0], [0], timeout_s=0.3)
            except TransferError:
                continue
            assert name == "pid", f"{name}={value!r} went through"


async def test_forget_and_pull_again_and_from_a_new_epoch(pair: Pair) -> None:
    await pull(pair, [1], [1])
    await pair.reader.forget(pair.description)
    await pair.reader.forget(pair.description)
    await pull(pair, [2], [2])
    await pair.reader.forget(pair.description)
    await pair.make.close(pair.source)
    pair.source_pool.blocks.fill_(9)
    successor = pair.make(pair.source_pool, epoch=1)
    assert successor.describe() != pair.description
    await pair.reader.pull(successor.describe(), [3], [3], timeout_s=5.0)
    assert bool((pair.reader_pool.blocks[3] == 9).all())


async def test_forget_of_a_peer_never_met(pair: Pair) -> None:
    await pair.reader.forget(pair.reader.describe())


async def test_both_sides_read_from_each_other(pair: Pair) -> None:
    expected = pair.reader_pool.blocks[5].clone()
    await asyncio.gather(pull(pair, [1], [2]), pair.source.pull(pair.reader.describe(), [5], [6], timeout_s=5.0))
    assert torch.equal(pair.source_pool.blocks[6], expected)
    assert torch.equal(pair.reader_pool.blocks[2], pair.source_pool.blocks[1])


async def test_no_time_left_means_a_timeout_that_touches_nothing(pair: Pair) -> None:
    await pull(pair, [0], [0])
    before = pair.reader_pool.blocks.clone()
    if pair.reader.name == "local":
        pytest.skip("the in-process copy has no deadline to miss")
    with pytest.raises(TransferError) as caught:
        await pull(pair, [1], [1], timeout_s=0.0)
    assert caught.value.reason == "timeout"
    assert torch.equal(pair.reader_pool.blocks, before)


async def test_a_cancelled_pull_ends_when_its_blocks_are_quiet(pair: Pair) -> None:
    await pull(pair, [0], [0])
    task = asyncio.ensure_future(pull(pair, list(range(64)), list(range(64))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    after = pair.reader_pool.blocks.clone()
    await asyncio.sleep(0.05)
    assert torch.equal(pair.reader_pool.blocks, after)


async def test_undisturbed_waits_for_the_end_of_the_pull() -> None:
    ended = False

    async def slow() -> None:
        nonlocal ended
        await asyncio.sleep(0.05)
        ended = True

    task = asyncio.ensure_future(undisturbed(slow()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended


async def test_undisturbed_prefers_the_error_of_the_pull() -> None:
    async def fails() -> None:
        await asyncio.sleep(0.02)
        raise TransferError("late", reason="timeout")

    task = asyncio.ensure_future(undisturbed(fails()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(TransferError):
        await task


async def test_the_loop_stays_responsive_during_a_large_pull(make: Any) -> None:
    num_blocks, block_bytes = 256, 1 << 20
    source_pool = KVPoolMemory.of(torch.ones((num_blocks, block_bytes), dtype=torch.uint8))
    reader_pool = KVPoolMemory.of(torch.full((num_blocks, block_bytes), 2, dtype=torch.uint8))
    source, reader = make(source_pool), make(reader_pool)
    description = source.describe()
    await reader.pull(description, [0], [0], timeout_s=10.0)
    order = random.Random(5).sample(range(num_blocks), num_blocks)
    gaps: list[float] = []

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticking = asyncio.ensure_future(tick())
    started = time.perf_counter()
    await reader.pull(description, list(range(num_blocks)), order, timeout_s=20.0)
    elapsed = time.perf_counter() - started
    ticking.cancel()
    assert int(reader_pool.blocks[:, ::4096].max()) == 1
    # A copy on the loop would show as one gap of the whole transfer; others share this machine, hence the slack.
    assert max(gaps) < max(0.03, 0.6 * elapsed)
    assert len(gaps) >= 5


async def test_an_unknown_transport_is_a_users_mistake(empty_pool: KVPoolMemory) -> None:
    with pytest.raises(UserError, match="transfer must be nixl, nccl or local, but is 'carrier pigeon'"):
        create_transfer("carrier pigeon", empty_pool, "w", 0, "cpu")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="on cpu, but device is 'cuda'"):
        create_transfer("local", empty_pool, "w", 0, "cuda")


def test_pool_memory_views_any_dtype_without_a_copy() -> None:
    pool = torch.zeros((6, 2, 3, 2, 4, 8), dtype=torch.bfloat16)
    memory = KVPoolMemory.of(pool)
    assert (memory.num_blocks, memory.block_bytes, memory.address) == (6, 2 * 3 * 2 * 4 * 8 * 2, pool.data_ptr())
    pool[3] = 1.0
    assert memory.blocks[3].any()
    assert not memory.blocks[2].any()
    with pytest.raises(RuntimeError):
        KVPoolMemory.of(pool.transpose(1, 4))


def test_check_pull_accepts_the_whole_pool() -> None:
    memory = KVPoolMemory.of(torch.zeros((4, 8), dtype=torch.uint8))
    check_pull(memory, [8, 0, 1, 2], [0, 1, 2, 3], remote_num_blocks=9, remote_block_bytes=8)


def test_the_probe_pattern_has_no_short_period() -> None:
    pattern = probe_pattern(4096)
    assert all(not (pattern[step:] == pattern[:-step]).all() for step in range(1, 2048))
    assert len(probe_pattern(13)) == 13
