"""When a pool grows and when it shrinks: five-line scenarios, no clock."""

from __future__ import annotations

import asyncio

import pytest

from tandem.cluster import planner
from tandem.cluster.planner import GROW_AFTER_S, SHRINK_AFTER_S, PoolLoad, Pressure, plan
from tandem.cluster.scaling import follow_load, load_of
from tandem.workers.types import BlockCounts, Role, WorkerSnapshot


def load(num_workers: int = 2, *, starting: int = 0, waiting: int = 0, used: int = 40) -> PoolLoad:
    """`used`: of 100 blocks that each worker has, on the average."""
    return PoolLoad(num_workers, starting, waiting, 1, used * num_workers, 100 * num_workers)


def after(seconds: float, seen: PoolLoad, *, least: int = 1, most: int = 4) -> int:
    """The size that is wanted when a pool has looked like this for so long."""
    size, pressure = plan(seen, least, most, Pressure(), 100.0)
    assert size == seen.num_workers + seen.num_starting, "never at once"
    for now in (100.0 + seconds / 2, 100.0 + seconds):
        size, pressure = plan(seen, least, most, pressure, now)
    return size


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (load(waiting=8), 3),  # four for each
        (load(waiting=7), 2),
        (load(used=90), 3),
        (load(used=89), 2),
        (load(4, waiting=99), 4),  # as many as there may be
        (load(waiting=99, starting=1), 3),  # what one more brings is not known yet
        (load(0, starting=2), 2),
    ],
)
def test_grows(seen: PoolLoad, wanted: int) -> None:
    assert after(GROW_AFTER_S, seen) == wanted
    assert after(GROW_AFTER_S - 1, seen) == seen.num_workers + seen.num_starting


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (load(2, used=20), 1),
        (load(2, used=26), 2),  # one alone would have more than half of its KV in use
        (load(4, used=37), 3),
        (load(4, used=38), 4),
        (load(2, used=0, waiting=1), 2),
        (load(1, used=0), 1),
    ],
)
def test_shrinks(seen: PoolLoad, wanted: int) -> None:
    assert after(SHRINK_AFTER_S, seen) == wanted
    assert after(SHRINK_AFTER_S - 1, seen) == seen.num_workers


def test_a_moment_without_pressure_begins_anew() -> None:
    _, pressure = plan(load(waiting=99), 1, 4, Pressure(), 0.0)
    _, pressure = plan(load(), 1, 4, pressure, 10.0)
    assert plan(load(waiting=99), 1, 4, pressure, GROW_AFTER_S)[0] == 2


def test_bounds_hold_at_once() -> None:
    assert plan(load(1), 2, 4, Pressure(), 0.0)[0] == 2
    assert plan(load(5), 2, 4, Pressure(), 0.0)[0] == 4


def snapshot(worker_id: str, role: Role, waiting: int) -> WorkerSnapshot:
    blocks = BlockCounts(total=10, free=2, cached=3, used=4, incoming=1, quarantined=0)
    return WorkerSnapshot(
        worker_id=worker_id, epoch=0, role=role, pid=1, blocks=blocks, num_running=1, num_waiting=waiting,
        num_waiting_tokens=0, max_model_len=1,
    )  # fmt: skip


def test_load_is_what_workers_say() -> None:
    said = [snapshot("d0", "decode", 3), snapshot("p0", "prefill", 9), snapshot("d1", "decode", 2)]
    assert load_of("decode", said, 3) == PoolLoad(2, 1, 5, 2, 10, 20)


class FakeSupervisor:
    """Takes its orders, and starts nobody."""

    def __init__(self) -> None:
        self.sizes: dict[Role, int] = {"prefill": 1, "decode": 1}
        self.has_grown = asyncio.Event()

    def num_workers(self, role: Role) -> int:
        return self.sizes[role]

    async def resize(self, role: Role, count: int) -> None:
        self.sizes[role] = count
        self.has_grown.set()


async def test_the_pool_under_load_grows_by_one_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "GROW_AFTER_S", 0.0)
    supervisor = FakeSupervisor()
    said = [snapshot("d0", "decode", 30), snapshot("p0", "prefill", 30)]
    following = asyncio.create_task(
        follow_load(supervisor, lambda: said, {"decode": (1, 4)}, look_s=0.001)  # type: ignore[arg-type]
    )
    await asyncio.wait_for(supervisor.has_grown.wait(), 5)
    await asyncio.sleep(0.02)  # nobody new has come up yet: no more are asked for
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert supervisor.sizes == {"prefill": 1, "decode": 2}
