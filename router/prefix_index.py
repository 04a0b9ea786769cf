"""Which workers hold which blocks, in Redis: hints for the policy, and never more than hints.

One sorted set per incarnation of a worker, `pfx:{namespace}:w:<worker>:<epoch>`, block key -> time of publication. Keys
of a prompt's blocks are chained, and workers evict leaves first, so what a worker holds of a prompt is a prefix of it:
the length is found by binary search, for all live workers in one round trip. Each set lives on a lease that its worker
renews; a dead worker's set goes away by itself, and a restarted worker starts a new one.

Lost, stale or poisoned entries cost a recompute. Nothing here ever fails a request or a worker.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha1
from itertools import islice
from typing import Any, Literal, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

logger = logging.getLogger(__name__)

Kind = Literal["stored", "removed"]
Holder = tuple[str, int]
"""(worker id, epoch)"""

# KEYS: sets of workers; ARGV: the prompt's block keys in order. -> per worker, how many of the first ones it holds.
# pcall: an entry of the wrong type counts as nothing held, and leaves the other workers' answers alone.
LONGEST_PREFIX = """
local lengths = {}
for worker = 1, #KEYS do
  local low, high = 0, #ARGV
  while low < high do
    local middle = math.floor((low + high + 1) / 2)
    local score = redis.pcall('ZSCORE', KEYS[worker], ARGV[middle])
    if type(score) == 'table' and score['err'] then low = 0 break end
    if score then low = middle else high = middle - 1 end
  end
  lengths[worker] = low
end
return lengths
"""
LONGEST_PREFIX_SHA = sha1(LONGEST_PREFIX.encode(), usedforsecurity=False).hexdigest()

LEASE_S = 60.0
RENEW_S = 15.0
SOCKET_TIMEOUT_S = 1.0
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 10.0


def index_key(namespace: str, worker_id: str, epoch: int) -> str:
    """The braces keep a cluster's sets in one slot, so that one script may read them all."""
    return f"pfx:{{{namespace}}}:w:{worker_id}:{epoch}"


def open_redis(url: str) -> Redis:
    # our own breaker decides about retries: the client must answer or fail, at once
    return Redis.from_url(
        url,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=SOCKET_TIMEOUT_S,
        retry=None,
        retry_on_error=[],
        protocol=2,
        max_connections=64,
    )


