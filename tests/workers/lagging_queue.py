"""A device that takes its time, on a CPU: what is handed over is done when somebody waits for it, or when chance will.

Its tensors are the host's, but nothing else is shared: recorded steps read their inputs when their turn comes, and
results are there when they were waited for. So a buffer that is written too early, or read too early, changes tokens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

UNREAD = -(1 << 40)
"""What results hold before they are there."""


class LaggingQueue:
    """A `kernels.queue.Queue`. `haste`: how often something is done before anybody waits for it."""

    shares_memory = False

    def __init__(self, seed: int = 0, haste: float = 0.2) -> None:
        self._rng, self._haste = random.Random(seed), haste
        self._work: deque[Callable[[], object]] = deque()
        self._num_submitted = 0
        self.num_late = 0
        """Marks that were waited for while something before them was not done yet."""

    def send(self, host: Tensor) -> Tensor:
        return host.clone()

    def fetch(self, tensor: Tensor) -> Tensor:
        host = torch.full_like(tensor, UNREAD)
        self.submit(lambda: host.copy_(tensor))
        return host

    def submit(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        self._num_submitted += 1
        while self._work and self._rng.random() < self._haste:
            self._next()

    def run(self, work: Callable[[], T]) -> T:
        """What makes new tensors cannot wait here: all before it is done now."""
        self._catch_up(self._num_submitted)
        return work()

    def mark(self) -> _Mark:
        return _Mark(self, self._num_submitted)

    def is_alive(self) -> bool:
        return True

    def _next(self) -> None:
        with torch.inference_mode():
            self._work.popleft()()

    def _catch_up(self, place: int) -> None:
        while self._num_submitted - len(self._work) < place:
            self._next()


class _Mark:
    def __init__(self, queue: LaggingQueue, place: int) -> None:
        self._queue, self._place = queue, place

    def wait(self) -> None:
        done = self._queue._num_submitted - len(self._queue._work)
        self._queue.num_late += done < self._place
        self._queue._catch_up(self._place)
