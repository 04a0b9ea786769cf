"""Pools that follow their load: looks at the workers every few seconds, asks the planner, tells the supervisor.

Growing asks Ray for one more place of the pool's resources, which is what its autoscaler makes machines or pods for;
shrinking gives the place back, and an idle machine goes by Ray's own rule.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from tandem.cluster.planner import PoolLoad, Pressure, plan
from tandem.cluster.pools import Supervisor
from tandem.workers.types import Role, WorkerSnapshot

logger = logging.getLogger(__name__)

LOOK_S = 5.0


async def follow_load(
    supervisor: Supervisor,
    snapshots: Callable[[], Sequence[WorkerSnapshot]],
    bounds: Mapping[Role, tuple[int, int]],
    *,
    look_s: float = LOOK_S,
) -> None:
    """For ever. `bounds`: (least, most) workers of each pool whose size may change."""
    pressure = {role: Pressure() for role in bounds}
    while True:
        await asyncio.sleep(look_s)
        said = snapshots()
        for role, (least, most) in bounds.items():
            load = load_of(role, said, supervisor.num_workers(role))
            wanted, pressure[role] = plan(load, least, most, pressure[role], time.monotonic())
            if wanted != load.num_workers + load.num_starting:
                logger.warning("%s: %d workers from now on (%s)", role, wanted, load)
                await supervisor.resize(role, wanted)


def load_of(role: Role, snapshots: Sequence[WorkerSnapshot], num_wanted: int) -> PoolLoad:
    """`num_wanted`: workers that the supervisor has, or is starting."""
    pool = [snapshot for snapshot in snapshots if snapshot.role == role]
    blocks = [snapshot.blocks for snapshot in pool]
    return PoolLoad(
        num_workers=len(pool),
        num_starting=max(0, num_wanted - len(pool)),
        num_waiting=sum(snapshot.num_waiting for snapshot in pool),
        num_running=sum(snapshot.num_running for snapshot in pool),
        num_used_blocks=sum(each.total - each.free - each.cached for each in blocks),
        num_blocks=sum(each.total for each in blocks),
    )