class Breaker:
    """Keeps away from a Redis that does not answer, for longer and longer, with jitter; one success forgets it all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s = FIRST_PAUSE_S
        self._open_until = 0.0
        self.is_up = True

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._open_until - self._clock())

    @property
    def can_try(self) -> bool:
        return self.remaining_s == 0.0

    def succeed(self) -> None:
        self.is_up = True
        self._pause_s = FIRST_PAUSE_S
        self._open_until = 0.0

    def fail(self) -> None:
        self.is_up = False
        if not self.can_try:
            return  # one outage, seen by several
        self._open_until = self._clock() + self._pause_s * random.uniform(0.75, 1.25)
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)


class IndexReader:
    """The router's side: how much of a prompt does each live worker hold?"""

    def __init__(self, redis_url: str, *, namespace: str, budget_s: float = 0.005, max_slow: int = 3) -> None:
        self._redis = open_redis(redis_url)
        self._namespace = namespace
        self._budget_s = budget_s
        self._max_slow = max_slow
        """So many answers in a row that miss the budget count as a failure."""
        self._num_slow = 0
        self._breaker = Breaker()
        self._lookups: set[asyncio.Task[list[int]]] = set()
        self._probe: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        return self._breaker.is_up

    async def start(self) -> None:
        """Find out whether the index is there, and keep watching it, so that `is_up` is true without traffic too."""
        await self._ping()
        self._probe = asyncio.create_task(self._watch(), name="prefix index")

    async def stop(self) -> None:
        tasks = [*self._lookups, *([self._probe] if self._probe else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._redis.aclose()

    async def longest_prefix(self, keys: Sequence[bytes], holders: Sequence[Holder]) -> dict[str, int]:
        """Blocks from the start of `keys` that each holder is said to have, by worker id. Empty if there is no answer
        within the budget; never raises."""
        if not keys or not holders or not self._breaker.can_try:
            return {}
        lookup = asyncio.create_task(self._look_up(keys, holders))
        self._lookups.add(lookup)
        lookup.add_done_callback(self._settle)
        # not cancelled when late: that would cost the connection, and its outcome tells about the index's health
        done, _ = await asyncio.wait({lookup}, timeout=self._budget_s)
        if not done:
            self._num_slow += 1
            if self._num_slow >= self._max_slow:
                self._num_slow = 0
                self._breaker.fail()
            return {}
        self._num_slow = 0
        if lookup.exception() is not None:
            return {}
        return {worker_id: length for (worker_id, _), length in zip(holders, lookup.result(), strict=True) if length}

    async def _look_up(self, keys: Sequence[bytes], holders: Sequence[Holder]) -> list[int]:
        sets = [index_key(self._namespace, worker_id, epoch) for worker_id, epoch in holders]
        arguments: list[Any] = [len(sets), *sets, *keys]
        try:
            answer = await cast(Any, self._redis).evalsha(LONGEST_PREFIX_SHA, *arguments)
        except NoScriptError:
            answer = await cast(Any, self._redis).eval(LONGEST_PREFIX, *arguments)
        if not isinstance(answer, list) or len(answer) != len(sets):
            raise RedisError("the prefix script gave an answer of another shape")
        if not all(isinstance(length, int) and 0 <= length <= len(keys) for length in answer):
            raise RedisError("the prefix script gave an impossible length")
        return answer

    def _settle(self, lookup: asyncio.Task[list[int]]) -> None:
        self._lookups.discard(lookup)
        if lookup.cancelled():
            return
        error = lookup.exception()
        if error is None:
            if self._num_slow == 0 and self._breaker.can_try:
                self._breaker.succeed()
        else:
            logger.info("prefix look-up failed: %s", error)
            self._breaker.fail()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if self._breaker.can_try and not self._lookups:
                await self._ping()

    async def _ping(self) -> None:
        try:
            await cast(Any, self._redis).ping()
        except (RedisError, OSError, TimeoutError) as error:
            if self._breaker.is_up:
                logger.warning("the prefix index does not answer: %s", error)
            self._breaker.fail()
        else:
            self._breaker.succeed()


class IndexPublisher:
    """A worker's side: tell Redis what this incarnation holds, soon but never at the cost of the worker.

    `record` only notes; a task sends what changed in batches. The publisher keeps its own copy of what is held, so that
    after any loss (an error, a restart of Redis, an overflow) it simply states everything again.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        namespace: str,
        worker_id: str,
        epoch: int,
        delay_s: float = 0.05,
        max_batch: int = 512,
        max_pending: int = 65_536,
    ) -> None:
        self._redis = open_redis(redis_url)
        self._key = index_key(namespace, worker_id, epoch)
        self._delay_s = delay_s
        self._max_batch = max_batch
        self._max_pending = max_pending
        self._held: set[bytes] = set()
        self._changed: dict[bytes, None] = {}
        """Keys whose presence in Redis may be wrong, oldest change first."""
        self._must_restate = True
        self._breaker = Breaker()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        return self._breaker.is_up

    @property
    def is_settled(self) -> bool:
        """True when Redis has been told everything."""
        return not self._changed and not self._must_restate

    def record(self, kind: Kind, key: bytes) -> None:
        """A block was stored or removed. From the event loop's thread; never waits, never raises."""
        if kind == "stored":
            self._held.add(key)
        else:
            self._held.discard(key)
        self._changed[key] = None
        if len(self._changed) > self._max_pending:
            self._changed.clear()
            self._must_restate = True
        self._wake.set()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="prefix index publisher")

    async def stop(self) -> None:
        """Withdraw what was published, if Redis is there to hear it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await cast(Any, self._redis).unlink(self._key)
        except (RedisError, OSError, TimeoutError) as error:
            logger.info("the prefix index was not told of the end: %s", error)
        await self._redis.aclose()

    async def _run(self) -> None:
        next_renewal = 0.0
        while True:
            try:
                if self._must_restate:
                    await self._restate()
                while self._changed:
                    await self._send_batch()
                if time.monotonic() >= next_renewal:
                    await self._renew()
                    next_renewal = time.monotonic() + RENEW_S
                self._breaker.succeed()
                await self._wait_for_changes(next_renewal - time.monotonic())
            except (RedisError, OSError, TimeoutError) as error:
                if self._breaker.is_up:
                    logger.warning("the prefix index cannot be written: %s", error)
                self._breaker.fail()
                self._must_restate = True  # what arrived of the last batch is unknown
                next_renewal = 0.0
                await asyncio.sleep(self._breaker.remaining_s)

    async def _wait_for_changes(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()
        await asyncio.sleep(self._delay_s)  # what comes meanwhile goes along

    async def _send_batch(self) -> None:
        batch = list(islice(self._changed, self._max_batch))
        for key in batch:
            del self._changed[key]
        now = int(time.time())
        stored = {key: now for key in batch if key in self._held}
        removed = [key for key in batch if key not in self._held]
        async with self._redis.pipeline(transaction=False) as pipeline:
            if stored:
                pipeline.zadd(self._key, cast(Any, stored))
            if removed:
                pipeline.zrem(self._key, *removed)
            pipeline.expire(self._key, int(LEASE_S))
            await pipeline.execute()

    async def _restate(self) -> None:
        """Replace whatever Redis holds under our key by everything that we hold."""
        self._changed.clear()
        self._must_restate = False
        held: Iterable[bytes] = iter(list(self._held))
        await cast(Any, self._redis).unlink(self._key)
        while chunk := list(islice(held, self._max_batch)):
            self._changed.update(dict.fromkeys(chunk))
            await self._send_batch()

    async def _renew(self) -> None:
        """Prolong the lease. If the set is gone although we hold blocks, Redis has lost it: state it again."""
        is_there = await cast(Any, self._redis).expire(self._key, int(LEASE_S))
        if not is_there and self._held:
            self._must_restate = True
            self._wake.set()
