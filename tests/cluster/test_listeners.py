"""Ports: taken, shared, and what accepted connections inherit."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tandem.cluster.listeners import USER_TIMEOUT_MS, bind, reserve, share, url_of
from tandem.workers.errors import UserError

HOST = "127.0.0.1"


def port_of(bound: socket.socket) -> int:
    return int(bound.getsockname()[1])


def test_a_port_is_ours_once_it_is_bound() -> None:
    with bind(HOST, 0, flag="--port") as listener:
        port = port_of(listener)
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        for take in (bind, reserve):
            with pytest.raises(UserError, match=f"--port {port} cannot be used on 127.0.0.1: address already in use"):
                take(HOST, port, flag="--port")


@pytest.mark.parametrize("listen", [bind, share])
def test_accepted_connections_inherit_that_lost_clients_are_noticed(listen: Any) -> None:
    with listen(HOST, 0, flag="--port") as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            tcp = {
                name: accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_NODELAY")
            }
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
    assert tcp["TCP_USER_TIMEOUT"] == USER_TIMEOUT_MS
    assert tcp["TCP_NODELAY"] != 0
    probe_at_s = tcp["TCP_KEEPIDLE"]
    assert probe_at_s * 1000 < USER_TIMEOUT_MS, "the system gives up only after a probe"
    while probe_at_s * 1000 < USER_TIMEOUT_MS:
        probe_at_s += tcp["TCP_KEEPINTVL"]
    # silent until just before it would be given up, then sent something
    assert probe_at_s + USER_TIMEOUT_MS / 1000 <= 15


def test_a_reserved_port_is_deaf_and_shared_by_those_who_join() -> None:
    with reserve(HOST, 0, flag="--port") as reserved:
        port = port_of(reserved)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port))
        with pytest.raises(UserError, match="address already in use"):
            bind(HOST, port, flag="--port")
        with share(HOST, port, flag="--port") as first, share(HOST, port, flag="--port") as second:
            clients = [socket.create_connection((HOST, port)) for _ in range(32)]
            counts = [num_accepted(first), num_accepted(second)]
            first.close()
            after = [socket.create_connection((HOST, port)) for _ in range(8)]
            assert num_accepted(second) == 8, "whoever is left gets all"
            for client in (*clients, *after):
                client.close()
        assert sum(counts) == 32
        assert all(counts), "the kernel deals them out"


def test_others_that_share_a_port_are_noticed() -> None:
    with (
        reserve(HOST, 0, flag="--port") as reserved,
        share(HOST, port_of(reserved), flag="--port"),
        pytest.raises(UserError, match="address already in use"),
    ):
        reserve(HOST, port_of(reserved), flag="--port")


def num_accepted(listener: socket.socket) -> int:
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1
