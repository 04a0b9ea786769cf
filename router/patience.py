"""How long a client that does not read is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.router.direct_write import DirectWriter
from tandem.router.errors import ClientDisconnected

CHECKS_PER_PATIENCE = 10


@asynccontextmanager
async def patience(writer: DirectWriter | None) -> AsyncIterator[None]:
    """What waits in this block may wait as long as the client goes on reading, however slowly, and for
    `writer.patience_s` while it reads nothing. Then its connection is cut, and `ClientDisconnected` raised.

    Without a writer nothing is known of the client, and nothing happens.
    """
    if writer is None:
        yield
        return
    limit = asyncio.timeout(writer.patience_s)
    watch = _Watch(writer, limit)
    try:
        async with limit:
            watch.go_on()
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        writer.abort()
        raise ClientDisconnected from error
    finally:
        watch.stop()


class _Watch:
    """Puts the limit off whenever something has been read."""

    def __init__(self, writer: DirectWriter, limit: asyncio.Timeout) -> None:
        self._writer = writer
        self._limit = limit
        self._least = writer.num_unsent()
        self._next: asyncio.TimerHandle | None = None

    def go_on(self) -> None:
        loop = asyncio.get_running_loop()
        unsent = self._writer.num_unsent()
        if unsent < self._least and not self._limit.expired():
            self._limit.reschedule(loop.time() + self._writer.patience_s)
        self._least = min(self._least, unsent)
        self._next = loop.call_later(self._writer.patience_s / CHECKS_PER_PATIENCE, self.go_on)

    def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()
