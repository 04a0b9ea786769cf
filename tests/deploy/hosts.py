"""Machines that are not there: network namespaces joined by a bridge, each with processes and a host name of its own.

What runs on a host is a child of its first process (`unshare --kill-child`): ending that one is pulling the plug.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_networks = itertools.count()
NETWORK = "198.18.77.0/24"
"""Of the addresses that are set aside for testing networks."""
HERE = "198.18.77.254"
"""The machine that runs the tests, as the hosts see it."""


def reason_to_skip() -> str | None:
    """Why no hosts can be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "ip or unshare is not installed"
    probe = f"tandem-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    return None


@dataclass
class Host:
    """One machine. `run` and `spawn` work inside it."""

    name: str
    address: str
    init: subprocess.Popen[bytes]
    environment: dict[str, str]
    log: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, arguments: Sequence[str]) -> list[str]:
        # enters network, mounts, processes, host name; the child of nsenter is born in the new process namespace
        target = str(self.first_pid)
        return ["nsenter", "-t", target, "-n", "-m", "-p", "-u", "-i", "--", *arguments]

    @property
    def first_pid(self) -> int:
        """The host's process number 1, as we see it: the child of `unshare`."""
        children = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text().split()
        return int(children[0])

    def run(self, *arguments: str, timeout_s: float = 60) -> str:
        """Standard output of a command that must succeed."""
        done = subprocess.run(
            self.command(arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{self.name}: {' '.join(arguments)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def spawn(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command that goes on; what it says is in `log`."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self.command(arguments), env=self.environment | environment, stdout=log, stderr=log, cwd="/"
            )
        self.processes.append(process)
        return process

    def pull_the_plug(self) -> None:
        """End everything on it, at once."""
        with contextlib.suppress(ProcessLookupError):
            self.init.send_signal(signal.SIGKILL)
        self.init.wait()
        for process in self.processes:
            process.wait()


class Network:
    """A bridge and the hosts on it. Use as a context manager."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        # never the same again: the devices of a namespace that was deleted are there for a moment longer
        self._tag = f"t{os.getpid() % 100_000}x{next(_networks)}"
        self._num_made = 0
        self.hosts: list[Host] = []

    def __enter__(self) -> Network:
        self._ip("link", "add", self._bridge, "type", "bridge")
        self._ip("addr", "add", f"{HERE}/24", "dev", self._bridge)
        self._ip("link", "set", self._bridge, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.pull_the_plug()
        for number in range(1, self._num_made + 1):
            self._ip("netns", "delete", f"{self._tag}h{number}", must_work=False)
        self._ip("link", "delete", self._bridge, must_work=False)

    def add_host(self, name: str) -> Host:
        self._num_made += 1
        number = self._num_made
        space, outside, address = f"{self._tag}h{number}", f"{self._tag}v{number}", f"198.18.77.{number}"
        self._ip("netns", "add", space)
        self._ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        self._ip("link", "set", outside, "master", self._bridge, "up")
        self._ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        self._ip("-n", space, "link", "set", "eth0", "up")
        self._ip("-n", space, "link", "set", "lo", "up")
        host = Host(name, address, self._boot(space, name), self._environment, self._folder / f"{name}.log")
        self.hosts.append(host)
        self._wait_booted(host)
        return host

    def pull_the_cable(self, host: Host) -> None:
        """It lives on, and nothing that it sends arrives anywhere."""
        self._ip("link", "set", f"{self._tag}v{1 + self.hosts.index(host)}", "down")

    def _boot(self, space: str, name: str) -> subprocess.Popen[bytes]:
        # /tmp/ray of its own; and no host outlives ten minutes. Its first process is a shell that waits, so orphans are
        # reaped: `ray stop` waits for those that it has ended.
        first = f"mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && hostname {name} && {{ sleep 600 & wait; }}"
        apart = ["unshare", "--pid", "--ipc", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc"]
        return subprocess.Popen(["ip", "netns", "exec", space, *apart, "sh", "-c", first], cwd="/")

    def _wait_booted(self, host: Host) -> None:
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(IndexError, AssertionError, FileNotFoundError):
                if host.run("hostname").strip() == host.name:
                    return
            assert time.monotonic() < deadline, f"{host.name} does not come up"
            time.sleep(0.05)

    @property
    def _bridge(self) -> str:
        return f"{self._tag}br"

    def _ip(self, *arguments: str, must_work: bool = True) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not must_work, f"ip {' '.join(arguments)}: {done.stderr}"
