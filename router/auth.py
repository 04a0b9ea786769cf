"""Who may ask: API keys, checked before anything else looks at a request."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.router.errors import ApiError
from tandem.router.http import header, request_id, send_error

OPEN_PATHS = frozenset({"/health", "/live", "/ready"})
"""For probes. Every other path, known or not, needs a key: deny is the default."""


class KeyCheck:
    """ASGI middleware. Without keys it lets everybody through."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_refused(scope):
            error = ApiError(
                401,
                "Incorrect API key provided.",
                code="invalid_api_key",
                headers=(("www-authenticate", "Bearer"), ("x-request-id", request_id(scope))),
            )
            await send_error(send, error)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)

    def _is_refused(self, scope: Scope) -> bool:
        if not self._digests or scope["path"] in OPEN_PATHS:
            return False
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        given = _digest(key.strip())
        # every key is compared, in constant time, so that the time taken tells nothing
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return scheme.lower() != b"bearer" or not any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
