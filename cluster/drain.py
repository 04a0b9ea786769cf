"""The end of a cluster that people still talk to: nothing new is begun, what runs may end, within a bound.

    /ready 503, /cluster "draining" ──> gateways that follow close their doors, too (following.py)
    own requests                    ──> end, or are told so when the time is up (Gateway.drain)
    requests of other gateways      ──> end on our workers, which stop only after that

The workers are ours, and end with us: that a gateway of its own drains is not enough here.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tandem.cluster.following import POLL_S
from tandem.router.gateway import Gateway
from tandem.router.health import is_idle

LOOK_S = 0.1
FOLLOWED_S = 2 * POLL_S + 0.5
"""Until gateways that follow have read that we drain, and heartbeats have told of what they had begun before that."""


async def drain(gateway: Gateway, drain_s: float, *, is_followed: bool) -> None:
    """Returns when no request runs any more, or when the time is up. `is_followed`: by other gateways, surely; then all
    must have been quiet for a moment. Where that is not known, what runs at this moment is waited for."""
    looks = 1 + (round(FOLLOWED_S / LOOK_S) if is_followed else 0)
    await asyncio.gather(gateway.drain(drain_s), _until_quiet(gateway, drain_s, looks))


async def _until_quiet(gateway: Gateway, timeout_s: float, looks: int) -> None:
    num_quiet = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while (num_quiet := num_quiet + 1 if is_idle(gateway.workers) else 0) < looks:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
