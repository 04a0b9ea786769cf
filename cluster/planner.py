"""How many workers a pool should have: a pure function of what was seen of it. No clock, no I/O, no Ray.

a queue, or KV that is nearly full, for long enough ──> one more      what is still starting counts as there
nothing waits and one fewer would have room, for longer ──> one fewer
"""

from __future__ import annotations

from dataclasses import dataclass

GROW_WAITING = 4.0
"""Requests waiting per worker, from which on a pool is too small."""
GROW_KV_USE = 0.9
SHRINK_KV_USE = 0.5
"""One worker fewer must not have more of its KV in use than that."""
GROW_AFTER_S = 15.0
SHRINK_AFTER_S = 600.0


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """What workers of one role say. Blocks in use are those that no newcomer could have."""

    num_workers: int
    """That serve."""
    num_starting: int
    num_waiting: int
    num_running: int
    num_used_blocks: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """Since when a pool has been too small, or larger than it need be; seconds of one clock."""

    grow_since: float | None = None
    shrink_since: float | None = None


def plan(load: PoolLoad, least: int, most: int, pressure: Pressure, now: float) -> tuple[int, Pressure]:
    """(how many workers there should be, what to remember until next time)."""
    size = load.num_workers + load.num_starting
    if size < least:
        return least, Pressure()
    if size > most:
        return most, Pressure()
    grow_since = _since(pressure.grow_since, now, _is_too_small(load) and size < most)
    shrink_since = _since(pressure.shrink_since, now, _is_too_large(load) and size > least)
    if grow_since is not None and now - grow_since >= GROW_AFTER_S:
        return size + 1, Pressure()
    if shrink_since is not None and now - shrink_since >= SHRINK_AFTER_S:
        return size - 1, Pressure()
    return size, Pressure(grow_since, shrink_since)


def _since(before: float | None, now: float, holds: bool) -> float | None:
    return (now if before is None else before) if holds else None


def _is_too_small(load: PoolLoad) -> bool:
    """Nobody is asked for while somebody is still starting: what that one brings is not known yet."""
    if load.num_workers == 0 or load.num_starting:
        return False
    kv_use = load.num_used_blocks / max(1, load.num_blocks)
    return load.num_waiting >= GROW_WAITING * load.num_workers or kv_use >= GROW_KV_USE


def _is_too_large(load: PoolLoad) -> bool:
    if load.num_workers < 2 or load.num_starting or load.num_waiting:
        return False
    left = load.num_blocks * (load.num_workers - 1) / load.num_workers
    return load.num_used_blocks <= SHRINK_KV_USE * left
