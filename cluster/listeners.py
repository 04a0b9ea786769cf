"""Sockets for the public and the admin port, bound before anything else starts: a taken port costs the user no time.

    bind      a port that is ours alone
    reserve   a port that several processes of ours will share: bound, so that nobody else takes it, but deaf
    share     one of those processes: the kernel deals new connections out among all that listen there

A process that shares a port must have its socket to itself: when it dies, the kernel closes the socket and gives new
connections to the others. A copy of it in another process would keep it open, and they would wait there for nobody.
"""

from __future__ import annotations

import socket
import sys

from tandem.workers.errors import UserError

BACKLOG = 2048
"""Connections that wait to be accepted; the system's own limit holds, too (net.core.somaxconn)."""
USER_TIMEOUT_MS = 6_000
"""How long sent bytes may stay unacknowledged, and how long a silent client may leave probes unanswered. One that
vanishes (cable pulled, machine asleep) is noticed after this; after twice this where the first bytes for it are sent
just before. The system's own defaults are a quarter of an hour, and two hours."""
PROBE_AFTER_S = 3
PROBE_EVERY_S = 1
MAX_PROBES = 3
"""Three seconds of silence, then a probe each second: whoever has answered none of them by USER_TIMEOUT_MS is gone."""


def bind(host: str, port: int, *, flag: str) -> socket.socket:
    """A listening TCP socket. Raises `UserError` naming the flag. Connections inherit its options."""
    # bind alone lets a second process bind too (SO_REUSEADDR); listening makes the port ours
    return _bound(host, port, flag, is_shared=False, is_listening=True)


def reserve(host: str, port: int, *, flag: str) -> socket.socket:
    """A bound TCP socket that does not listen: the port belongs to this user's processes that `share` it, as long as it
    is open. Raises `UserError` naming the flag, also when others that share already listen there."""
    with bind(host, port, flag=flag) as probe:
        port = probe.getsockname()[1]
    try:
        # with SO_REUSEADDR, whoever sets that too could still take a port on which nobody listens
        return _bound(host, port, flag, is_shared=True, is_listening=False, may_reuse=False)
    except UserError:  # what earlier connections left behind (TIME_WAIT)
        return _bound(host, port, flag, is_shared=True, is_listening=False)


def share(host: str, port: int, *, flag: str) -> socket.socket:
    """One of several listening TCP sockets on a port that was reserved. Raises `UserError` naming the flag."""
    return _bound(host, port, flag, is_shared=True, is_listening=True)


def _bound(
    host: str, port: int, flag: str, *, is_shared: bool, is_listening: bool, may_reuse: bool = True
) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f"--host {host} is not an address of this machine") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, may_reuse)
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _notice_lost_clients(bound)
        bound.bind(address)
        if is_listening:
            bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise UserError(f"{flag} {port} cannot be used on {host}: {(error.strerror or str(error)).lower()}") from error
    bound.setblocking(False)
    return bound


def _notice_lost_clients(listener: socket.socket) -> None:
    """Accepted connections inherit all of this, on Linux."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a token must not wait for the one before it
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MAX_PROBES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine reaches it."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
