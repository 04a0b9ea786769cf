"""What two ends of an NCCL or gloo link say to each other beside the data: frames over one TCP connection.

It carries questions and answers, and stands in for torch's rendezvous server: the two ranks find each other through a
store whose entries are sent as frames. (torch's own `TCPStore` listens on all interfaces without authentication, looks
up host names on every connect, and waits past its deadline when the server stands still.)
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import msgspec
import torch.distributed as distributed

_MAX_FRAME_BYTES = 16 << 20


class Join(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """First frame of a reader. `token` proves that it was given the source's description."""

    token: bytes


class Put(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """An entry of the shared store."""

    key: str
    value: bytes


class Ask(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The reader wants these blocks."""

    block_ids: list[int]


class Answer(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """None: the blocks follow through the group, in the order asked."""

    error: str | None = None


Frame = Join | Put | Ask | Answer
_decoder = msgspec.msgpack.Decoder(Frame)


def remaining_s(deadline: float) -> float:
    """Seconds until `deadline` on the monotonic clock, more than 0. Raises `TimeoutError` when it has passed."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


class Channel:
    """One connection. Blocking calls, for one thread at each end; `abort` may come from any thread.

    Raises `TimeoutError` past a deadline, other `OSError`s when the connection has ended.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = connected

    def send(self, frame: Frame, deadline: float) -> None:
        body = msgspec.msgpack.encode(frame)
        self._socket.settimeout(remaining_s(deadline))
        self._socket.sendall(len(body).to_bytes(4, "big") + body)

    def receive(self, deadline: float | None) -> Frame:
        length = int.from_bytes(self._receive_exactly(4, deadline), "big")
        if length > _MAX_FRAME_BYTES:
            raise ConnectionError(f"frame of {length} bytes, the limit is {_MAX_FRAME_BYTES}")
        try:
            return _decoder.decode(self._receive_exactly(length, deadline))
        except msgspec.DecodeError as error:
            raise ConnectionError("malformed frame") from error

    def is_open(self) -> bool:
        """Whether the peer's end still stands, as far as this host knows."""
        self._socket.setblocking(False)
        try:
            return self._socket.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def abort(self) -> None:
        """End the connection; calls in progress at both ends fail."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it had ended already

    def close(self) -> None:
        self.abort()
        self._socket.close()

    def _receive_exactly(self, length: int, deadline: float | None) -> bytes:
        body = bytearray()
        while len(body) < length:
            self._socket.settimeout(None if deadline is None else remaining_s(deadline))
            received = self._socket.recv(length - len(body))
            if not received:
                raise ConnectionError("the connection has ended")
            body += received
        return bytes(body)


class SharedStore(distributed.Store):  # type: ignore[misc, name-defined]
    """The key-value store in which two ranks of a group find each other, over their channel."""

    def __init__(self, channel: Channel, deadline: float) -> None:
        super().__init__()
        self._channel = channel
        self._deadline = deadline
        self._entries: dict[str, bytes] = {}
        self._lock = threading.RLock()

    def set(self, key: str, value: bytes | str) -> None:
        with self._lock:
            self._entries[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._channel.send(Put(key, self._entries[key]), self._deadline)

    def get(self, key: str) -> bytes:
        with self._lock:
            self.wait([key])
            return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self._lock:
            while not self.check(keys):
                frame = self._channel.receive(self._deadline)
                if not isinstance(frame, Put):
                    raise ConnectionError("a frame out of turn")
                self._entries[frame.key] = frame.value

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total = int(self._entries.get(key, b"0")) + amount
            self.set(key, str(total))
            return total
