"""The faults that the handover's tests inject do what they say, once each, and are counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tandem.workers.errors import TransferError
from tandem.workers.transfer.base import PullTimeout
from tandem.workers.transfer.faulty import Delay, Fail, FaultPlan, FaultyTransfer, FlipBit, Hang, SkipBlock

Pair = Any


@pytest.fixture
def backend() -> str:
    return "local"


@pytest.fixture
def plan() -> FaultPlan:
    return FaultPlan()


@pytest.fixture
def faulty(pair: Pair, plan: FaultPlan) -> FaultyTransfer:
    return FaultyTransfer(pair.reader, pair.reader_pool, plan)


async def test_without_a_fault_everything_passes(pair: Pair, faulty: FaultyTransfer, plan: FaultPlan) -> None:
    await faulty.pull(pair.description, [1, 2], [3, 4], timeout_s=1.0)
    assert torch.equal(pair.reader_pool.blocks[[3, 4]], pair.source_pool.blocks[[1, 2]])
    assert (faulty.name, faulty.transport_of(pair.description), faulty.describe()) == (
        "local",
        "memcpy",
        pair.reader.describe(),
    )
    assert not plan.injected
    assert plan.num_pulls == 1


async def test_flip_one_bit_of_one_block(pair: Pair, faulty: FaultyTransfer, plan: FaultPlan) -> None:
    plan.arm(FlipBit(block=1, bit=13))
    await faulty.pull(pair.description, [1, 2, 3], [5, 6, 7], timeout_s=1.0)
    wrong = pair.reader_pool.blocks[[5, 6, 7]] ^ pair.source_pool.blocks[[1, 2, 3]]
    assert wrong.nonzero().tolist() == [[1, 1]]
    assert int(wrong[1, 1]) == 1 << 5
    await faulty.pull(pair.description, [1, 2, 3], [5, 6, 7], timeout_s=1.0)
    assert torch.equal(pair.reader_pool.blocks[[5, 6, 7]], pair.source_pool.blocks[[1, 2, 3]])
    assert plan.injected == {"FlipBit": 1}


async def test_skip_leaves_the_old_bytes(pair: Pair, faulty: FaultyTransfer, plan: FaultPlan) -> None:
    before = pair.reader_pool.blocks.clone()
    plan.arm(SkipBlock(block=2))
    await faulty.pull(pair.description, [1, 2, 3], [5, 6, 7], timeout_s=1.0)
    before[[5, 6]] = pair.source_pool.blocks[[1, 2]]
    assert torch.equal(pair.reader_pool.blocks, before)


@pytest.mark.parametrize("after_copy", [False, True])
async def test_fail_with_a_reason(pair: Pair, faulty: FaultyTransfer, plan: FaultPlan, after_copy: bool) -> None:
    plan.arm(Fail("refused", after_copy=after_copy))
    with pytest.raises(TransferError) as caught:
        await faulty.pull(pair.description, [1], [1], timeout_s=1.0)
    assert caught.value.reason == "refused"
    assert torch.equal(pair.reader_pool.blocks[1], pair.source_pool.blocks[1]) == after_copy


async def test_delay_within_and_past_the_deadline(pair: Pair, faulty: FaultyTransfer, plan: FaultPlan) -> None:
    plan.arm(Delay(0.02), Delay(5.0))
    await faulty.pull(pair.description, [1], [1], timeout_s=1.0)
    assert torch.equal(pair.reader_pool.blocks[1], pair.source_pool.blocks[1])
    with pytest.raises(TransferError) as caught:
        await faulty.pull(pair.description, [2], [2], timeout_s=0.02)
    assert caught.value.reason == "timeout"
    assert not torch.equal(pair.reader_pool.blocks[2], pair.source_pool.blocks[2])


async def test_a_hung_pull_lands_after_its_release(pair: Pair, faulty: FaultyTransfer, plan: FaultPlan) -> None:
    before = pair.reader_pool.blocks.clone()
    plan.arm(Hang())
    with pytest.raises(PullTimeout) as caught:
        await faulty.pull(pair.description, [1], [9], timeout_s=0.02)
    settled = asyncio.ensure_future(caught.value.settled)
    await asyncio.sleep(0.02)
    assert not settled.done()
    assert torch.equal(pair.reader_pool.blocks, before)
    plan.release()
    await asyncio.wait_for(settled, 1.0)
    assert torch.equal(pair.reader_pool.blocks[9], pair.source_pool.blocks[1])


async def test_faults_by_the_number_of_the_pull(pair: Pair) -> None:
    plan = FaultPlan({1: Fail("error"), 3: Fail("disconnect")})
    faulty = FaultyTransfer(pair.reader, pair.reader_pool, plan)
    outcomes: list[str] = []
    await faulty.pull(pair.description, [], [], timeout_s=1.0)  # empty: not counted
    for _ in range(5):
        try:
            await faulty.pull(pair.description, [1], [1], timeout_s=1.0)
        except TransferError as error:
            outcomes.append(error.reason)
        else:
            outcomes.append("ok")
    assert outcomes == ["ok", "error", "ok", "disconnect", "ok"]
    assert plan.injected == {"Fail": 2}
