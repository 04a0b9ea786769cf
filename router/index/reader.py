"""The router's side: how much of a prompt does each live worker hold?

Two sources, and the longer answer counts: the index, where workers say what they hold, and the memory of what was
routed lately (by this gateway, and by the others as they tell it). As long as a worker's word in the index is whole,
the memory only bridges its last seconds; where it is not (Redis down, slow, flushed, damaged, or still being told) it
goes further back. Either way it is a hint: workers check their own blocks.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from redis.exceptions import RedisError

from tandem.router.index.client import FAILURES, Breaker, close_redis, open_redis, run_script
from tandem.router.index.exchange import EXCHANGE_S, RouteExchange
from tandem.router.index.routes import RecentRoutes, noted_positions
from tandem.router.index.scripts import LOOK_UP, Holder, index_prefix, owner_tag

logger = logging.getLogger(__name__)

BRIDGE_S = 10.0
"""How long a decision counts although its worker has not confirmed it."""
MEMORY_S = 600.0
"""How long it counts where the index cannot be asked."""
WATCH_S = 1.0
PROBE_FACTOR = 4
"""Redis counts as well again when it answers within so many budgets: a slow ping promises slow look-ups."""
_record = struct.Struct("4sc")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the look-up script said. `lengths`: blocks by worker id."""

    era: bytes = b""
    is_damaged: bool = False
    """Some entries could not be read."""
    lengths: dict[str, int] = field(default_factory=dict)


def parse_answer(answer: Any, worker_ids: Mapping[bytes, str], num_blocks: int) -> Answer:
    """Raises `RedisError` when it has another shape. `worker_ids`: by owner's tag, of those that are asked for."""
    if not isinstance(answer, list) or len(answer) < 2 or len(answer) % 2:
        raise RedisError("the look-up script gave an answer of another shape")
    era, num_unreadable = answer[:2]
    lengths: dict[str, int] = {}
    for place in range(len(answer) - 2, 1, -2):  # the longest first
        position, owners = answer[place : place + 2]
        if not isinstance(position, int) or not 0 < position <= num_blocks or not isinstance(owners, bytes):
            raise RedisError("the look-up script gave an impossible answer")
        if len(owners) % _record.size:
            continue
        for tag, _ in _record.iter_unpack(owners):
            worker_id = worker_ids.get(tag)
            if worker_id is not None and worker_id not in lengths:
                lengths[worker_id] = position
    return Answer(era, num_unreadable != 0, lengths)


