"""Does somebody still answer? A real call once in a while, each in a thread of its own: one that hangs hangs alone.

    beat ── asks once more, in a thread ──> an answer, at some time, or none
         └─ looks: has anything answered since the last beat? No: one more miss

Misses are counted in beats, not in seconds, so that a process which was itself held up takes nobody for hung; and an
answer counts whenever it comes, so that whoever is slow is not hung either.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

MISSES = 5
"""In a row, before somebody is called hung."""
MOST_CALLS = 5
"""That hang at once; none is made beyond."""


class Pulse:
    """`ask` blocks until there is an answer, or raises where there is none."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = ask
        self._answered = threading.Event()
        self._answered.set()
        self._num_missed = 0
        self._calls: list[threading.Thread] = []

    @property
    def is_hung(self) -> bool:
        """As of the last beat."""
        return self._num_missed >= MISSES

    def beat(self) -> None:
        if self._answered.is_set():
            self._num_missed = 0
            self._answered.clear()
        else:
            self._num_missed += 1
        self._calls = [call for call in self._calls if call.is_alive()]
        if len(self._calls) < MOST_CALLS:
            # a daemon: a call that never returns must not keep this process
            call = threading.Thread(target=self._call, name="pulse", daemon=True)
            call.start()
            self._calls.append(call)

    def settle(self, timeout_s: float) -> None:
        """Wait until no call is on its way, for so long at most. Blocks."""
        end = time.monotonic() + timeout_s
        for call in self._calls:
            call.join(max(0.0, end - time.monotonic()))

    def _call(self) -> None:
        try:
            self._ask()
        except Exception as error:  # noqa: BLE001 whatever was raised, it is no answer
            logger.debug("no answer: %s", error)
        else:
            self._answered.set()
