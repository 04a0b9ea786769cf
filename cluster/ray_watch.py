"""Is Ray's control plane there, and does it answer?

    HEAD    the GCS: places actors, knows nodes. May come back, where its tables are kept in Redis.
    RAYLET  the one beside us. A driver is bound to it: once gone it is gone for this process, whatever starts in its
            place, and Ray ends our workers as soon as it notices.

    away    nobody listens at its port: found by connecting every half second, from outside
    hangs   the head listens, and answers nothing: found by a real call every few seconds (pulse.py)

Tokens, KV and heartbeats do not pass through Ray, so workers that live go on serving without it; only nobody can be
placed or replaced. What to do is decided by `judge`, a pure function. Lost: finding death by calls, which block for a
minute when Ray is away, and watching the processes, which another container cannot see.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

from tandem.cluster.pulse import Pulse
from tandem.workers.errors import TandemError

logger = logging.getLogger(__name__)

PROBE_S = 0.5
CONNECT_TIMEOUT_S = 3.0
MISSES = 2
"""In a row, before somebody is called away."""
BEAT_S = 3.0
"""Between calls. Several in a row without an answer, some 15 s, and somebody hangs."""
SETTLE_S = 1.0
"""A call that was on its way has so long before Ray is stopped."""
RAYLET_GRACE_S = 60.0
"""In a joined cluster, workers may live on for so long after the raylet beside the launcher; then the launcher goes."""
HEAD_GRACE_S = 30.0
"""The head has so long to come back, and whoever hangs to answer, while no worker decodes."""

Verdict = Literal["up", "degraded", "lost"]


class RayLost(TandemError):
    """Ray is gone for this process: it must be started anew."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What is seen at one moment. Seconds since each was first missed, or the head hung; None: it is there."""

    raylet_away_s: float | None
    head_away_s: float | None
    can_decode: bool
    hung_s: float | None = None


def judge(sight: Sight, *, is_own: bool) -> Verdict:
    """`is_own`: a Ray that the launcher started, for itself alone. Nobody but a new launcher would start it again."""
    is_away = sight.raylet_away_s is not None or sight.head_away_s is not None
    if not is_away and sight.hung_s is None:
        return "up"
    if is_own and is_away:
        return "lost"
    if sight.raylet_away_s is not None and (not sight.can_decode or sight.raylet_away_s >= RAYLET_GRACE_S):
        return "lost"
    missed_s = max(sight.head_away_s or 0.0, sight.hung_s or 0.0)
    return "lost" if not sight.can_decode and missed_s >= HEAD_GRACE_S else "degraded"


class Endpoint:
    """One address that is probed, and what is asked of whoever listens there, if anything."""

    def __init__(self, name: str, host: str, port: int, pulse: Pulse | None, *, may_return: bool) -> None:
        self.name = name
        self.host = host
        self.port = port
        self.pulse = pulse
        self._may_return = may_return
        self._num_missed = 0
        self._away_since: float | None = None
        self._hung_since: float | None = None

    async def probe(self, now: float) -> None:
        if self._away_since is not None and not self._may_return:
            return  # what answers there now is somebody else
        try:
            is_there = await _can_connect(self.host, self.port)
        except TimeoutError:  # who hangs for long has a full queue of connections; that is no news
            is_there = self._hung_since is not None
        if is_there:
            self._num_missed, self._away_since = 0, None
            return
        self._num_missed += 1
        if self._num_missed >= MISSES and self._away_since is None:
            self._away_since = now

    def beat(self, now: float) -> None:
        """Who is away is not asked: the call could end this process."""
        if self.pulse is None:
            return
        if self._away_since is None:
            self.pulse.beat()
        if not self.pulse.is_hung:
            self._hung_since = None
        elif self._hung_since is None:
            self._hung_since = now

    def away_s(self, now: float) -> float | None:
        return None if self._away_since is None else now - self._away_since

    def hung_s(self, now: float) -> float | None:
        return None if self._hung_since is None else now - self._hung_since

    def trouble(self) -> str | None:
        """In two words."""
        if self._away_since is not None:
            return "is away"
        return None if self._hung_since is None else "does not answer"


class RayWatch:
    """Run `watch` as a task. It sets `lost`, with the reason; nothing may be asked of Ray after that."""

    def __init__(
        self,
        raylet: Endpoint,
        head: Endpoint,
        lost: asyncio.Future[str],
        *,
        is_own: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._raylet = raylet
        self._head = head
        self._parts = (raylet, head)
        self._is_own = is_own
        self._clock = clock
        self._up = asyncio.Event()
        self._up.set()
        self.can_decode: Callable[[], bool] = lambda: True
        """Whether a worker lives that could answer; of the gateway, once there is one."""
        self._lost = lost

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    async def wait_up(self) -> None:
        """While Ray is away: until it is back."""
        await self._up.wait()

    def reasons(self) -> list[str]:
        """What is missing, in the words of /ready."""
        return [
            f"{part.name} {trouble}: lost workers are not replaced"
            for part in self._parts
            if (trouble := part.trouble()) is not None
        ]

    async def watch(self) -> None:
        """Until Ray is lost."""
        beating = asyncio.create_task(self._beat(), name="ask Ray")
        try:
            while not self._lost.done():
                await asyncio.sleep(PROBE_S)
                now = self._clock()
                await asyncio.gather(self._raylet.probe(now), self._head.probe(now))
                self._apply(now)
        finally:
            beating.cancel()

    def settle(self) -> None:
        """After `watch` was ended, before Ray is: no call may be on its way then. Blocks."""
        for part in self._parts:
            if part.pulse is not None:
                part.pulse.settle(SETTLE_S)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for part in self._parts:
                part.beat(self._clock())

    def _apply(self, now: float) -> None:
        raylet_s, head_s = self._raylet.away_s(now), self._head.away_s(now)
        sight = Sight(raylet_s, head_s, self.can_decode(), self._head.hung_s(now))
        verdict = judge(sight, is_own=self._is_own)
        if verdict == "up" and not self.is_up:
            logger.warning("Ray is back: lost workers are replaced again")
            self._up.set()
        elif verdict != "up" and self.is_up:
            self._up.clear()
            if verdict == "degraded":
                logger.error("%s; those that live go on serving", "; ".join(self.reasons()))
        if verdict == "lost" and not self._lost.done():
            self._lost.set_result(f"{self._culprit(now)}; this process ends, so that it is started anew")

    def _culprit(self, now: float) -> str:
        gone = [part.name for part in self._parts if part.away_s(now) is not None]
        return f"{gone[0]} is gone" if gone else "Ray does not answer, and no worker decodes"


async def _can_connect(host: str, port: int) -> bool:
    """Raises `TimeoutError` where nobody says yes or no."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        raise
    except OSError:
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True


def watch_of_this_ray(lost: asyncio.Future[str], *, is_own: bool) -> RayWatch:
    """Of the Ray that this process is a driver of."""
    import ray

    context = ray.get_runtime_context()
    nodes: list[dict[str, Any]] = cast(Any, ray).nodes()
    here = next(node for node in nodes if node["NodeID"] == context.get_node_id())
    host, _, port = str(context.gcs_address).rpartition(":")
    # nothing is asked of a raylet: whoever puts something into its store while it dies dies with it, without a word
    raylet = Endpoint(
        "Ray's raylet on this machine", here["NodeManagerAddress"], here["NodeManagerPort"], None, may_return=False
    )
    head = Endpoint("Ray's head", host.strip("[]"), int(port), Pulse(cast(Any, ray).nodes), may_return=not is_own)
    return RayWatch(raylet, head, lost, is_own=is_own)
