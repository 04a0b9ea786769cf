"""`ray up deploy/ray/local.yaml`, for real: three machines reached over ssh, `tandem serve` as a job, stop, `ray down`.

Only addresses, user and key of the file are replaced. Every command of the runbook is run from a fourth machine, the
operator's. All of it happens in namespaces (hosts.py, ssh_hosts.py), because `ray stop`, which Ray's launcher calls,
ends by name whatever looks like Ray: a process of ours with such a name, outside, must outlive it. Takes two minutes on
a busy machine, so it runs when asked: `make test-hosts`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

if TYPE_CHECKING:
    from hosts import Host, Network, reason_to_skip
    from ssh_hosts import admit, is_apart, make_home, make_key, reason_to_skip_ssh
else:
    from hosts import Network, reason_to_skip
    from ssh_hosts import admit, is_apart, make_home, make_key, reason_to_skip_ssh

    Host = Any

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".ray-default"
"""What jobs need beside the lock; on real machines it is installed into .venv by the launch file."""


def why_not() -> str | None:
    if "RUN_HOST_TESTS" not in os.environ:
        return "takes two minutes: make test-hosts"
    if not PACKAGES.is_dir():
        return "no folder .ray-default: make test-hosts makes it"
    return reason_to_skip() or reason_to_skip_ssh()


REASON = why_not()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(600)]

MODEL = "smollm2-135m-instruct"
PROMPT = "The history of the city begins by the river. " * 12
SERVE = "tandem serve --config ~/.tandem/cluster.yaml"
SUBMIT = (
    "ray job submit --no-wait --submission-id tandem"
    """ --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}' -- """ + SERVE
)


class Machines:
    """Head, two workers, and the operator's own."""

    def __init__(self, network: Network, folder: Path) -> None:
        key = make_key(folder / "key")
        self.file = folder / "local.yaml"
        self.laptop, self.head, self.prefill, self.decode = (
            self._boot(network, folder, key, name) for name in ("laptop", "head", "prefill", "decode")
        )
        self.file.write_text(self.launch_file(key))
        self.url = f"http://{self.head.address}:8000"

    def _boot(self, network: Network, folder: Path, key: Path, name: str) -> Host:
        host = network.add_host(name)
        host.environment = dict(host.environment)
        home = make_home(folder / name, key, ROOT)
        (home / ".bashrc").touch()
        (home / ".tandem" / "ray-token").write_text("t" * 64)
        (home / ".tandem" / "role").write_text(name)
        if name == "head":
            (home / ".tandem" / "cluster.yaml").write_text(cluster_file())
        admit(host, home, PYTHONPATH=str(PACKAGES), OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0")
        return host

    def launch_file(self, key: Path) -> str:
        content = yaml.safe_load((ROOT / "deploy" / "ray" / "local.yaml").read_text())
        addresses = {"head_ip": self.head.address, "worker_ips": [self.prefill.address, self.decode.address]}
        content["provider"] |= addresses
        content["auth"] |= {"ssh_user": "root", "ssh_private_key": str(key)}
        return yaml.safe_dump(content)

    def ray(self, *arguments: str) -> str:
        return self.laptop.run("ray", *arguments, timeout_s=200)

    def on_head(self, command: str) -> str:
        """As an operator would: `ray exec`."""
        return self.ray("exec", str(self.file), command)

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def complete(self, max_tokens: int) -> list[str]:
        """The events of a streamed answer."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=90) as answer:
            return [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]


def cluster_file() -> str:
    """The file that the manifests mount, for a smaller model and smaller machines, without Redis."""
    settings = yaml.safe_load((ROOT / "deploy" / "k8s" / "base" / "cluster.yaml").read_text())
    settings |= {"model": MODEL, "prefill": 1, "decode": 1, "worker-threads": 1, "tuning-deadline": 0}
    settings |= {"kv-cache-memory-bytes": 200_000_000, "router-policy": "least-loaded", "host": "0.0.0.0"}
    settings |= {"cluster-key": "sixteen characters and more", "drain-timeout": 40}
    return yaml.safe_dump(settings)


def wait_until(question: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not question():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.5)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(PACKAGES),
        "PYTHONSAFEPATH": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with Network(tmp_path, environment) as network:
        yield Machines(network, tmp_path)


@pytest.fixture
def bystander(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process outside, of a name that `ray stop` looks for."""
    program = shutil.which("sleep")
    assert program is not None
    with subprocess.Popen([shutil.copy(program, tmp_path / "gcs_server"), "600"]) as process:
        yield process
        process.kill()


def test_from_ray_up_to_ray_down(machines: Machines, bystander: subprocess.Popen[bytes]) -> None:
    assert all(is_apart(host) for host in (machines.laptop, machines.head, machines.prefill, machines.decode))
    machines.ray("up", "-y", "--no-config-cache", str(machines.file))
    machines.on_head(SUBMIT)
    wait_until(machines.ready, 150)  # the other machines are started, too, in this time
    assert machines.complete(4)[-1] == "[DONE]"
    said = machines.on_head("tandem status")
    assert "prefill-0" in said
    assert "decode-0" in said
    stopping_the_job_drains_and_frees(machines)
    machines.ray("down", "-y", str(machines.file))
    assert not {"raylet", "gcs_server"} & set(machines.head.run("ps", "-eo", "comm=").split())
    assert bystander.poll() is None


def stopping_the_job_drains_and_frees(machines: Machines) -> None:
    events: list[str] = []
    asking = threading.Thread(target=lambda: events.extend(machines.complete(500)))
    asking.start()
    time.sleep(1)
    machines.on_head("ray job stop tandem")
    asking.join(timeout=90)
    assert events[-1] == "[DONE]", "what ran was finished"
    assert "error" not in json.loads(events[-2])
    assert not machines.ready()
    for host in (machines.prefill, machines.decode):
        wait_until(lambda host=host: "WorkerActor" not in host.run("ps", "-eo", "args="), 15)  # type: ignore[misc]
    assert "was stopped" in machines.on_head("ray job status tandem")
    assert "tandem" not in machines.head.run("ps", "-eo", "comm=").split()
