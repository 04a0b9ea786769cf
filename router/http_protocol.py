"""The public port's HTTP protocol: uvicorn's, with limits that it does not have.

Headers have a size, and a time to arrive in; there is a number of connections beyond which new ones are turned away.
What is refused here is told in the API's shape and the connection is closed. Bodies are limited where they are read.

What a client does not read is bounded here, too: `max_unsent_bytes` in the kernel, a quarter of that in this process,
then writing waits. Offers `direct_write` to the application.

Offers to go on in another protocol (HTTP/2 without TLS, as Java's client makes with every request) are declined, and
the request is answered as it came. A client that hangs up while several of its requests wait is noticed by all of them.
A client that speaks HTTP/1.0 knows no chunks: its stream comes as it is and ends with the connection.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import dataclass
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tandem.router.direct_write import EXTENSION
from tandem.router.errors import ApiError
from tandem.router.http import encode_json

TCP_NOTSENT_LOWAT = 25
"""Linux's, which the socket module does not name."""
PATIENCE_S = 30.0
"""With clients that do not read, unless the application sets another."""
OFFER = {b"upgrade", b"http2-settings"}
"""Headers of an offer to go on in another protocol; `connection` names them."""
BEFORE_CHUNKS = ("0.9", "1.0")
"""Versions of HTTP."""
REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Unavailable"}


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """On by default."""

    max_header_bytes: int = 16 << 10
    """Of the URL and all headers of one request."""
    header_timeout_s: float = 10.0
    """From the connection, or the first byte of a further request on it, to the end of the headers."""
    max_connections: int = 16_384
    max_unsent_bytes: int = 4 << 10
    """Written for a client, and held back by the kernel since the client does not read: then writing waits. Enough for
    a network, where what is under way does not count. Small, so that a client that does not read is known as that
    before TCP_USER_TIMEOUT takes it for one that has vanished, even at ten tokens a second."""


def limited_protocol(limits: HttpLimits) -> type[asyncio.Protocol]:
    """The protocol with these limits, for `uvicorn.Config(http=...)`."""

    class Limited(LimitedProtocol):
        limits_of_server = limits

    return Limited


