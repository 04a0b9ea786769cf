"""A worker's side: tell Redis what this incarnation holds, soon but never at the cost of the worker.

`record` only notes; a task sends what changed, in batches. The publisher keeps its own list of what is held, so nothing
that is lost on the way is lost for good:

    a batch fails                    it is sent again: each says what is so, not what has changed
    the lease is not as we left it   (Redis was emptied, restarted, replaced by a replica, or written by a stranger)
                                     everything is stated again, over what is there, so that answers do not become
                                     empty because of it; then the index is walked for what we do not hold any more
    too many changes wait            the same
    entries vanish unseen            every beat asks for a few of ours, in turn: one that is gone, and all are stated

The lease holds a sequence number that every batch and every beat raises, so a gap shows within a beat. Once it runs
out, the worker is dead: nobody asks for its entries, and the sweep of the others takes them away.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tandem.router.index.client import FAILURES, Breaker, close_redis, open_redis, run_script
from tandem.router.index.scripts import (
    AUDIT,
    NAME_BYTES,
    NUM_BUCKETS,
    PUBLISH,
    SWEEP,
    TAKE_TURN,
    index_prefix,
    owner_tag,
)

logger = logging.getLogger(__name__)

Kind = Literal["stored", "removed"]
Tier = Literal["pool", "host", "disk"]
TIER_BITS: dict[Tier, int] = {"pool": 1, "host": 2, "disk": 4}

LEASE_S = 30
BEAT_S = 2.0
AUDIT_BLOCKS = 128
"""Asked for in each beat."""
RESTATE_PAUSE_S = 10.0
"""At least so long between two restatements that an audit asks for."""
SWEEP_SLICES = 128
"""A beat's share of the sweep, so a round of all buckets takes some 256 s."""


