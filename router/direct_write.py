"""A way past ASGI for the parts of a body that come by the thousand: written on the spot, without a coroutine.

The server's protocol offers it in the scope (`http_protocol.py`). Where it does not, and while the client is slow,
bodies go through ASGI's `send`, which waits.
"""

from __future__ import annotations

from typing import Protocol

from starlette.types import Scope

EXTENSION = "tandem.direct_write"
"""In `scope["extensions"]`."""


class DirectWriter(Protocol):
    """Of one connection."""

    is_ready: bool
    """The client is there and has read most of what was written."""
    patience_s: float
    """How long a client may read nothing at all, while writing waits for it, before its connection is cut."""

    def num_unsent(self) -> int:
        """Bytes that wait in this process."""

    def write(self, content: bytes) -> None:
        """More of the body; never empty. Only while `is_ready`, and only of a response without a content-length, from
        the moment that `send` was given its headers until it is given its end."""

    def abort(self) -> None:
        """Cut the connection, whatever the client has not read."""


def direct_writer(scope: Scope) -> DirectWriter | None:
    writer: DirectWriter | None = scope.get("extensions", {}).get(EXTENSION)
    return writer
