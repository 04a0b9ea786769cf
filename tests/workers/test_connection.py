"""What a connection makes of bytes that are no message."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.workers.connection import Connection
from tandem.workers.errors import ProtocolError
from tandem.workers.protocol import MAX_FRAME_BYTES, Cancel, encode


class DeafWriter:
    """Nothing is ever sent."""

    def get_extra_info(self, name: str) -> None:
        return None


def receiving(frame: bytes) -> Connection:
    reader, writer = asyncio.StreamReader(), DeafWriter()
    reader.feed_data(frame)
    reader.feed_eof()
    stream: Any = writer
    return Connection(reader, stream)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


async def test_a_message_arrives_as_it_was_sent() -> None:
    message = Cancel(request_id="r")
    assert await receiving(framed(encode(message))).receive() == message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",  # no MessagePack
        b"\x81\xa4type\xa7Unknown",
        b"\x82\xa4type\xa6Cancel\xa1x\xc0",  # a field that it does not have
        b"\x82\xa4type\xa6Cancel\xaarequest_id\xa1\xff",  # no UTF-8
        b"\x82\xa1x" + b"\x91" * 100_000 + b"\xc0\xa4type\xa6Cancel",  # deeper than anybody can follow
    ],
)
async def test_what_is_no_message_breaks_the_protocol(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        await receiving(framed(body)).receive()


async def test_a_frame_that_is_too_large_is_not_waited_for() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        await receiving((MAX_FRAME_BYTES + 1).to_bytes(4, "big")).receive()
