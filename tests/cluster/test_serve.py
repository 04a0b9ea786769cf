"""`tandem serve` as a user meets it: real Ray, NIXL and Redis, the real client, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import httpx
import openai
import psutil
import pytest

if TYPE_CHECKING:
    from conftest import Serving
else:
    Serving = Any

pytestmark = pytest.mark.cluster

TANDEM = [sys.executable, "-P", "-c", "from tandem.cluster.cli import main; main()"]
LONG_PROMPT = "The history of the city begins in a small village by the river. " * 20


def wait_until(question: Callable[[], bool], timeout_s: float) -> float:
    """Seconds until the answer was yes; fails after `timeout_s`."""
    began = time.monotonic()
    while not question():
        assert time.monotonic() - began < timeout_s, "waited in vain"
        time.sleep(0.05)
    return time.monotonic() - began


def running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    alive = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except psutil.NoSuchProcess:
            continue
    return alive


@pytest.fixture(scope="module")
def second(serving: Serving, start_serving: Callable[..., Serving]) -> Serving:
    """Another cluster on the same machine, for the tests that break things. In the order in which they are written."""
    return start_serving()


def test_the_openai_client_talks_to_it(serving: Serving) -> None:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [serving.model]
        question: Any = [{"role": "user", "content": "What is the capital of France?"}]
        whole = client.chat.completions.create(model=serving.model, messages=question, temperature=0, max_tokens=20)
        assert "Paris" in (whole.choices[0].message.content or "")
        stream = client.chat.completions.create(
            model=serving.model, messages=question, temperature=0, max_tokens=20, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content


def test_a_long_prompt_is_read_by_one_worker_and_answered_by_another(serving: Serving) -> None:
    answer = serving.complete(f"{time.time_ns()} {LONG_PROMPT}")
    assert answer.status_code == 200
    assert answer.headers["x-tandem-prefill-worker"] == "prefill-0"
    assert answer.headers["x-tandem-decode-worker"] == "decode-0"


def test_ready_cluster_and_metrics(serving: Serving) -> None:
    for url in (serving.url, serving.admin_url):
        assert httpx.get(f"{url}/ready").status_code == 200
        assert httpx.get(f"{url}/live").status_code == 200
    cluster = serving.cluster()
    assert cluster["model"] == serving.model
    assert cluster["redis"] == {"up": True}
    assert [(worker["id"], worker["role"], worker["epoch"]) for worker in cluster["workers"]] == [
        ("decode-0", "decode", 0),
        ("prefill-0", "prefill", 0),
    ]
    for worker in cluster["workers"]:
        blocks = worker["blocks"]
        assert blocks["total"] == sum(count for state, count in blocks.items() if state != "total") > 0
        assert psutil.Process(worker["pid"]) in serving.descendants()
    metrics = httpx.get(f"{serving.admin_url}/metrics").text
    assert 'tandem_requests_total{outcome="ok"}' in metrics
    assert "tandem_prefix_index_up 1.0" in metrics
    assert httpx.get(f"{serving.url}/metrics").status_code == 404  # the public port does not tell


def test_it_listens_on_loopback_only(serving: Serving) -> None:
    listening = {
        (process.name(), connection.laddr.ip)
        for process in [psutil.Process(serving.pid), *serving.descendants()]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening
    assert {ip for _, ip in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, listening


def test_only_this_user_may_enter_its_folder(serving: Serving) -> None:
    (folder,) = {process.cwd() for process in serving.descendants() if "tandem-" in process.cwd()}
    assert os.stat(folder).st_mode & 0o077 == 0


def test_workers_have_one_thread_to_compute_and_do_not_spin(serving: Serving) -> None:
    for worker in serving.cluster()["workers"]:
        process = psutil.Process(worker["pid"])
        before = sum(process.cpu_times()[:2])
        time.sleep(2.0)
        assert sum(process.cpu_times()[:2]) - before < 0.4  # an idle worker


def test_blocks_are_published(serving: Serving) -> None:
    prompt = f"{time.time_ns()} {LONG_PROMPT}"
    serving.complete(prompt)
    again = serving.complete(prompt)
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_status_and_chat_commands(serving: Serving) -> None:
    status = tandem("status", "--url", serving.admin_url)
    assert "prefill-0" in status.stdout
    assert "decode-0" in status.stdout
    assert serving.model in status.stdout
    chat = tandem("chat", "--url", serving.url, "--temperature", "0", stdin="What is the capital of France?\n")
    assert "Paris" in chat.stdout


def test_two_clusters_live_side_by_side(serving: Serving, second: Serving) -> None:
    assert serving.url != second.url
    for each in (serving, second):
        assert each.complete("Once upon a time").status_code == 200
    assert not {process.pid for process in serving.descendants()} & {process.pid for process in second.descendants()}


@pytest.mark.parametrize("worker_id", ["prefill-0", "decode-0"])
def test_a_killed_worker_comes_back_and_is_used(second: Serving, worker_id: str) -> None:
    before = second.worker(worker_id)
    assert before is not None
    os.kill(before["pid"], signal.SIGKILL)
    wait_until(lambda: (second.worker(worker_id) or before)["pid"] != before["pid"] or is_away(second, worker_id), 2)
    wait_until(lambda: (second.worker(worker_id) or {"state": None})["state"] == "ready", 60)
    after = second.worker(worker_id)
    assert after is not None
    assert (after["epoch"], after["state"]) == (before["epoch"] + 1, "ready")
    wait_until(lambda: httpx.get(f"{second.url}/ready").status_code == 200, 30)
    told = "".join(second.lines).partition(f"{worker_id} epoch {before['epoch']} has ended: ")[2]
    assert told.splitlines()[1].startswith("  | "), "what its process wrote last"

    def is_used() -> bool:
        answer = second.complete(f"{time.time_ns()} {LONG_PROMPT}")
        assert answer.status_code == 200
        return {answer.headers["x-tandem-prefill-worker"], answer.headers["x-tandem-decode-worker"]} == {
            "prefill-0",
            "decode-0",
        }

    wait_until(is_used, 30)


def is_away(serving: Serving, worker_id: str) -> bool:
    worker = serving.worker(worker_id)
    return worker is None or worker["state"] != "ready"


def test_sigterm_ends_everything_and_only_that(serving: Serving, second: Serving) -> None:
    processes = second.descendants()
    others = serving.descendants()
    folders = {process.cwd() for process in processes if "tandem-" in process.cwd()}
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(timeout=10) == 0
    wait_until(lambda: not running(processes), 10)
    assert len(folders) == 1
    assert not any(os.path.exists(folder) for folder in folders)
    assert running(others) == others
    assert serving.complete("Still here?").status_code == 200


@pytest.mark.parametrize(("num_signals", "code"), [(1, 0), (2, 130)])
def test_a_signal_while_it_starts_ends_it(serving: Serving, num_signals: int, code: int) -> None:
    """One signal undoes what was done; two end it at once, and the guard sees to the rest."""
    command = [*TANDEM, "serve", serving.model, "--port", "0", "--admin-port", "0", "--tuning-deadline", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        children: list[psutil.Process] = []

        def is_starting_ray() -> bool:
            children[:] = psutil.Process(process.pid).children(recursive=True)
            return any(child.name() == "gcs_server" for child in children)

        wait_until(is_starting_ray, 60)
        for _ in range(num_signals):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.2)
        assert process.wait(timeout=60) == code
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not running(children), 20)


def test_a_taken_port_is_one_line(serving: Serving) -> None:
    port = serving.url.rpartition(":")[2]
    done = tandem("serve", serving.model, "--port", port, "--admin-port", "0", code=2)
    assert done.stderr.strip() == f"tandem: --port {port} cannot be used on 127.0.0.1: address already in use"


def tandem(*arguments: str, stdin: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*TANDEM, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "160"},
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done
