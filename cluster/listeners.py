"""Sockets for the public and the admin port, bound before anything else starts: a taken port costs the user no time."""

from __future__ import annotations

import socket
import sys

from tandem.workers.errors import UserError

USER_TIMEOUT_MS = 10_000
"""How long sent bytes may stay unacknowledged. Without it a client that vanished is noticed after minutes."""


def bind(host: str, port: int, *, flag: str) -> socket.socket:
    """A bound TCP socket, not listening yet. Raises `UserError` naming the flag. Connections inherit its options."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f"--host {host} is not an address of this machine") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _notice_lost_clients(listener)
        listener.bind(address)
        # bind alone lets a second process bind too (SO_REUSEADDR); listening makes the port ours
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise UserError(f"{flag} {port} cannot be used on {host}: {(error.strerror or str(error)).lower()}") from error
    listener.setblocking(False)
    return listener


def _notice_lost_clients(listener: socket.socket) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine reaches it."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