class IndexPublisher:
    """See the module. Everything on one event loop."""

    def __init__(
        self,
        redis_url: str,
        *,
        namespace: str,
        worker_id: str,
        epoch: int,
        delay_s: float = 0.05,
        max_batch: int = 256,
        max_pending: int = 65_536,
        beat_s: float = BEAT_S,
    ) -> None:
        self._redis: Redis = open_redis(redis_url)
        self._prefix = index_prefix(namespace)
        self._tag = owner_tag((worker_id, epoch))
        self._delay_s = delay_s
        self._max_batch = max_batch
        self._max_pending = max_pending
        self._beat_s = beat_s
        self._held: dict[bytes, int] = {}
        """Name of a block -> tiers that hold it, as a mask; beginnings of prompts before what follows."""
        self._changed: dict[bytes, None] = {}
        """Blocks about which Redis may be wrong, oldest change first."""
        self._is_sending = False
        self._restating: Iterator[bytes] | None = None
        self._walk_at: int | None = None
        """The next bucket to be walked for blocks that we do not hold."""
        self._audited: Iterator[bytes] = iter(())
        self._last_restated = float("-inf")
        self._is_new = True
        self._sequence = secrets.randbits(40)
        self._known_sequences = {b""}
        """What the lease may say if nobody but us has written it."""
        self._breaker = Breaker()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        """Looked at between commands: the client may swallow a cancellation that comes together with an answer."""

    @property
    def is_up(self) -> bool:
        return self._breaker.is_up

    @property
    def is_settled(self) -> bool:
        """True when Redis has been told everything."""
        return not self._changed and not self._is_sending and self._restating is None and self._walk_at is None

    def record(self, kind: Kind, key: bytes, tier: Tier = "pool") -> None:
        """A block was stored in a tier, or removed from it. From the event loop's thread; never waits, never raises."""
        name = key[:NAME_BYTES]
        before = self._held.get(name, 0)
        mask = before | TIER_BITS[tier] if kind == "stored" else before & ~TIER_BITS[tier]
        if mask == before:
            return
        if mask:
            self._held[name] = mask
        else:
            del self._held[name]
        self._changed.pop(name, None)  # to the end: parents stay before their children
        self._changed[name] = None
        if len(self._changed) > self._max_pending:
            self._must_restate()
        self._wake.set()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="prefix index publisher")

    async def stop(self) -> None:
        """Give the lease back, if Redis is there to hear it: the entries are the sweep's from now on."""
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await cast(Any, self._redis).delete(self._lease_name)
        except FAILURES as error:
            logger.info("the prefix index was not told of the end: %s", error)
        await close_redis(self._redis)

    @property
    def _lease_name(self) -> bytes:
        return self._prefix.encode() + b"w:" + self._tag

    def _must_restate(self) -> None:
        self._changed.clear()
        self._restating = iter(list(self._held))
        self._walk_at = 0
        self._last_restated = time.monotonic()

    async def _run(self) -> None:
        next_beat = 0.0
        while not self._is_stopping:
            try:
                await self._tell()
                if time.monotonic() >= next_beat:
                    await self._beat()
                    next_beat = time.monotonic() + self._beat_s * random.uniform(0.9, 1.0)
                elif self._walk_at is not None:
                    await self._walk()
                self._breaker.succeed()
                if self.is_settled and not self._is_stopping:
                    await self._wait_for_changes(next_beat - time.monotonic())
            except FAILURES as error:
                if self._breaker.is_up:
                    logger.warning("the prefix index cannot be written: %s", error)
                self._breaker.fail()
                next_beat = 0.0
                if not self._is_stopping:
                    await asyncio.sleep(self._breaker.remaining_s)

    async def _wait_for_changes(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()
        await asyncio.sleep(self._delay_s)  # what comes meanwhile goes along

    # Telling

    async def _tell(self) -> None:
        """Send what changed, then what is to be stated again, a batch at a time."""
        while not self._is_stopping:
            batch = list(islice(self._changed, self._max_batch))
            if not batch and self._restating is not None:
                batch = list(islice(self._restating, self._max_batch))
                if not batch:
                    self._restating = None
            if not batch:
                return
            began = time.monotonic()
            await self._send(batch)
            if self._restating is not None:
                # leave Redis and our own loop as much time as we take: others look up prompts, and restate, too
                await asyncio.sleep(time.monotonic() - began)

    async def _send(self, batch: Sequence[bytes]) -> None:
        """State how it is with these blocks. They count as told once Redis has answered."""
        for name in batch:
            self._changed.pop(name, None)
        stored = [name for name in batch if name in self._held]
        removed = [name for name in batch if name not in self._held]
        masks = bytes(self._held[name] for name in stored)
        self._is_sending = True
        try:
            await self._publish(masks, b"".join(stored), b"".join(removed))
        except BaseException:
            # whether it arrived is unknown; changes that came since are newer, and stay behind
            self._changed = dict.fromkeys([*batch, *self._changed])
            raise
        finally:
            self._is_sending = False

    async def _publish(self, masks: bytes, stored: bytes, removed: bytes) -> None:
        """One batch, or none, and the lease renewed. Finds out whether Redis is where we left it."""
        self._sequence += 1
        sequence = b"%d" % self._sequence
        self._known_sequences.add(sequence)
        answer = await run_script(
            self._redis,
            PUBLISH,
            self._prefix,
            self._tag,
            sequence,
            int(self._restating is None),
            LEASE_S,
            secrets.token_bytes(8),
            masks,
            stored,
            removed,
        )
        if not isinstance(answer, list) or len(answer) != 2:
            raise RedisError("the publishing script gave an answer of another shape")
        before, had_era = answer
        if self._is_new and had_era:
            # an earlier cluster may have had a worker of our name and epoch
            self._walk_at = 0
        self._is_new = False
        is_as_left = before in self._known_sequences
        self._known_sequences = {sequence}
        if not is_as_left:
            logger.info("the prefix index is not as it was left: all is stated again")
            self._must_restate()

    # Keeping it true

    async def _beat(self) -> None:
        await self._publish(b"", b"", b"")
        if not self._changed and self._restating is None:
            await self._audit()
        await self._sweep()

    async def _audit(self) -> None:
        """Ask for a few blocks that must be there, going round all of them."""
        names = list(islice(self._audited, AUDIT_BLOCKS))
        if not names:
            self._audited = iter(list(self._held))
            names = list(islice(self._audited, AUDIT_BLOCKS))
        if not names:
            return
        missing = await run_script(self._redis, AUDIT, self._prefix, self._tag, b"".join(names))
        if not isinstance(missing, list) or not all(isinstance(n, int) and 0 <= n < len(names) for n in missing):
            raise RedisError("the auditing script gave an answer of another shape")
        lost = [names[number] for number in missing if names[number] in self._held]
        if not lost:
            return
        logger.info("%d of %d blocks were gone from the prefix index", len(lost), len(names))
        if time.monotonic() - self._last_restated >= RESTATE_PAUSE_S:
            self._must_restate()
        else:
            self._changed.update(dict.fromkeys(lost))

    async def _walk(self) -> None:
        """Look through some buckets for blocks that we are said to hold and do not."""
        assert self._walk_at is not None
        first = self._walk_at
        end, said = await self._sweep_buckets(first, NUM_BUCKETS)
        if self._walk_at == first:  # otherwise everything began anew meanwhile
            self._changed.update(dict.fromkeys(name for name in said if name not in self._held))
            self._walk_at = end if end < NUM_BUCKETS else None

    async def _sweep(self) -> None:
        """If nobody else does: clean a slice of the index of dead owners' entries."""
        num_buckets = NUM_BUCKETS // SWEEP_SLICES
        turn_ms = int(900 * self._beat_s)
        first = await run_script(self._redis, TAKE_TURN, self._prefix, self._tag, turn_ms, num_buckets)
        if not isinstance(first, int) or not 0 <= first < NUM_BUCKETS:
            return
        last = min(first + num_buckets, NUM_BUCKETS)
        while first < last and not self._is_stopping:
            first, _ = await self._sweep_buckets(first, last)

    async def _sweep_buckets(self, first: int, last: int) -> tuple[int, list[bytes]]:
        """Some of these buckets. Returns where to go on, and the blocks there that we are said to hold."""
        began = time.monotonic()
        answer = await run_script(self._redis, SWEEP, self._prefix, self._tag, first, last)
        if not isinstance(answer, list) or [type(part) for part in answer] != [int, bytes] or answer[0] <= first:
            raise RedisError("the sweeping script gave an answer of another shape")
        await asyncio.sleep(time.monotonic() - began)  # as much for the others
        end, said = answer
        return end, [said[start : start + NAME_BYTES] for start in range(0, len(said) - NAME_BYTES + 1, NAME_BYTES)]
