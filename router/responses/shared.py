"""Stored responses where all gateways of a cluster find them: in Redis, for a while and up to a bound.

    pfx:{namespace}:r:<name>    a response that has ended, or the word that it was deleted
    pfx:{namespace}:rr:<name>   one that is being written, by a gateway that lives
    pfx:{namespace}:rc:<name>   the wish that it be cancelled: its gateway looks for it four times a second
    pfx:{namespace}:rq          the order in which they came, with their sizes: the oldest go first

All values are sealed (sealed.py). Every gateway keeps what it wrote in its own memory too (store.py), so while Redis
is away each still knows its own. Nothing here raises because of Redis.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tandem.router.index.client import FAILURES, Breaker, close_redis, open_redis, run_script
from tandem.router.index.scripts import Script, index_prefix
from tandem.router.openai.messages import Message
from tandem.router.responses.sealed import Record, Sealer, record

logger = logging.getLogger(__name__)

MAX_RESPONSES = 16_384
MAX_BYTES = 64 << 20
MAX_VALUE_BYTES = 8 << 20
"""A longer conversation stays with the gateway that wrote it."""
LARGE = 64 << 10
"""Longer conversations are packed and unpacked in a thread: others' streams must not wait for that."""
BUDGET_S = 1.0
"""How long one question may take."""
ATTEND_S = 0.25
RUNNING_TTL_S = 15
"""What a gateway that died was writing is unknown after this."""
RENEW_S = 5.0
CANCEL_TTL_S = 30

PUT = Script("""
local prefix, name, value = KEYS[1], ARGV[1], ARGV[2]
local ttl, now, most, most_bytes = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local queue = prefix .. 'rq'
local function count(field)
  local found = redis.pcall('HGET', queue, field)
  local number = type(found) == 'string' and tonumber(found) or -1
  if number >= 0 and number < 2^52 and number % 1 == 0 then return number end
end
local head, tail, bytes = count('head'), count('tail'), count('bytes')
if not head or not tail or not bytes or head > tail or tail - head > 2 * most then
  redis.call('DEL', queue)
  head, tail, bytes = 0, 0, 0
end
redis.call('SET', prefix .. 'r:' .. name, value, 'EX', ttl)
tail, bytes = tail + 1, bytes + #value
redis.call('HSET', queue, tail, string.format('%d:%d:%s', #value, now, name))
for _ = 1, 64 do
  local oldest = redis.call('HGET', queue, head + 1)
  local size, at, victim = string.match(oldest or '', '^(%d+):(%d+):(%x+)$')
  local is_old = not size or tonumber(at) + ttl < now
  if head + 1 >= tail or not (is_old or tail - head > most or bytes > most_bytes) then break end
  head = head + 1
  redis.call('HDEL', queue, head)
  if size then
    bytes = math.max(0, bytes - tonumber(size))
    redis.call('DEL', prefix .. 'r:' .. victim)
  end
end
redis.call('HSET', queue, 'head', head, 'tail', tail, 'bytes', bytes)
redis.call('EXPIRE', queue, 2 * ttl)
return tail - head
""")


