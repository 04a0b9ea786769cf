"""What a worker says about one request, on its way from the connection's reader to the request's task.

Most of it never lies here. While the task has nothing to do but wait, `express` is offered each chunk of tokens first,
on the spot: waking a task for every token of every stream costs more than the token. What it does not take, because
the client is slow or the answer has not begun, is kept in order for the task, as is everything behind it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.workers.types import TokenChunk

if TYPE_CHECKING:
    from tandem.router.workers import Event

TOKEN_BYTES = 128
"""A token that waits here, as text in an event that is about to be written."""
LOGPROB_BYTES = 100
"""One token of a list of most likely ones, in an event."""


Express = Callable[[TokenChunk], bool]
"""Takes a chunk on the spot, or says False and has not touched it."""


class Mailbox:
    """Events in order. One reader."""

    def __init__(self) -> None:
        self.express: Express | None = None
        self.on_waiting: Callable[[int], None] | None = None
        """Called with the bytes that wait here, whenever they have become more."""
        self._events: list[Event] = []
        self._num_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        """Pending while the reader waits: only then is nothing that was said before still to be dealt with."""

    def put(self, event: Event) -> None:
        """From the connection's reader. Never waits."""
        reader = self._reader
        if reader is not None:
            if self.express is not None and type(event) is TokenChunk and self.express(event):
                return
            self.wake()
        self._events.append(event)
        if type(event) is TokenChunk:
            self._num_bytes += _num_bytes(event)
            if self.on_waiting is not None:
                self.on_waiting(self._num_bytes)

    def wake(self) -> None:
        """Let the reader look around, even if there is nothing for it."""
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    @property
    def is_empty(self) -> bool:
        return not self._events

    async def take(self) -> list[Event]:
        """Everything since the last call; waits until there is something, or for `wake`."""
        if not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        events, self._events, self._num_bytes = self._events, [], 0
        return events


def _num_bytes(chunk: TokenChunk) -> int:
    """About what it takes here, or once it is an event on its way to the client, whichever is more."""
    num_bytes = sys.getsizeof(chunk) + TOKEN_BYTES * len(chunk.token_ids)
    for scored in chunk.logprobs or ():
        num_bytes += LOGPROB_BYTES * (1 + len(scored.top_token_ids))
    return num_bytes
