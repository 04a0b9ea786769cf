"""What an attempt to read from another worker ends with, whatever else breaks on the way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.workers.attempt import Attempt
from tandem.workers.errors import TransferError, WorkerUnavailable


class BrokenPeer:
    """Its link is being dropped: nothing can be sent, and who waits for answers was not told yet."""

    is_alive = True

    def send(self, message: object) -> None:
        raise WorkerUnavailable("the connection has ended")

    @contextlib.contextmanager
    def inbox(self, request_id: str) -> Iterator[asyncio.Queue[object]]:
        yield asyncio.Queue()


async def found(peer: Any) -> Any:
    return peer


@pytest.mark.parametrize("reason", [TransferError("wrong bytes", reason="digest"), asyncio.CancelledError()])
async def test_what_ended_it_is_told_though_nobody_can_be_told_to_stop(reason: BaseException) -> None:
    sequence: Any = None
    reader: Any = None
    attempt = Attempt("r0.0", sequence, reader)

    async def receive(peer: object, inbox: object) -> None:
        raise reason

    with pytest.raises(type(reason)) as raised:
        await attempt._converse(found(BrokenPeer()), receive)
    assert raised.value is reason
