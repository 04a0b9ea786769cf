"""The few things about HTTP that the endpoints do themselves, straight on ASGI."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from tandem.router.errors import ApiError, ClientDisconnected

_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.-]{1,128}")
Header = tuple[bytes, bytes]

encode_json = msgspec.json.Encoder().encode

CLOSE = (("connection", "close"),)
"""Who does not send what he announced is not listened to any longer."""
EVENT_STREAM_HEADERS: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx would collect the tokens
]


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this (lower-case) name."""
    headers: Iterable[Header] = scope["headers"]
    return next((value for key, value in headers if key == name), None)


def request_id(scope: Scope) -> str:
    """The client's x-request-id if it is sane, else a new one."""
    given = header(scope, b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return secrets.token_hex(16)


def caller(scope: Scope) -> str:
    """Who asks: the digest of the API key that was used, or "" where there are no keys."""
    return str(scope.get("tandem.caller", ""))


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises `ApiError` 413 or 408, and `ClientDisconnected`."""
    too_large = ApiError(413, f"The request body is larger than {max_bytes} bytes.", code="request_too_large")
    announced = header(scope, b"content-length")
    if announced is not None and announced.isdigit() and int(announced) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError as error:
        raise ApiError(
            408, "The request body did not arrive in time.", code="request_timeout", headers=CLOSE
        ) from error


def check_json(scope: Scope) -> None:
    """Raises `ApiError` 415 for a body that says it is something other than JSON."""
    kind = (header(scope, b"content-type") or b"application/json").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(
            415, "The request body must be JSON (content-type: application/json).", code="unsupported_media_type"
        )


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client hangs up. Only after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, status: int, body: Mapping[str, Any], headers: Iterable[tuple[str, str]] = ()) -> None:
    content = encode_json(body)
    start: list[Header] = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    start += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": content})


async def send_error(
    send: Send,
    error: ApiError,
    headers: Iterable[tuple[str, str]] = (),
    *,
    body: Mapping[str, Any] | None = None,
) -> None:
    """`body`: in another shape than the OpenAI API's."""
    await send_json(send, error.status, error.body() if body is None else body, [*headers, *error.headers])