class LimitedProtocol(HttpToolsProtocol):
    """See the module."""

    limits_of_server = HttpLimits()

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._num_header_bytes = 0
        self._num_raw_bytes = 0
        """Read since a header began that has not ended: the parser tells of whole ones only."""
        self._has_ended_message = False
        """Within what is being read: then how much of that is the next header's, nobody knows."""
        self._cycles: list[RequestResponseCycle] = []
        """Requests that are not answered yet: the one that is being dealt with, and those pipelined behind it."""
        self._deadline: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._user_timeout_ms = 0
        """The connection's own, while writing waits and it has another."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._bound_unsent(transport)
        self._writer = _DirectWriter(transport)
        self._expect_headers()
        if len(self.connections) > self.limits_of_server.max_connections:
            message = "The server has as many connections as it can take. Please try again shortly."
            self._refuse(ApiError(503, message, type="server_error", code="overloaded", retry_after_s=1))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        self._writer.is_ready = False
        for cycle in self._cycles:  # uvicorn tells the last one only
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._has_ended_message = False
        self._parse(data)
        if self._deadline is not None and not self._is_refused and not self._has_ended_message:
            self._num_raw_bytes += len(data)
            self._check_size()

    def _parse(self, data: bytes) -> None:
        """As uvicorn does, but it takes the body of a request that offers another protocol for that protocol's."""
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while rest and not self._is_refused:
                try:
                    self.parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as offer:
                    rest = rest[offer.args[0] :]
                    self._decline_offer()
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _decline_offer(self) -> None:
        """The head that was read last, once more: without the offer, for a parser that expects a body behind it."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserError("we are no proxy")
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % each for each in map(_without_offer, self.headers) if each[1]]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = self._num_raw_bytes = 0
        self._expect_headers()

    def on_url(self, url: bytes) -> None:
        self._num_header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_header_bytes += len(name) + len(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._check_size()
        if not self._is_refused and not self.parser.should_upgrade():
            super().on_headers_complete()
            extensions: Any = self.scope.setdefault("extensions", {})
            extensions[EXTENSION] = self._writer
            self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """A request's turn has come. One of HTTP/1.0 is the last on its connection: uvicorn closes behind it."""
        knows_chunks = cycle.scope["http_version"] not in BEFORE_CHUNKS
        self._writer.writes_chunks = knows_chunks
        super()._start_asgi_task(cycle, app if knows_chunks else _until_closed(cycle, app))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writer.is_ready = False
        # a client that reads nothing is not one that has vanished, which is what the listener's timeout is for
        self._user_timeout_ms = _swap_user_timeout(self.transport, int(1e3 * self._writer.patience_s))

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writer.is_ready = True
        _swap_user_timeout(self.transport, self._user_timeout_ms)

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_ended_message = True
        if not self._is_refused and not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if not self._is_refused:
            self._refuse(ApiError(400, msg, code="invalid_http"))

    def _check_size(self) -> None:
        limit = self.limits_of_server.max_header_bytes
        if max(self._num_header_bytes, self._num_raw_bytes) > limit:
            message = f"The request's headers are larger than {limit} bytes."
            self._refuse(ApiError(431, message, code="headers_too_large"))

    def _bound_unsent(self, transport: asyncio.Transport) -> None:
        limit = self.limits_of_server.max_unsent_bytes
        transport.set_write_buffer_limits(high=limit // 4)
        connected = transport.get_extra_info("socket")
        if connected is not None and sys.platform == "linux":
            # without it the kernel takes megabytes for a client that does not read
            connected.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, limit)

    def _expect_headers(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(self.limits_of_server.header_timeout_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        if self._num_raw_bytes:
            self._refuse(ApiError(408, "The request's headers did not arrive in time.", code="request_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        self._is_refused = True
        self._stop_waiting()
        body = encode_json(error.body())
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        lines = [f"HTTP/1.1 {error.status} {REASONS[error.status]}"]
        lines += [f"{name}: {value}" for name, value in (*headers, *error.headers)]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        self.transport.close()


class _DirectWriter:
    """See `direct_write.DirectWriter`: what uvicorn's `send` does with a part of a body, and nothing else."""

    __slots__ = ("_transport", "is_ready", "patience_s", "writes_chunks")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.is_ready = True
        self.writes_chunks = True
        self.patience_s = PATIENCE_S
        self._transport = transport

    def num_unsent(self) -> int:
        return self._transport.get_write_buffer_size()

    def write(self, content: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(content), content) if self.writes_chunks else content)

    def abort(self) -> None:
        self._transport.abort()


def _until_closed(cycle: RequestResponseCycle, app: ASGIApp) -> Any:
    """The application, for a client that takes a body without a length to end with the connection. Any: uvicorn has
    types of its own for what Starlette has types for."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = False

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                # uvicorn expects what has no chunks to have a length: it is as long as it gets
                cycle.expected_content_length += len(message.get("body", b""))
            await send(message)

        cycle.waiting_for_100_continue = False  # nor does it know of answers before the answer
        await app(scope, receive, send_plain)

    return answer


def _without_offer(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """This header without its part in an offer of another protocol; an empty value where nothing else is left."""
    name, value = header
    if name == b"connection":
        options = [option.strip() for option in value.split(b",")]
        value = b", ".join(option for option in options if option.lower() not in OFFER)
    return name, b"" if name in OFFER else value


def _swap_user_timeout(transport: asyncio.Transport, milliseconds: int) -> int:
    """Sets TCP_USER_TIMEOUT, 0 being the system's own, and returns what it was."""
    connected = transport.get_extra_info("socket")
    if connected is None or sys.platform != "linux" or transport.is_closing():
        return 0
    before: int = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return before
