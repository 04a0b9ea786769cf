"""Limits below ASGI: headers that are too large, too slow, or too many connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from tandem.router.direct_write import direct_writer
from tandem.router.http import read_body, send_json
from tandem.router.http_protocol import HttpLimits, limited_protocol

GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
LIMITS = HttpLimits(max_header_bytes=2000, header_timeout_s=0.3, max_connections=3)


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, 200, {"path": scope["path"]})


@pytest.fixture
async def port(serving_on: Any) -> AsyncIterator[int]:
    async with serving_on(hello, limited_protocol(LIMITS)) as port:
        yield port


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    async with asyncio.timeout(3):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, json.loads(body)


def assert_refused(answered: tuple[int, dict[str, str], Any], status: int, code: str) -> None:
    assert answered[0] == status
    assert answered[1]["connection"] == "close"
    assert set(answered[2]["error"]) == {"message", "type", "param", "code"}
    assert answered[2]["error"]["code"] == code


async def test_ordinary_requests_pass_one_after_the_other(port: int) -> None:
    async with connected(port) as (reader, writer):
        for _ in range(3):
            writer.write(GET + b"x-some: " + b"y" * 1500 + b"\r\n\r\n")
            assert (await answer(reader))[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        GET + b"x-large: " + b"y" * 3000 + b"\r\n\r\n",
        GET + b"".join(b"x-%d: y\r\n" % number for number in range(400)) + b"\r\n",
        GET + b"x-large: " + b"y" * 3000,  # and never an end
        b"GET /" + b"y" * 3000 + b" HTTP/1.1\r\n\r\n",
    ],
)
async def test_headers_that_are_too_large(port: int, sent: bytes) -> None:
    async with connected(port) as (reader, writer):
        writer.write(sent)
        assert_refused(await answer(reader), 431, "headers_too_large")
        assert await reader.read() == b""


async def test_headers_that_come_slowly(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(GET)
        assert_refused(await answer(reader), 408, "request_timeout")
        assert await reader.read() == b""


async def test_a_connection_on_which_nothing_comes(port: int) -> None:
    async with connected(port) as (reader, _):
        assert await asyncio.wait_for(reader.read(), 3) == b""


async def test_a_request_that_waits_behind_another(port: int) -> None:
    """The deadline starts again with each request on a connection."""
    async with connected(port) as (reader, writer):
        writer.write(GET + b"\r\n")
        assert (await answer(reader))[0] == 200
        writer.write(GET)
        assert_refused(await answer(reader), 408, "request_timeout")


async def test_too_many_connections(port: int) -> None:
    async with connected(port), connected(port), connected(port), connected(port) as (reader, _):
        refused = await answer(reader)
        assert_refused(refused, 503, "overloaded")
        assert refused[1]["retry-after"] == "1"


async def test_what_is_not_http(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(b"\x16\x03\x01 hello\r\n\r\n")
        assert_refused(await answer(reader), 400, "invalid_http")


POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
"""As the HTTP client of Java's library sends it with every request."""


async def mirror(scope: Scope, receive: Receive, send: Send) -> None:
    body = await read_body(scope, receive, max_bytes=1 << 20, timeout_s=3)
    names = [name.decode() for name, _ in scope["headers"]]
    await send_json(send, 200, {"num_bytes": len(body), "headers": names})


@pytest.fixture
async def mirror_port(serving_on: Any) -> AsyncIterator[int]:
    async with serving_on(mirror, limited_protocol(LIMITS)) as port:
        yield port


@pytest.mark.parametrize(
    "body", [b"content-length: 5\r\n\r\nhello", b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"]
)
async def test_an_offer_of_another_protocol_costs_no_body(mirror_port: int, body: bytes) -> None:
    whole = POST + OFFER + body
    async with connected(mirror_port) as (reader, writer):
        for step in (len(whole), 1, 7):
            for start in range(0, len(whole), step):
                writer.write(whole[start : start + step])
                await writer.drain()
                await asyncio.sleep(0)
            status, headers, seen = await answer(reader)
            assert (status, seen["num_bytes"]) == (200, 5)
            assert "upgrade" not in seen["headers"]
            assert headers.get("connection") != "close"
        writer.write(whole * 20)  # pipelined
        for _ in range(20):
            assert (await answer(reader))[2]["num_bytes"] == 5


async def test_of_an_offer_the_rest_of_its_headers_counts(mirror_port: int) -> None:
    async with connected(mirror_port) as (reader, writer):
        writer.write(GET + b"connection: close, upgrade\r\nupgrade: h2c\r\n\r\n")
        _, headers, seen = await answer(reader)
        assert headers["connection"] == "close"
        assert seen["headers"] == ["host", "connection"]
        assert await reader.read() == b""


async def test_who_takes_us_for_a_proxy(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert_refused(await answer(reader), 400, "invalid_http")


async def test_a_body_is_no_part_of_the_headers_behind_it(mirror_port: int) -> None:
    async with connected(mirror_port) as (reader, writer):
        writer.write(POST + b"content-length: 5000\r\n\r\n" + b"x" * 5000 + b"GET / HTTP/1.1\r\nho")
        assert (await answer(reader))[2]["num_bytes"] == 5000
        writer.write(b"st: x\r\n\r\n")
        assert (await answer(reader))[0] == 200


async def test_a_client_that_hangs_up_is_noticed_by_all_of_its_requests(serving_on: Any) -> None:
    started, left = asyncio.Event(), asyncio.Event()

    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        started.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with serving_on(waiting, limited_protocol(LIMITS)) as port:
        async with connected(port) as (_, writer):
            writer.write((GET + b"\r\n") * 2)
            await asyncio.wait_for(started.wait(), 3)
        await asyncio.wait_for(left.wait(), 3)


async def parts(scope: Scope, receive: Receive, send: Send) -> None:
    """A body without a length, written in all the ways there are."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"one ", "more_body": True})
    writer = direct_writer(scope)
    assert writer is not None
    writer.write(b"two ")
    await send({"type": "http.response.body", "body": b"", "more_body": True})
    await send({"type": "http.response.body", "body": b"three"})


CHUNKS = b"4\r\none \r\n4\r\ntwo \r\n5\r\nthree\r\n0\r\n\r\n"


@pytest.mark.parametrize("asked_for", [b"", b"connection: keep-alive\r\n", b"expect: 100-continue\r\n"])
async def test_who_speaks_the_first_version_gets_no_chunks(serving_on: Any, asked_for: bytes) -> None:
    async with serving_on(parts, limited_protocol(LIMITS)) as port, connected(port) as (reader, writer):
        # behind a request of the second version, which does
        writer.write(GET + b"\r\n" + b"GET / HTTP/1.0\r\n" + asked_for + b"\r\n")
        first, *rest = (await asyncio.wait_for(reader.read(), 3)).split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert first.endswith(b"transfer-encoding: chunked\r\n\r\n" + CHUNKS)
        head, _, body = rest[0].partition(b"\r\n\r\n")
        assert (len(rest), body) == (1, b"one two three")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head


async def test_who_speaks_the_first_version_is_told_lengths(mirror_port: int) -> None:
    async with connected(mirror_port) as (reader, writer):
        writer.write(b"POST / HTTP/1.0\r\ncontent-length: 5\r\n\r\nhello")
        _, headers, seen = await answer(reader)
        assert (headers["connection"], seen["num_bytes"]) == ("close", 5)
        assert await reader.read() == b""
