"""Limits below ASGI: headers that are too large, too slow, or too many connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from tandem.router.http import send_json
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
