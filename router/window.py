"""A bound on what one request has under way at a time, in tokens and in number. First come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Window:
    """Whoever is alone in it may be larger than it is."""

    def __init__(self, num_tokens: int, num_holders: int) -> None:
        self._num_tokens = num_tokens
        self._num_holders = num_holders
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.num_held = 0
        self.num_holding = 0

    @asynccontextmanager
    async def holding(self, num_tokens: int) -> AsyncIterator[None]:
        """Room for so many tokens while this context lasts, when there is some."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_tokens, turn))
        self._let_in()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():  # else it never was let in, and is passed over when its turn comes
                self.num_held -= num_tokens
                self.num_holding -= 1
            self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            num_tokens, turn = self._waiting[0]
            has_room = self.num_held + num_tokens <= self._num_tokens and self.num_holding < self._num_holders
            if self.num_holding and not has_room:
                return
            self._waiting.popleft()
            if not turn.done():
                self.num_held += num_tokens
                self.num_holding += 1
                turn.set_result(None)
