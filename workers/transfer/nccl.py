"""KV blocks over torch.distributed point-to-point: NCCL between GPUs, gloo between CPUs.

These transports have two sides, so "the reader pulls" takes a question and an answer. They travel over a small channel
of our own (`nccl_channel.py`); only blocks go through the link's two-rank group:

    reader                              source
    Join, Put... --------------------> one serving thread per link      (both ranks make the group)
    Ask: block ids ------------------> checks the ids
    <------------------------- Answer: None, or why not
    blocks, in pieces of 16 MiB <===== gathered, sent through the group

The question does not go through the group, because a posted receive cannot be called back: on a GPU it would occupy
it while idle, and on gloo only its timeout ends it. Received pieces are staged, so nothing lands late.
The data itself is neither authenticated nor encrypted by these libraries: trusted networks only.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as distributed

from tandem.workers.errors import TransferError, UserError
from tandem.workers.transfer.base import KVPoolMemory, check_pull, finish_copies, refused, undisturbed
from tandem.workers.transfer.nccl_channel import Answer, Ask, Channel, Join, Put, SharedStore, remaining_s

_PIECE_BYTES = 16 << 20
_SERVE_TIMEOUT_S = 30.0
"""A reader that takes longer than this to read one answer, or to join, loses its link."""
_PEER_CHECK_S = 0.05


class _Description(msgspec.Struct, frozen=True, tag="nccl", forbid_unknown_fields=True):
    host: str
    port: int
    token: bytes
    block_bytes: int
    num_blocks: int
    device: str


class NcclTransfer:
    """`Transfer` over torch.distributed, without a default process group."""

    name = "nccl"

    def __init__(self, pool: KVPoolMemory, *, host: str) -> None:
        if not distributed.is_available():
            raise UserError("--transfer nccl needs a torch with torch.distributed; choose another --transfer")
        self._pool = pool
        self._host = host
        self._links: dict[bytes, _Link] = {}
        self._server = _Server(pool, host)

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(self._server.description)

    async def pull(
        self, peer: bytes, remote_blocks: Sequence[int], local_blocks: Sequence[int], *, timeout_s: float
    ) -> None:
        deadline = time.monotonic() + timeout_s
        source = _decode(peer)
        check_pull(
            self._pool,
            remote_blocks,
            local_blocks,
            remote_num_blocks=source.num_blocks,
            remote_block_bytes=source.block_bytes,
        )
        if source.device != self._pool.blocks.device.type:
            raise refused(f"device differs: ours {self._pool.blocks.device.type}, theirs {source.device}")
        if local_blocks:
            await undisturbed(self._pull(peer, source, list(remote_blocks), list(local_blocks), deadline))

    def transport_of(self, peer: bytes) -> str:
        return "nccl" if self._pool.blocks.device.type == "cuda" else "gloo"

    async def forget(self, peer: bytes) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.leave()

    async def close(self) -> None:
        for peer in list(self._links):
            await self.forget(peer)
        await asyncio.get_running_loop().run_in_executor(None, self._server.close)

    async def _pull(
        self, peer: bytes, source: _Description, remote_blocks: list[int], local_blocks: list[int], deadline: float
    ) -> None:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = _Link(self._pool, source, self._host)
        try:
            await link.pull(remote_blocks, local_blocks, deadline)
        except TransferError as error:
            if error.reason != "refused" and self._links.get(peer) is link:
                await self.forget(peer)
            raise


class _Link:
    """The reader's end of one link: a thread, a channel to the source, a group of two. Pulls run one after another."""

    def __init__(self, pool: KVPoolMemory, source: _Description, host: str) -> None:
        self._source = source
        self._host = host
        self._blocks = _as_words(pool.blocks)
        self._thread = ThreadPoolExecutor(1, "transfer-nccl-link")
        self._channel: Channel | None = None
        self._group: _Group | None = None

    async def pull(self, remote_blocks: list[int], local_blocks: list[int], deadline: float) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._run, remote_blocks, local_blocks, deadline)

    def leave(self) -> None:
        """Give the link up. A pull in flight ends first, at its deadline at the latest."""
        self._thread.submit(self._drop)
        self._thread.shutdown(wait=False)

    def _run(self, remote_blocks: list[int], local_blocks: list[int], deadline: float) -> None:
        try:
            channel, group = self._join(deadline)
            answer = self._ask(channel, remote_blocks, deadline)
            if answer.error is not None:
                raise refused("the peer refused: " + answer.error)
            self._receive(group, local_blocks, deadline)
        except (RuntimeError, OSError) as error:  # torch raises the former, the channel the latter
            self._drop()
            if time.monotonic() >= deadline or isinstance(error, TimeoutError):
                raise TransferError("the peer did not answer in time", reason="timeout") from error
            raise TransferError("the connection to the peer has ended", reason="disconnect") from error

    def _join(self, deadline: float) -> tuple[Channel, _Group]:
        if self._channel is None or self._group is None:
            address = (self._source.host, self._source.port)
            self._channel = Channel(socket.create_connection(address, timeout=remaining_s(deadline)))
            self._channel.send(Join(self._source.token), deadline)
            self._group = _Group(self._channel, 1, self._host, self._blocks.device, deadline)
        return self._channel, self._group

    def _ask(self, channel: Channel, remote_blocks: list[int], deadline: float) -> Answer:
        channel.send(Ask(remote_blocks), deadline)
        while isinstance(frame := channel.receive(deadline), Put):
            continue  # an entry of the store that our side of the group had no use for
        if not isinstance(frame, Answer):
            raise ConnectionError("a frame out of turn")
        return frame

    def _receive(self, group: _Group, local_blocks: list[int], deadline: float) -> None:
        for piece in _pieces(local_blocks, self._source.block_bytes):
            staged = self._blocks.new_empty((len(piece), self._blocks.shape[1]))
            group.receive(staged, deadline)
            self._blocks.index_copy_(0, torch.tensor(piece, device=self._blocks.device), staged)
        finish_copies(self._blocks)

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._group is not None:
            self._group.close()
        self._channel = self._group = None