class IndexReader:
    """See the module. Nothing here raises because of Redis, or waits for it longer than the budget."""

    def __init__(self, redis_url: str, *, namespace: str, budget_s: float = 0.005, max_slow: int = 3) -> None:
        self._redis = open_redis(redis_url)
        self._prefix = index_prefix(namespace)
        self._budget_s = budget_s
        self._max_slow = max_slow
        """So many answers in a row that miss the budget count as a failure."""
        self._num_slow = 0
        self.num_late = 0
        """Look-ups ever that were not answered within the budget."""
        self._breaker = Breaker()
        self._look_ups: set[asyncio.Task[Answer]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False
        """Looked at between commands: the client may swallow a cancellation that comes together with an answer."""
        self._routes = RecentRoutes()
        self._exchange = RouteExchange(self._redis, namespace, self._note)
        self._era = b""
        self._holders: Sequence[Holder] = ()
        self._asked: Mapping[bytes, str] = {}
        """Owners of the latest look-up, with their workers' ids: those whose leases are watched."""
        self._whole: frozenset[bytes] = frozenset()
        """Owners whose word in the index is whole, as of the last watch."""

    @property
    def is_up(self) -> bool:
        return self._breaker.is_up

    async def start(self) -> None:
        """Find out whether the index is there, and keep watching it, so that `is_up` is true without traffic too."""
        await self._look()
        await self._share()
        self._tasks = [
            asyncio.create_task(self._watch(), name="prefix index"),
            asyncio.create_task(self._share_on(), name="prefix index routes"),
        ]

    async def stop(self) -> None:
        self._is_stopping = True
        tasks = [*self._look_ups, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await close_redis(self._redis)

    def note_routed(self, keys: Sequence[bytes], holders: Sequence[Holder]) -> None:
        """These workers are about to hold the blocks, in order from the first. Cheap: at most some 250 are noted."""
        if not keys or not holders:
            return
        noted = [keys[position - 1] for position in noted_positions(len(keys))]
        owners = [owner_tag(holder) for holder in holders]
        self._note(owners, noted)
        self._exchange.tell(owners, noted)

    async def longest_prefix(self, keys: Sequence[bytes], holders: Sequence[Holder]) -> dict[str, int]:
        """Blocks from the start of `keys` that each holder is thought to have, by worker id; holders without any are
        left out. Answers within the budget; never raises."""
        if not keys or not holders:
            return {}
        worker_ids = self._worker_ids(holders)
        answer = await self._ask(keys, worker_ids) if self._breaker.can_try else None
        lengths = {} if answer is None else dict(answer.lengths)
        is_sound = answer is not None and not answer.is_damaged and answer.era == self._era
        now = time.monotonic()
        routed = self._routes.longest_prefix(
            keys,
            worker_ids,
            since=now - MEMORY_S,
            known=self._whole if is_sound else frozenset(),
            known_since=now - BRIDGE_S,
        )
        for tag, length in routed.items():
            worker_id = worker_ids[tag]
            lengths[worker_id] = max(length, lengths.get(worker_id, 0))
        return lengths

    def _worker_ids(self, holders: Sequence[Holder]) -> Mapping[bytes, str]:
        """By owner's tag. Made once for a list that stays the same object."""
        if holders is not self._holders:
            self._holders = holders
            self._asked = {owner_tag(holder): holder[0] for holder in holders}
        return self._asked

    # Asking

    async def _ask(self, keys: Sequence[bytes], worker_ids: Mapping[bytes, str]) -> Answer | None:
        look_up = asyncio.create_task(self._look_up(b"".join(keys), worker_ids, len(keys)))
        self._look_ups.add(look_up)
        look_up.add_done_callback(self._settle)
        # not cancelled when late: that would cost the connection, and its outcome tells about the index's health
        done, _ = await asyncio.wait({look_up}, timeout=self._budget_s)
        if not done:
            self.num_late += 1
            self._num_slow += 1
            if self._num_slow >= self._max_slow:
                self._num_slow = 0
                self._breaker.fail()
            return None
        self._num_slow = 0
        return None if look_up.cancelled() or look_up.exception() is not None else look_up.result()

    async def _look_up(self, keys: bytes, worker_ids: Mapping[bytes, str], num_blocks: int) -> Answer:
        return parse_answer(await run_script(self._redis, LOOK_UP, self._prefix, keys), worker_ids, num_blocks)

    def _settle(self, look_up: asyncio.Task[Answer]) -> None:
        self._look_ups.discard(look_up)
        if look_up.cancelled():
            return
        error = look_up.exception()
        if error is None:
            if self._num_slow == 0 and self._breaker.can_try:
                self._breaker.succeed()
        else:
            logger.info("prefix look-up failed: %s", error)
            self._breaker.fail()

    # Watching

    async def _watch(self) -> None:
        while not self._is_stopping:
            await asyncio.sleep(WATCH_S)
            if self._breaker.can_try:
                await self._look()

    async def _look(self) -> None:
        """Is Redis there, is it what it was, and whose word is whole?"""
        asked = list(self._asked)
        names = [self._prefix + "era", *(self._prefix.encode() + b"w:" + tag for tag in asked)]
        began = time.monotonic()
        try:
            era, *leases = await cast(Any, self._redis).mget(names)
        except FAILURES as error:
            if self._breaker.is_up:
                logger.warning("the prefix index does not answer: %s", error)
            self._breaker.fail()
            return
        self._era = era or b""
        self._whole = frozenset(tag for tag, lease in zip(asked, leases) if lease and lease.endswith(b":1"))
        if time.monotonic() - began <= PROBE_FACTOR * self._budget_s:
            self._breaker.succeed()
        elif not self._breaker.is_up:
            self._breaker.fail()

    # Telling and hearing what was routed

    def _note(self, owners: Sequence[bytes], keys: Sequence[bytes]) -> None:
        self._routes.note(keys, owners, time.monotonic())

    async def _share_on(self) -> None:
        while not self._is_stopping:
            await asyncio.sleep(EXCHANGE_S)
            if self._breaker.can_try:
                await self._share()

    async def _share(self) -> None:
        if not self._breaker.is_up:
            return
        try:
            await self._exchange.exchange()
        except FAILURES as error:
            logger.info("routes were not exchanged: %s", error)
