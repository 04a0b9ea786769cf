"""How fast this worker is, learned from the steps that it runs. Pure: no clock, no tensor; a step's times are fed in.

    a step of n sequences that decode     decode_step_s + decode_sequence_s * n
    a prompt's token among others         prefill_token_s + prefill_attended_s * (tokens it attends to)
    a step of both                        the sum

Both are lines, and a `LineEstimate` learns one: observations are grouped by the size of x in powers of two, and each
group keeps a moving average. So hours at one load do not make it forget what another load costs, as a plain decayed
least squares would, and a single slow step (a neighbour, a page fault) moves its group by a few percent.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.workers.types import WorkerSpeeds

SMOOTHING = 0.1
"""Weight of a new observation, once there are enough for an average."""
NUM_TRUSTED = 4
"""From so many observations on, a group bounds what a single one may say ..."""
OUTLIER_FACTOR = 3.0
"""... to this factor below and above its average. A lasting change gets through: the bounds move with the average."""
LEAST_SPREAD = 2.0
"""Sizes closer together than this factor say nothing about the slope: noise would, a hundred times further out."""
FULL_CHUNK_TOKENS = 128
"""A step with fewer prompt tokens says less of their price: what a step costs anyway is a larger part of it."""


@dataclass(frozen=True, slots=True)
class Line:
    """y = `at_zero` + `slope` * x; neither is negative."""

    at_zero: float
    slope: float


DECODE_START = Line(at_zero=0.02, slope=0.0005)
PREFILL_START = Line(at_zero=0.0004, slope=0.0)
"""Of both only the proportions are used, to split the first measured size. What is not measured is not told."""


@dataclass(slots=True)
class _Group:
    x: float
    y: float
    num: float


class LineEstimate:
    """y as a line of x >= 0, from noisy observations. `start` gives the proportions until two sizes were seen."""

    def __init__(self, start: Line) -> None:
        self._start = start
        self._groups: dict[int, _Group] = {}

    def observe(self, x: float, y: float, weight: float = 1.0) -> None:
        """`weight` in (0, 1]: how much this one says, beside others."""
        size = int(x).bit_length()
        group = self._groups.get(size)
        if group is None:
            self._groups[size] = _Group(x, y, weight)
            return
        if group.num >= NUM_TRUSTED:
            y = min(max(y, group.y / OUTLIER_FACTOR), group.y * OUTLIER_FACTOR)
        group.num += weight
        share = weight * max(SMOOTHING, 1.0 / group.num)
        group.x += min(1.0, share) * (x - group.x)
        group.y += min(1.0, share) * (y - group.y)

    def line(self) -> Line | None:
        """None until something was observed."""
        groups = list(self._groups.values())
        if not groups:
            return None
        # a group of one observation must not weigh as much as one of a thousand, nor one of a thousand drown ten
        weights = [min(group.num, 1.0 / SMOOTHING) for group in groups]
        total = sum(weights)
        mean_x = sum(w * group.x for w, group in zip(weights, groups)) / total
        mean_y = sum(w * group.y for w, group in zip(weights, groups)) / total
        if max(group.x for group in groups) < LEAST_SPREAD * min(group.x for group in groups):
            return self._through(mean_x, mean_y)
        spread = sum(w * (group.x - mean_x) ** 2 for w, group in zip(weights, groups))
        slope = sum(w * (group.x - mean_x) * (group.y - mean_y) for w, group in zip(weights, groups)) / spread
        if slope <= 0.0:
            return Line(mean_y, 0.0)
        at_zero = mean_y - slope * mean_x
        return Line(at_zero, slope) if at_zero >= 0.0 else Line(0.0, mean_y / mean_x)

    def _through(self, x: float, y: float) -> Line:
        """The start line, scaled so that it goes through this point."""
        scale = y / (self._start.at_zero + self._start.slope * x)
        return Line(self._start.at_zero * scale, self._start.slope * scale)


class SpeedMeter:
    """Fed with every step of one worker; tells its speeds."""

    def __init__(self) -> None:
        self._decode = LineEstimate(DECODE_START)
        self._prefill = LineEstimate(PREFILL_START)

    def observe_step(self, seconds: float, *, num_decodes: int, num_prefill_tokens: int, num_attended: int) -> None:
        """One step that took `seconds`: so many sequences decoded, so many prompt tokens were read, and these attended
        to `num_attended` tokens in all (each to those before it and to itself)."""
        if num_prefill_tokens == 0:
            if num_decodes:
                self._decode.observe(num_decodes, seconds)
            return
        decode = self._decode.line()
        if decode is not None:
            seconds -= decode.slope * num_decodes
        if seconds > 0.0:
            weight = min(1.0, num_prefill_tokens / FULL_CHUNK_TOKENS)
            self._prefill.observe(num_attended / num_prefill_tokens, seconds / num_prefill_tokens, weight)

    def speeds(self) -> WorkerSpeeds:
        prefill, decode = self._prefill.line(), self._decode.line()
        return WorkerSpeeds(
            prefill_token_s=None if prefill is None else prefill.at_zero,
            prefill_attended_s=None if prefill is None else prefill.slope,
            decode_step_s=None if decode is None else decode.at_zero,
            decode_sequence_s=None if decode is None else decode.slope,
        )
