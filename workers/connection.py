"""One authenticated stream of messages between two processes, over TCP. Both ends are here; so is the handshake.

Used by gateways (through `client.py`), by workers towards each other, and by `server.py`.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from typing import TypeVar

import msgspec

from tandem.workers import protocol
from tandem.workers.errors import AuthenticationError, ProtocolError, WorkerUnavailable
from tandem.workers.protocol import MAX_FRAME_BYTES, PROTOCOL_VERSION, Challenge, Hello, Message, Welcome
from tandem.workers.types import ModelIdentity, WorkerAddress

HANDSHAKE_TIMEOUT_S = 5.0
MAX_UNSENT_BYTES = 64 << 20
"""A peer that leaves this much unread is treated as gone; otherwise it would hold our memory."""

ExpectedMessage = TypeVar("ExpectedMessage", bound=Message)


class Connection:
    """Messages in, messages out. `send` never waits; `receive` raises `WorkerUnavailable` when the stream has ended."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.identity: ModelIdentity | None = None
        """The model that the server at the other end serves; None on the server's own end."""
        connected = writer.get_extra_info("socket")
        if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def is_open(self) -> bool:
        return not self._writer.is_closing()

    def send(self, message: Message) -> None:
        """Queue one message. Raises `WorkerUnavailable` if the stream has ended, `ProtocolError` if it is too large."""
        body = protocol.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise ProtocolError(f"{type(message).__name__} has {len(body)} bytes, the limit is {MAX_FRAME_BYTES}")
        if self._writer.is_closing():
            raise WorkerUnavailable("the connection has ended")
        self._writer.write(len(body).to_bytes(4, "big") + body)
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.abort()
            raise WorkerUnavailable("the peer does not read")

    def post(self, message: Message) -> bool:
        """Like `send`, but a stream that has ended is no error: its end is noticed by whoever receives. False then."""
        try:
            self.send(message)
        except WorkerUnavailable:
            return False
        return True

    async def receive(self) -> protocol.AnyMessage:
        try:
            length = int.from_bytes(await self._reader.readexactly(4), "big")
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"frame of {length} bytes, the limit is {MAX_FRAME_BYTES}")
            body = await self._reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerUnavailable("the connection has ended") from error
        try:
            return protocol.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"malformed message: {error}") from error

    async def receive_expected(self, kind: type[ExpectedMessage]) -> ExpectedMessage:
        message = await self.receive()
        if not isinstance(message, kind):
            raise ProtocolError(f"expected {kind.__name__}, got {type(message).__name__}")
        return message

    def abort(self) -> None:
        """End the stream at once, dropping what is unsent."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Send what is queued, then end the stream."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return  # the peer was faster


async def connect(
    address: WorkerAddress, *, key: bytes, peer: str, timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> Connection:
    """Open a connection to exactly this incarnation of a worker.

    Raises `WorkerUnavailable` if nobody, or another worker or epoch, listens there, `AuthenticationError` if the server
    does not hold the key, `ProtocolError` on another protocol version.
    """
    connection: Connection | None = None
    try:
        async with asyncio.timeout(timeout_s):
            connection = Connection(*await asyncio.open_connection(address.host, address.port))
            welcome = await _introduce(connection, key, peer)
            connection.identity = welcome.identity
        if (welcome.address.worker_id, welcome.address.epoch) != (address.worker_id, address.epoch):
            raise WorkerUnavailable(f"worker {address.worker_id} epoch {address.epoch} is no longer at its address")
    except (OSError, TimeoutError) as error:
        if connection is not None:
            connection.abort()
        raise WorkerUnavailable(f"worker {address.worker_id} does not answer") from error
    except BaseException:
        if connection is not None:
            connection.abort()
        raise
    return connection


async def _introduce(connection: Connection, key: bytes, peer: str) -> Welcome:
    challenge = await connection.receive_expected(Challenge)
    nonce = secrets.token_bytes(16)
    proof = _proof(key, b"client", challenge.nonce, nonce)
    connection.send(Hello(protocol_version=PROTOCOL_VERSION, peer=peer, nonce=nonce, proof=proof))
    try:
        welcome = await connection.receive_expected(Welcome)
    except WorkerUnavailable as error:
        raise WorkerUnavailable("it hung up when we introduced ourselves: is the cluster key the same?") from error
    if welcome.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol_version differs: ours {PROTOCOL_VERSION}, theirs {welcome.protocol_version}")
    if not hmac.compare_digest(welcome.proof, _proof(key, b"server", nonce, challenge.nonce)):
        raise AuthenticationError("the server does not hold the cluster key")
    return welcome


async def accept(connection: Connection, address: WorkerAddress, identity: ModelIdentity, *, key: bytes) -> str:
    """The server's half of the handshake; returns the peer's name. Raises `ProtocolError` or `WorkerUnavailable`."""
    nonce = secrets.token_bytes(16)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            connection.send(Challenge(nonce=nonce))
            hello = await connection.receive_expected(Hello)
    except TimeoutError as error:
        raise WorkerUnavailable("the peer did not introduce itself in time") from error
    if not hmac.compare_digest(hello.proof, _proof(key, b"client", nonce, hello.nonce)):
        raise AuthenticationError("a peer without the cluster key was turned away")
    connection.send(
        Welcome(
            protocol_version=PROTOCOL_VERSION,
            address=address,
            identity=identity,
            proof=_proof(key, b"server", hello.nonce, nonce),
        )
    )
    if hello.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol_version differs: ours {PROTOCOL_VERSION}, theirs {hello.protocol_version}")
    return hello.peer


def _proof(key: bytes, side: bytes, first_nonce: bytes, second_nonce: bytes) -> bytes:
    return hmac.digest(key, side + first_nonce + second_nonce, "sha256")