class SharedResponses:
    """See the module. `cancel(response id, caller)` is called for a response of ours that somebody wants ended."""

    def __init__(
        self,
        redis_url: str,
        *,
        namespace: str,
        cluster_key: bytes,
        time_to_live_s: float,
        cancel: Callable[[str, str], object],
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._redis: Any = open_redis(redis_url)
        self._prefix = index_prefix(namespace)
        self._sealer = Sealer(cluster_key)
        self._time_to_live_s = round(time_to_live_s)
        self._cancel = cancel
        self._bounds = (max_responses, max_bytes)
        self._breaker = Breaker()
        self._running: dict[str, tuple[str, str]] = {}
        """(response id, caller) by name, of those that are being written here."""
        self._attending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_stopping = False

    async def stop(self) -> None:
        self._is_stopping = True
        if self._attending is not None:
            self._attending.cancel()
            self._tasks.add(self._attending)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await close_redis(self._redis)

    # What this gateway writes

    def begin(self, response_id: str, caller: str, response: Mapping[str, Any]) -> None:
        """It is being written here."""
        name = self._sealer.name(response_id, caller)
        self._running[name] = (response_id, caller)
        self._later(self._set_running(name, record("running", response, (), 0.0)))
        if self._attending is None or self._attending.done():
            self._attending = asyncio.create_task(self._attend(), name="shared responses")

    def put(
        self, response_id: str, caller: str, response: Mapping[str, Any], messages: Sequence[Message]
    ) -> asyncio.Task[Any]:
        """It is written to the end. The task ends when it is there for all, or cannot be."""
        name = self._sealer.name(response_id, caller)
        return self._later(self._put(name, response, messages))

    async def delete(self, response_id: str, caller: str) -> None:
        """For everybody: other gateways may have it in their memory, too."""
        name = self._sealer.name(response_id, caller)
        value = self._sealer.seal(name, Record("deleted"))
        await self._ask(self._redis.set, self._key("r", name), value, ex=self._time_to_live_s)

    # What others have written

    async def find(self, response_id: str, caller: str) -> Record | None:
        """Ended, running or deleted; None: not known, or Redis does not answer."""
        name = self._sealer.name(response_id, caller)
        values = await self._ask(self._redis.mget, [self._key("r", name), self._key("rr", name)])
        for value, kinds in zip(values or (), (("stored", "deleted"), ("running",))):
            if value is not None and len(value) > LARGE:
                found = await asyncio.to_thread(self._sealer.open, name, value)
            else:
                found = self._sealer.open(name, value)
            if found is not None and found.kind in kinds:
                return found
        return None

    async def ask_to_cancel(self, response_id: str, caller: str) -> None:
        name = self._sealer.name(response_id, caller)
        await self._ask(
            self._redis.set, self._key("rc", name), self._sealer.seal(name, Record("cancel")), ex=CANCEL_TTL_S
        )

    # Inside

    def _key(self, kind: str, name: str) -> str:
        return f"{self._prefix}{kind}:{name}"

    def _later(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _put(self, name: str, response: Mapping[str, Any], messages: Sequence[Message]) -> None:
        expires = time.time() + self._time_to_live_s

        def sealed() -> bytes | None:
            return self._sealed(name, record("stored", response, messages, expires))

        is_large = len(messages) > LARGE >> 10 or sum(len(str(message.content)) for message in messages) > LARGE
        value = await asyncio.to_thread(sealed) if is_large else sealed()
        if value is not None:
            now = int(time.time())
            await self._ask(
                run_script, self._redis, PUT, self._prefix, name, value, self._time_to_live_s, now, *self._bounds
            )
        if self._running.pop(name, None) is not None:
            await self._ask(self._redis.delete, self._key("rr", name), self._key("rc", name))

    async def _set_running(self, name: str, content: Record) -> None:
        value = self._sealed(name, content)
        if value is not None and name in self._running:
            await self._ask(self._redis.set, self._key("rr", name), value, ex=RUNNING_TTL_S)

    def _sealed(self, name: str, content: Record) -> bytes | None:
        try:
            value = self._sealer.seal(name, content)
        except (ValueError, TypeError) as error:
            logger.warning("a response cannot be shared: %s", type(error).__name__)
            return None
        return value if len(value) <= MAX_VALUE_BYTES else None

    async def _ask(self, command: Callable[..., Awaitable[Any]], *given: Any, **named: Any) -> Any | None:
        """None also when Redis does not answer."""
        if not self._breaker.can_try:
            return None
        # not cancelled when late, and not with whoever waits: that would cost the connection
        asking = self._later(self._guarded(command(*given, **named)))
        done, _ = await asyncio.wait({asking}, timeout=BUDGET_S)
        if not done:
            self._breaker.fail()
            return None
        return asking.result()

    async def _guarded(self, answer: Awaitable[Any]) -> Any | None:
        try:
            found = await answer
        except FAILURES as error:
            if self._breaker.is_up:
                logger.warning("stored responses are not shared: %s", error)
            self._breaker.fail()
            return None
        self._breaker.succeed()
        return found

    async def _attend(self) -> None:
        """While something is being written here: does somebody want it cancelled? And others must know that we live."""
        renewed = time.monotonic()
        while self._running and not self._is_stopping:
            await self._attend_once()
            if time.monotonic() - renewed > RENEW_S:
                renewed = time.monotonic()
                await self._ask(self._renew, list(self._running))
            await asyncio.sleep(ATTEND_S)

    async def _attend_once(self) -> None:
        names = list(self._running)
        values = await self._ask(self._redis.mget, [self._key("rc", name) for name in names])
        for name, value in zip(names, values or ()):
            wish = self._sealer.open(name, value)
            if wish is not None and wish.kind == "cancel" and name in self._running:
                self._cancel(*self._running[name])

    async def _renew(self, names: Sequence[str]) -> None:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.expire(self._key("rr", name), RUNNING_TTL_S)
            await pipeline.execute()
