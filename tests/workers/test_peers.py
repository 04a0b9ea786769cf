"""What somebody who waits for a peer's answer gets when the link ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.workers.errors import ProtocolError, WorkerUnavailable
from tandem.workers.peers import Peer
from tandem.workers.protocol import AnyMessage, Confirmed, Ping, Renewed
from tandem.workers.types import WorkerAddress

ADDRESS = WorkerAddress(worker_id="p0", epoch=1, role="prefill", host="127.0.0.1", port=1)


class Link:
    """A connection whose other end says what the test wants."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[AnyMessage | Exception] = asyncio.Queue()
        self.is_open = True

    async def receive(self) -> AnyMessage:
        said = await self.said.get()
        if isinstance(said, Exception):
            raise said
        return said

    def abort(self) -> None:
        self.is_open = False


def paired(link: Any) -> Peer:
    unused: Any = None
    return Peer(ADDRESS, link, unused, unused)


@pytest.mark.parametrize("end", [WorkerUnavailable("gone"), ProtocolError("rubbish"), Ping()])
async def test_an_end_is_told_to_all_who_wait(end: Any) -> None:
    link = Link()
    peer = paired(link)
    with peer.inbox("one") as one, peer.inbox("other") as other:
        for said in (Renewed(), Confirmed(request_id="other"), Confirmed(request_id="nobody"), end):
            link.said.put_nowait(said)
        async with asyncio.timeout(5):
            assert isinstance(await one.get(), WorkerUnavailable)
            assert await other.get() == Confirmed(request_id="other")
            assert isinstance(await other.get(), WorkerUnavailable)
    assert not link.is_open
    await peer.close()
    assert not peer.is_alive
    with peer.inbox("late") as late:
        assert isinstance(late.get_nowait(), WorkerUnavailable)


async def test_an_error_of_ours_leaves_nobody_waiting() -> None:
    link = Link()
    peer = paired(link)
    with peer.inbox("r") as inbox:
        link.said.put_nowait(ZeroDivisionError())
        async with asyncio.timeout(5):
            assert isinstance(await inbox.get(), WorkerUnavailable)
    with pytest.raises(ZeroDivisionError):
        await peer._reader
