"""Gateways tell each other what they routed: one short stream in Redis, written and read every 200 ms.

A stream rather than a channel: reading is an ordinary command on an ordinary connection, whoever was away for a moment
reads on where it was, and a gateway that has just started reads what the others routed a moment ago. What is
lost in a fault is lost: the workers' own words reach the index a moment later anyway.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis

from tandem.router.index.scripts import TAG_BYTES, index_prefix

logger = logging.getLogger(__name__)

Routed = tuple[bytes, bytes]
"""Owners' tags, and block keys thinned out by `noted_positions`, each in one string."""

EXCHANGE_S = 0.2
KEY_BYTES = 16
MAX_WAITING = 2048
"""Decisions that wait to be told; the oldest go first."""
MAX_BATCH = 512
MAX_STREAM_LEN = 256
"""Batches that Redis keeps, about: at most a minute of one gateway, or a few seconds of many."""
STREAM_TTL_S = 60
"""When nobody writes any more; who starts after that begins without."""
_decoder = msgspec.msgpack.Decoder(list[Routed])


class RouteExchange:
    """`exchange` is to be called every now and then; what others routed comes out through `on_routed`."""

    def __init__(
        self, redis: Redis, namespace: str, on_routed: Callable[[Sequence[bytes], Sequence[bytes]], None]
    ) -> None:
        self._redis = redis
        self._stream = index_prefix(namespace) + "routes"
        self._on_routed = on_routed
        self._self = secrets.token_bytes(8)
        self._waiting: deque[Routed] = deque(maxlen=MAX_WAITING)
        self._last_id: bytes | str = "0"  # all that the stream holds: its times are Redis' clock, not ours

    def tell(self, owners: Sequence[bytes], keys: Sequence[bytes]) -> None:
        self._waiting.append((b"".join(owners), b"".join(keys)))

    async def exchange(self) -> None:
        """One round trip. Raises one of `client.FAILURES`."""
        batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
        async with self._redis.pipeline(transaction=False) as pipeline:
            if batch:
                fields: Any = {"g": self._self, "r": msgspec.msgpack.encode(batch)}
                pipeline.xadd(self._stream, fields, maxlen=MAX_STREAM_LEN, approximate=True)
                pipeline.expire(self._stream, STREAM_TTL_S)
            pipeline.xread({self._stream: self._last_id}, count=64)
            answers = await pipeline.execute(raise_on_error=False)
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        for _, entries in answers[-1] or ():
            for entry_id, fields in entries:
                self._last_id = entry_id
                if fields.get(b"g") != self._self:
                    self._take(fields.get(b"r", b""))

    def _take(self, body: bytes) -> None:
        try:
            batch = _decoder.decode(body)
        except msgspec.MsgspecError:
            logger.info("an entry of the stream of routes cannot be read")
            return
        for owners, keys in batch[:MAX_BATCH]:
            self._on_routed(_pieces(owners, TAG_BYTES), _pieces(keys, KEY_BYTES))


def _pieces(text: bytes, size: int) -> list[bytes]:
    return [text[start : start + size] for start in range(0, len(text) - size + 1, size)]
