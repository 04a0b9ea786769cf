"""Hosts that are reached over ssh: an sshd, a home folder and a key of their own, nothing of this machine's.

Each runs inside the host's namespaces (hosts.py): port 22 there is nobody else's, and a command that ends processes by
name, as `ray stop` does, finds and reaches those of that host only.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cluster.model_cache import cache_folder

if TYPE_CHECKING:
    from hosts import Host
else:
    Host = Any

SSHD = Path("/usr/sbin/sshd")
GATEWAY = "198.18.77.254"
"""The bridge: Ray asks for the way to the internet in order to learn its own address. Nothing is sent."""


def reason_to_skip_ssh() -> str | None:
    return None if SSHD.exists() else "sshd is not installed (Debian: apt install openssh-server)"


def make_key(file: Path) -> Path:
    """A key pair without a passphrase; the public half is beside it, with .pub."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)
    return file


def make_home(folder: Path, key: Path, checkout: Path) -> Path:
    """What an operator has on each machine: the checkout, the token, the model, a key that opens the door."""
    (folder / ".cache").mkdir(parents=True)
    (folder / ".tandem").mkdir(mode=0o700)
    (folder / ".cache" / "tandem").symlink_to(cache_folder())
    (folder / "tandem").symlink_to(checkout)
    (folder / "authorized_keys").write_text(key.with_name(key.name + ".pub").read_text())
    return folder


def admit(host: Host, home: Path, **environment: str) -> None:
    """Make `home` the home of root on that host, and let sshd listen on its port 22. `environment` is that of every
    session."""
    users = home / "passwd"
    users.write_text(f"root:*:0:0:root:{home}:/bin/bash\nsshd:*:110:65534::/run/sshd:/usr/sbin/nologin\n")
    host_key = make_key(home / "host_key")
    settings = {
        "ListenAddress": host.address,
        "HostKey": str(host_key),
        "AuthorizedKeysFile": str(home / "authorized_keys"),
        "PidFile": str(home / "sshd.pid"),
        "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "UsePAM": "no",
        "StrictModes": "no",  # folders above belong to the tests
        "SetEnv": " ".join(f'"{name}={value}"' for name, value in environment.items()),
    }
    config = home / "sshd_config"
    config.write_text("".join(f"{name} {value}\n" for name, value in settings.items() if value))
    host.run("ip", "route", "add", "default", "via", GATEWAY)
    host.run("mount", "--bind", str(users), "/etc/passwd")  # in this host's view of the files only
    host.run("sh", "-c", "mkdir -p /run && mount -t tmpfs tmpfs /run && mkdir -m 0755 /run/sshd")
    host.environment["HOME"] = str(home)
    host.spawn(str(SSHD), "-D", "-e", "-f", str(config))
    wait_for_sshd(host)


def wait_for_sshd(host: Host) -> None:
    deadline = time.monotonic() + 10
    while ":0016 " not in "".join(
        line for line in host.run("cat", "/proc/net/tcp").splitlines() if line.split()[3] == "0A"
    ):
        assert time.monotonic() < deadline, f"sshd does not listen:\n{host.log.read_text()}"
        time.sleep(0.05)


def is_apart(host: Host) -> bool:
    """Whether processes of the host see themselves only, and not those of this machine."""
    here, there = os.readlink("/proc/self/ns/pid"), host.run("readlink", "/proc/self/ns/pid").strip()
    seen = host.run("sh", "-c", "echo /proc/[0-9]*").split()
    return here != there and str(os.getpid()) not in {Path(folder).name for folder in seen[1:]} and len(seen) < 100
