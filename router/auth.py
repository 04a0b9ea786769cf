"""Who may ask: API keys, checked before anything else looks at a request.

`POLICIES` says it for every route. What is not there needs a key too, and where there are no keys it is as open as the
rest: there is nothing behind it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.router.anthropic.errors import error_body as anthropic_error
from tandem.router.errors import ApiError
from tandem.router.http import header, request_id, send_error

Policy = Literal["open", "key"]

POLICIES: dict[str, Policy] = {
    "/health": "open",
    "/live": "open",
    "/ready": "open",
    "/v1/chat/completions": "key",
    "/v1/completions": "key",
    "/v1/responses": "key",
    "/v1/responses/{response_id}": "key",
    "/v1/responses/{response_id}/cancel": "key",
    "/v1/messages": "key",
    "/v1/messages/count_tokens": "key",
    "/v1/embeddings": "key",
    "/v1/models": "key",
    "/v1/models/{model:path}": "key",
    "/tokenize": "key",
    "/detokenize": "key",
    "/version": "key",
    "/docs": "key",
    "/openapi.json": "key",
}
"""By the path of the route."""
OPEN_PATHS = frozenset(path for path, policy in POLICIES.items() if policy == "open")
"""Compared with the path as it came: no form of writing it differently opens anything."""


class KeyCheck:
    """ASGI middleware. Without keys it lets everybody through.

    The key is `authorization: Bearer KEY`, or `x-api-key: KEY` as clients of the Messages API send it.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = self._caller(scope)
            if caller is None:
                await _refuse(scope, send)
            else:
                scope["tandem.caller"] = caller
                await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> str | None:
        """A name for the key that was used, "" where none is needed. None: refused."""
        if not self._digests or scope["path"] in OPEN_PATHS:
            return ""
        given = _digest(_key(scope))
        # every key is compared, in constant time, so that the time taken tells nothing
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return given.hex() if any(matches) else None


def _key(scope: Scope) -> bytes:
    """The key that was sent; empty, which is no key, if there is none."""
    authorization = header(scope, b"authorization")
    if authorization is None:
        return (header(scope, b"x-api-key") or b"").strip()
    scheme, _, key = authorization.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


async def _refuse(scope: Scope, send: Send) -> None:
    headers = (("www-authenticate", "Bearer"), ("x-request-id", request_id(scope)))
    error = ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers=headers)
    body = anthropic_error(error) if scope["path"].startswith("/v1/messages") else error.body()
    await send_error(send, error, body=body)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
