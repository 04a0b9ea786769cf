"""Ports and addresses of a cluster of several machines."""

from __future__ import annotations

import pytest

from tandem.cluster.network import check_worker_host, local_address, port_range
from tandem.workers.errors import UserError


@pytest.mark.parametrize(
    ("text", "ports"), [("7400-7402", [7400, 7401, 7402]), ("7400", [7400]), (None, [0]), (" 1-2 ", [1, 2])]
)
def test_port_ranges(text: str | None, ports: list[int]) -> None:
    assert list(port_range(text, "--ports")) == ports


@pytest.mark.parametrize("text", ["", "0", "5-4", "1-65536", "a-b", "1-2-3"])
def test_what_is_no_port_range(text: str) -> None:
    with pytest.raises(UserError, match="--ports must be a port or a range"):
        port_range(text, "--ports")


def test_addresses_of_this_machine() -> None:
    assert local_address("127.0.0.0/8") == "127.0.0.1"
    assert local_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UserError, match=r"--worker-host 203.0.113.0/24: .* has no address there"):
        local_address("203.0.113.0/24")
    for wrong in ("0.0.0.0", "::", "eth0", "10.0.0.0/99"):
        with pytest.raises(UserError):
            check_worker_host(wrong)
