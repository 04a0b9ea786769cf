"""How long to wait before what has ended is started again."""

from __future__ import annotations

import asyncio

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 30.0
STEADY_S = 60.0
"""What has lived for so long starts afresh with its pauses."""


class Backoff:
    """Pauses of one thing that is kept alive: each twice as long as the one before, up to a bound."""

    def __init__(self) -> None:
        self.pause_s = FIRST_PAUSE_S
        """The next one."""

    async def pause(self) -> None:
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, LAST_PAUSE_S)
        await asyncio.sleep(pause_s)

    def note_life(self, seconds: float) -> None:
        """It has ended after so long."""
        if seconds > STEADY_S:
            self.pause_s = FIRST_PAUSE_S
