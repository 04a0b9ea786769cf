"""Is it faster to bring KV here than to compute it? Two estimates to compare, from measured speeds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.workers.types import WorkerSpeeds

UNKNOWN_TOKEN_S = 0.0005
"""To compute one token, until this worker has computed some."""
SMOOTHING = 0.2
"""Weight of the newest observation."""
FORGETTING_S = 60.0
"""After so long without an observation a path is believed to be as fast as at the start again. Otherwise one slow
moment of a disk would keep it from ever being tried, and measured, again."""


@dataclass(frozen=True, slots=True)
class PathSpeed:
    """How fast bytes come from somewhere. `latency_s` is what every single request for them costs."""

    bytes_per_s: float
    latency_s: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


def compute_seconds(speeds: WorkerSpeeds, start: int, end: int) -> float:
    """How long this worker takes to compute the KV of tokens `start` to `end` of a prompt, alone."""
    token_s = UNKNOWN_TOKEN_S if speeds.prefill_token_s is None else speeds.prefill_token_s
    num_attended = (end * (end + 1) - start * (start + 1)) // 2
    return token_s * (end - start) + (speeds.prefill_attended_s or 0.0) * num_attended


class MeasuredPath:
    """A path whose speed is learned from what goes over it."""

    def __init__(self, start: PathSpeed, clock: Callable[[], float] = time.monotonic) -> None:
        self._start = start
        self._clock = clock
        self._bytes_per_s = start.bytes_per_s
        self._observed_at = -math.inf

    @property
    def speed(self) -> PathSpeed:
        is_forgotten = self._clock() - self._observed_at > FORGETTING_S
        fastest = max(self._bytes_per_s, self._start.bytes_per_s)
        return PathSpeed(fastest if is_forgotten else self._bytes_per_s, self._start.latency_s)

    def observe(self, num_bytes: int, seconds: float) -> None:
        """So many bytes took so long, latency included."""
        copy_s = max(seconds - self._start.latency_s, seconds / 10, 1e-9)
        self._bytes_per_s += SMOOTHING * (num_bytes / copy_s - self._bytes_per_s)
        self._observed_at = self._clock()

    def start_at(self, bytes_per_s: float) -> None:
        """What a probe found."""
        self._start = PathSpeed(bytes_per_s, self._start.latency_s)
        self._bytes_per_s = bytes_per_s

    def begin_at(self, bytes_per_s: float) -> None:
        """What a probe found now: forgotten as any observation is, for it may have met a bad moment."""
        self._bytes_per_s = bytes_per_s
        self._observed_at = self._clock()