class _Server:
    """The source's end: a thread that accepts readers, and one thread per reader that serves it."""

    def __init__(self, pool: KVPoolMemory, host: str) -> None:
        self._blocks = _as_words(pool.blocks)
        self._listener = socket.create_server((host, 0), backlog=128)
        port = self._listener.getsockname()[1]
        self.description = _Description(
            host, port, secrets.token_bytes(16), pool.block_bytes, pool.num_blocks, pool.blocks.device.type
        )
        self._is_closing = False
        self._serving: dict[threading.Thread, Channel] = {}
        self._acceptor = threading.Thread(target=self._accept, name="transfer-nccl-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        self._is_closing = True
        socket.create_connection((self.description.host, self.description.port)).close()  # wakes the acceptor
        self._acceptor.join()
        self._listener.close()
        for thread, channel in list(self._serving.items()):
            channel.abort()
            thread.join(_SERVE_TIMEOUT_S)

    def _accept(self) -> None:
        while True:
            connected, _ = self._listener.accept()
            if self._is_closing:
                connected.close()
                return
            channel = Channel(connected)
            thread = threading.Thread(target=self._serve, args=(channel,), name="transfer-nccl-serve", daemon=True)
            self._serving[thread] = channel
            thread.start()

    def _serve(self, channel: Channel) -> None:
        group: _Group | None = None
        try:
            deadline = time.monotonic() + _SERVE_TIMEOUT_S
            frame = channel.receive(deadline)
            if isinstance(frame, Join) and hmac.compare_digest(frame.token, self.description.token):
                group = _Group(channel, 0, self.description.host, self._blocks.device, deadline)
                self._answer_all(channel, group)
        except (RuntimeError, OSError):
            return  # the reader is gone, or so slow that it has given this link up
        finally:
            channel.close()
            if group is not None:
                group.close()
            self._serving.pop(threading.current_thread(), None)

    def _answer_all(self, channel: Channel, group: _Group) -> None:
        while True:
            frame = channel.receive(None)
            if isinstance(frame, Put):
                continue
            if not isinstance(frame, Ask):
                return
            ids = frame.block_ids
            deadline = time.monotonic() + _SERVE_TIMEOUT_S
            if ids and not (min(ids) >= 0 and max(ids) < len(self._blocks)):
                channel.send(Answer("block out of range"), deadline)
                continue
            channel.send(Answer(), deadline)
            for piece in _pieces(ids, self.description.block_bytes):
                group.send(self._blocks.index_select(0, torch.tensor(piece, device=self._blocks.device)), deadline)


class _Group:
    """Two ranks and what they send each other. Blocking calls that keep a deadline. Raises torch's `RuntimeError`s."""

    def __init__(self, channel: Channel, rank: int, host: str, device: torch.device, deadline: float) -> None:
        self._peer = 1 - rank
        self._channel = channel
        self._waiter = ThreadPoolExecutor(1, "transfer-nccl-wait")
        self._uses_nccl = device.type == "cuda"
        # The group keeps the store; its deadline is that of joining.
        store = SharedStore(channel, deadline)
        self._group: Any = (
            distributed.ProcessGroupNCCL(store, rank, 2, distributed.ProcessGroupNCCL.Options())
            if self._uses_nccl
            else _gloo_group(store, rank, host, remaining_s(deadline))
        )

    def send(self, tensor: torch.Tensor, deadline: float) -> None:
        self._finish(self._group.send([tensor], self._peer, 0), deadline)

    def receive(self, tensor: torch.Tensor, deadline: float) -> None:
        self._finish(self._group.recv([tensor], self._peer, 0), deadline)

    def close(self) -> None:
        if self._uses_nccl:
            self._group.abort()
        self._waiter.shutdown(wait=False)
        del self._group

    def _finish(self, work: distributed.Work, deadline: float) -> None:
        """Wait for the work, the deadline, or the peer's death, which neither library reports in the middle of a
        message: gloo waits to its timeout (measured), NCCL without end. The channel knows at once."""
        waiting = self._waiter.submit(self._wait, work, deadline)
        while not wait([waiting], min(_PEER_CHECK_S, remaining_s(deadline))).done:
            if not self._channel.is_open():
                raise ConnectionError("the connection has ended")
        waiting.result()

    def _wait(self, work: distributed.Work, deadline: float) -> None:
        if not self._uses_nccl:
            work.wait(timedelta(seconds=max(remaining_s(deadline), 0.001)))
            return
        # NCCL's own wait only orders streams; the copy is over when the work says so.
        while not work.is_completed():
            remaining_s(deadline)
            time.sleep(0.0002)
        work.wait()


def _gloo_group(store: SharedStore, rank: int, host: str, timeout_s: float) -> distributed.ProcessGroupGloo:
    options: Any = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1
    options._timeout = timedelta(seconds=timeout_s)
    return distributed.ProcessGroupGloo(store, rank, 2, options)


def _decode(peer: bytes) -> _Description:
    try:
        source = msgspec.msgpack.decode(peer, type=_Description)
    except msgspec.DecodeError as error:
        raise refused("not the description of an NCCL worker") from error
    if not (0 < source.port < 1 << 16 and source.block_bytes > 0 and 0 <= source.num_blocks < 1 << 40):
        raise refused("the peer's description makes no sense")
    return source


def _as_words(blocks: torch.Tensor) -> torch.Tensor:
    """The same memory in wider elements: scattering rows of uint8 is 20 times slower than rows of int64."""
    return blocks.view(torch.int64) if blocks.shape[1] % 8 == 0 else blocks


def _pieces(block_ids: list[int], block_bytes: int) -> list[list[int]]:
    """Both sides cut the list in the same way."""
    step = max(1, _PIECE_BYTES // block_bytes)
    return [block_ids[start : start + step] for start in range(0, len(block_ids), step)]
