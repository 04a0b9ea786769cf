"""Faults on purpose, around any transport: what the handover's recovery is tested with.

Each fault is armed for one pull, counted when it strikes, and does the same thing on every run.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.workers.errors import TransferError, TransferFailure
from tandem.workers.transfer.base import KVPoolMemory, PullTimeout, Transfer


@dataclass(frozen=True, slots=True)
class FlipBit:
    """The pull succeeds, but one bit of its `block`-th destination block is wrong. `block` counts within the pull."""

    block: int = 0
    bit: int = 0


@dataclass(frozen=True, slots=True)
class SkipBlock:
    """The pull succeeds, but its `block`-th block was never copied: the destination keeps its old bytes."""

    block: int = 0


@dataclass(frozen=True, slots=True)
class Delay:
    """The pull succeeds, `seconds` late; past the deadline it times out without touching the destination."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Fail:
    """The pull raises `TransferError` with this reason. `after_copy`: the bytes have landed nevertheless."""

    reason: TransferFailure
    after_copy: bool = False


@dataclass(frozen=True, slots=True)
class Hang:
    """The pull raises `PullTimeout` at its deadline; its bytes land, and `settled` ends, when the plan's `release`
    is called (or when the wrapper is closed)."""


Fault = FlipBit | SkipBlock | Delay | Fail | Hang


class FaultPlan:
    """Which pulls go wrong, and how. Pulls are counted from 0 when the plan is made; empty pulls are not counted."""

    def __init__(self, at_pull: dict[int, Fault] | None = None) -> None:
        self._at_pull = dict(at_pull or {})
        self._armed: deque[Fault] = deque()
        self._released = asyncio.Event()
        self.num_pulls = 0
        self.injected: Counter[str] = Counter()
        """Faults that have struck, by class name."""

    def arm(self, *faults: Fault) -> None:
        """The next pulls get these faults, one each, in order."""
        self._armed.extend(faults)

    def release(self) -> None:
        """Let every pull that hangs (and those that will) end."""
        self._released.set()

    async def wait_for_release(self) -> None:
        await self._released.wait()

    def next_fault(self) -> Fault | None:
        """Called once per pull by the wrapper."""
        fault = self._at_pull.get(self.num_pulls)
        if fault is None and self._armed:
            fault = self._armed.popleft()
        self.num_pulls += 1
        if fault is not None:
            self.injected[type(fault).__name__] += 1
        return fault


class FaultyTransfer:
    """`Transfer` that passes everything on to `inner`, except for the pulls that `plan` picks."""

    def __init__(self, inner: Transfer, pool: KVPoolMemory, plan: FaultPlan) -> None:
        self._inner = inner
        self._pool = pool
        self._plan = plan
        self._hanging: set[asyncio.Task[None]] = set()
        self.name = inner.name

    def describe(self) -> bytes:
        return self._inner.describe()

    async def pull(
        self, peer: bytes, remote_blocks: Sequence[int], local_blocks: Sequence[int], *, timeout_s: float
    ) -> None:
        fault = self._plan.next_fault() if local_blocks else None
        match fault:
            case Fail(after_copy=False):
                raise TransferError("fault on purpose", reason=fault.reason)
            case Delay():
                await asyncio.sleep(min(fault.seconds, timeout_s))
                if fault.seconds >= timeout_s:
                    raise TransferError("fault on purpose: late", reason="timeout")
                timeout_s -= fault.seconds
            case Hang():
                await asyncio.sleep(timeout_s)
                raise PullTimeout("fault on purpose: hangs", self._land_late(peer, remote_blocks, local_blocks))
            case SkipBlock():
                remote_blocks, local_blocks = _without(remote_blocks, fault.block), _without(local_blocks, fault.block)
        await self._inner.pull(peer, remote_blocks, local_blocks, timeout_s=timeout_s)
        match fault:
            case FlipBit():
                self._flip(local_blocks[fault.block % len(local_blocks)], fault.bit)
            case Fail():
                raise TransferError("fault on purpose", reason=fault.reason)

    def transport_of(self, peer: bytes) -> str:
        return self._inner.transport_of(peer)

    async def forget(self, peer: bytes) -> None:
        await self._inner.forget(peer)

    async def close(self) -> None:
        self._plan.release()
        await asyncio.gather(*self._hanging)
        await self._inner.close()

    def _flip(self, block: int, bit: int) -> None:
        byte, shift = divmod(bit % (8 * self._pool.block_bytes), 8)
        self._pool.blocks[block, byte] ^= 1 << shift

    def _land_late(self, peer: bytes, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> asyncio.Task[None]:
        async def land() -> None:
            await self._plan.wait_for_release()
            try:
                await self._inner.pull(peer, remote_blocks, local_blocks, timeout_s=10.0)
            except TransferError:
                return  # the peer has gone meanwhile: nothing lands, which settles it as well

        task = asyncio.ensure_future(land())
        self._hanging.add(task)
        task.add_done_callback(self._hanging.discard)
        return task


def _without(blocks: Sequence[int], index: int) -> list[int]:
    index %= len(blocks)
    return [block for position, block in enumerate(blocks) if position != index]
