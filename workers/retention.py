"""How much an idle block is worth keeping, from what requests asked for and how long nobody has used it. Pure.

A *grant* is one request's wish: a priority, which falls back to the default when the block was idle for its duration.
A block that several requests used has the highest priority that any of them still gives it. While it is in use, no
grant runs down, and each use starts all of them anew that have not run out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from tandem.workers.types import Retention

DEFAULT_PRIORITY = Retention().priority


@dataclass(frozen=True, slots=True)
class Grant:
    """One request's wish for a block, in force until that has been idle for `duration_s`."""

    priority: int
    duration_s: float
    """Infinite: it never falls back."""

    def at(self, idle_since: float, now: float) -> int:
        return self.priority if now < idle_since + self.duration_s else DEFAULT_PRIORITY

    def covers(self, other: Grant) -> bool:
        """Whether it is never the lower of the two."""
        if self.priority >= DEFAULT_PRIORITY >= other.priority:
            return True
        if self.priority < DEFAULT_PRIORITY:  # running out raises it
            return self.priority >= other.priority and self.duration_s <= other.duration_s
        return self.priority >= other.priority and self.duration_s >= other.duration_s


Grants = tuple[Grant, ...]
"""Of one block; none of them covers another, so there is one in all but strange cases."""

DEFAULT = Grant(DEFAULT_PRIORITY, inf)


def grant(retention: Retention) -> Grant:
    """What a request asks for, as a grant."""
    if retention.priority == DEFAULT_PRIORITY:
        return DEFAULT
    return Grant(retention.priority, inf if retention.duration_s is None else retention.duration_s)


def joined(grants: Grants, new: Grant) -> Grants:
    """With one more grant; the same object when that makes no difference."""
    if any(grant.covers(new) for grant in grants):
        return grants
    return (*(grant for grant in grants if not new.covers(grant)), new)


def used(grants: Grants, idle_since: float, now: float) -> Grants:
    """What is left of them when the block is used again: those that ran out are the default from now on."""
    if all(now < idle_since + grant.duration_s for grant in grants):
        return grants
    return joined(tuple(grant for grant in grants if now < idle_since + grant.duration_s), DEFAULT)


def priority(grants: Grants, idle_since: float, now: float) -> int:
    """What a block with these is worth now: the most that anybody still gives it."""
    return max(grant.at(idle_since, now) for grant in grants)


def next_end(grants: Grants, idle_since: float, now: float) -> float | None:
    """When the next of them runs out; None: never."""
    ends = [end for grant in grants if now < (end := idle_since + grant.duration_s) < inf]
    return min(ends, default=None)
