"""Addresses and ports of a cluster of several machines. Pure, but for `local_address`, which reads the interfaces.

A worker binds the address that it announces: nobody else's interface listens, and nothing that others cannot reach is
ever told to them.
"""

from __future__ import annotations

import ipaddress
import re
import socket

import psutil

from tandem.workers.errors import UserError

_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
LOOPBACK = "127.0.0.1"


def port_range(text: str | None, flag: str) -> range:
    """`7400-7499` or `7400`; None is range(0, 1): any port. Raises `UserError` naming the flag."""
    if text is None:
        return range(1)
    match = _PORTS.fullmatch(text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= 65535:
        raise UserError(f"{flag} must be a port or a range such as 7400-7499, but is {text!r}")
    return range(first, last + 1)


def check_worker_host(text: str) -> None:
    """An address, or a network in which each machine has one. Raises `UserError`."""
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise UserError(f"--worker-host must be an address or a network such as 10.0.0.0/8, but is {text!r}") from error
    if network.num_addresses == 1 and network.network_address.is_unspecified:
        raise UserError(
            f"--worker-host {text} cannot be announced to others; give the network that they share, such as 10.0.0.0/8"
        )


def local_address(wanted: str) -> str:
    """This machine's address in the network `wanted` (an address is a network of one). Raises `UserError`."""
    network = ipaddress.ip_network(wanted, strict=False)
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                found = address.address.partition("%")[0]
                if ipaddress.ip_address(found) in network:
                    return found
    raise UserError(f"--worker-host {wanted}: {socket.gethostname()} has no address there")
