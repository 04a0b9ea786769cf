"""Several gateway processes behind one port: one is killed, one hangs, one cannot start, all are drained."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, models, pre_tokenizers

from tandem.cluster import backoff, gateway_process
from tandem.cluster.config import ClusterConfig
from tandem.cluster.gateway_child import ChildSettings
from tandem.cluster.gateway_pool import GatewayPool, bind_public, open_gateway
from tandem.cluster.listeners import bind, url_of
from tandem.cluster.redis_server import EmbeddedRedis
from tandem.cluster.status import gateway_lines
from tandem.router.config import GatewayConfig
from tandem.router.scripted_worker import Conversation, ScriptedWorker
from tandem.workers.errors import TandemError

WORDS = {"[UNK]": 0, **{str(number): number for number in range(1, 9)}}
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
FOREVER = 8
"""The last token of a prompt whose answer does not end by itself."""


def save_tokenizer(folder: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel(WORDS, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


async def answer(conversation: Conversation) -> None:
    conversation.start()
    if conversation.request.prompt_token_ids[-1] != FOREVER:
        conversation.say(conversation.chunk(0, (5, 6), "length"))
        return
    while True:
        conversation.say(conversation.chunk(0, (5,)))
        await asyncio.sleep(0.02)


class Site:
    """A pool of two, as its clients see it. Each client has a connection of its own: the kernel deals them out."""

    def __init__(self, pool: GatewayPool, url: str, admin_url: str) -> None:
        self.pool = pool
        self.url = url
        self.admin = httpx.AsyncClient(base_url=admin_url, timeout=60)

    async def ask(self, path: str, body: Any | None = None, *, request_id: str = "r") -> httpx.Response:
        headers = {"x-request-id": request_id}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60) as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    async def complete(self, request_id: str = "r") -> None:
        answered = await self.ask("/v1/completions", {"model": "m", "prompt": [1, 2]}, request_id=request_id)
        assert answered.status_code == 200, answered.text

    async def metrics(self) -> dict[Any, float]:
        text = (await self.admin.get("/metrics")).text
        families = text_string_to_metric_families(text)
        return {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }

    async def outcomes(self) -> dict[str, float]:
        """Checked to add up with what is in flight."""
        page = await self.metrics()
        counts = {name: page["tandem_requests_total", name] for name in ("ok", "failed", "cancelled", "rejected")}
        in_flight = page["tandem_requests_in_flight",]
        assert page["tandem_requests_started_total",] == sum(counts.values()) + in_flight
        return counts | {"in flight": in_flight}

    async def num_in_flight(self, number: int) -> float:
        """Of one process."""
        process = self.pool.processes[number]
        await process.refresh()
        family = next(each for each in process.latest if each.name == "tandem_requests_in_flight")
        return family.samples[0][2]


class Stream:
    """A stream without end, and whether it goes on."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=60)
        self.lines: list[str] = []
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        body = {"model": "m", "prompt": [1, FOREVER], "max_tokens": 100_000, "stream": True, "ignore_eos": True}
        async with self._client, self._client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line:
                    self.lines.append(line)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with contextlib.AsyncExitStack() as stack:
        redis = EmbeddedRedis(tmp_path)
        stack.push_async_callback(redis.stop)
        await redis.start()
        worker = ScriptedWorker("aggregated-0", "aggregated", answer, key=b"k" * 32)
        stack.push_async_callback(worker.stop)
        cluster = ClusterConfig(model="m", gateways=2, port=0, admin_port=0, aggregated=1, drain_timeout=0.5)
        config = GatewayConfig(
            model_name="m",
            tokenizer_folder=save_tokenizer(tmp_path),
            max_model_len=200_000,
            cluster_key=b"k" * 32,
            redis_url=redis.url,
            share_responses=True,
            num_aggregated=1,
        )
        public = stack.enter_context(bind_public(cluster))
        admin = stack.enter_context(bind("127.0.0.1", 0, flag="--admin-port"))
        pool = await open_gateway(config, cluster, public, admin, stack)
        assert isinstance(pool, GatewayPool)
        pool.workers.add(await worker.start())
        async with asyncio.timeout(60):
            await pool.wait_ready()
        site = Site(pool, url_of(public), url_of(admin))
        stack.push_async_callback(site.admin.aclose)
        yield site


async def until(question: Callable[[], Any], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            answered = question()
            if (await answered) if asyncio.iscoroutine(answered) else answered:
                return
            await asyncio.sleep(0.05)


async def test_two_processes_behind_one_port(site: Site) -> None:
    """One test, since processes take seconds to start: each part goes on where the one before it ended."""
    await both_answer_and_are_counted_once(site)
    await what_one_stores_the_other_finds(site)
    await one_that_is_killed_takes_only_its_own_with_it(site)
    await one_that_hangs_is_replaced(site)
    await all_drain(site)


async def both_answer_and_are_counted_once(site: Site) -> None:
    for number in range(16):
        await site.complete(f"request-{number}")
    assert await site.outcomes() == {"ok": 16, "failed": 0, "cancelled": 0, "rejected": 0, "in flight": 0}
    each = [process.latest for process in site.pool.processes]
    started = [{key[0]: value for family in families for key, value in family.values().items()} for families in each]
    assert all(values["tandem_requests_started_total"] > 0 for values in started), "the kernel deals them out"
    for number in range(16):
        trace = (await site.admin.get(f"/trace/request-{number}")).json()
        assert trace["request_id"] == f"request-{number}"
    assert (await site.admin.get("/trace/nobody's")).status_code == 404
    listed = (await site.admin.get("/cluster")).json()
    assert [worker["state"] for worker in listed["workers"]] == ["ready"]
    assert [(each["id"], each["state"], each["restarts"]) for each in listed["gateways"]] == [
        (0, "ready", 0),
        (1, "ready", 0),
    ]
    assert [line.split(":")[0] for line in gateway_lines(listed)] == ["gateway 0", "gateway 1"]
    assert (await site.admin.get("/ready")).status_code == 200
    for process in site.pool.processes:
        environ = psutil.Process(process.pid).environ()
        assert not any("kkkk" in value for value in (*environ.values(), *psutil.Process(process.pid).cmdline()))


async def what_one_stores_the_other_finds(site: Site) -> None:
    for _ in range(6):
        kept = (await site.ask("/v1/responses", {"model": "m", "input": "1 2", "max_output_tokens": 2})).json()
        found = await site.ask(f"/v1/responses/{kept['id']}")
        assert found.json() == kept
        again = {"model": "m", "input": "3", "previous_response_id": kept["id"]}
        assert (await site.ask("/v1/responses", again)).status_code == 200


async def one_that_is_killed_takes_only_its_own_with_it(site: Site) -> None:
    streams = [Stream(site.url) for _ in range(12)]
    await until(lambda: all(stream.lines for stream in streams))
    before = await site.outcomes()
    assert before["in flight"] == 12
    counts = [int(await site.num_in_flight(number)) for number in (0, 1)]
    assert all(counts)
    victim = site.pool.processes[0]
    pid = victim.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: sum(stream.task.done() for stream in streams) == counts[0])
    await until(lambda: not victim.is_ready)
    # new connections go to the other, at once
    for _ in range(12):
        await site.complete()
    rest = [stream for stream in streams if not stream.task.done()]
    seen = [len(stream.lines) for stream in rest]
    await until(lambda: all(len(stream.lines) > num for stream, num in zip(rest, seen)))
    assert await site.outcomes() == {
        "ok": before["ok"] + 12,
        "failed": counts[0],
        "cancelled": 0,
        "rejected": 0,
        "in flight": counts[1],
    }
    await until(lambda: victim.is_ready)
    assert victim.pid != pid
    assert len(rest) == counts[1]
    for stream in rest:
        assert not stream.task.done()
        stream.task.cancel()
    await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)
    await until(lambda: nothing_in_flight(site))
    assert (await site.outcomes())["cancelled"] == counts[1]


async def nothing_in_flight(site: Site) -> bool:
    return (await site.outcomes())["in flight"] == 0


async def one_that_hangs_is_replaced(site: Site) -> None:
    victim = site.pool.processes[1]
    assert victim.pid is not None
    victim.max_silence_s = 0.5
    os.kill(victim.pid, signal.SIGSTOP)
    await until(lambda: victim.num_ends == 1)
    assert victim.last_end == "killed by SIGKILL"
    victim.max_silence_s = gateway_process.MAX_SILENCE_S
    await until(lambda: victim.is_ready)


async def all_drain(site: Site) -> None:
    """Who streams is told; nobody is left."""
    stream = Stream(site.url)
    await until(lambda: stream.lines)
    processes = [psutil.Process(process.pid) for process in site.pool.processes]
    await site.pool.stop(drain_s=30)  # of which they take half a second, by their settings
    await asyncio.wait_for(stream.task, 30)
    assert "error" in stream.lines[-2]
    assert stream.lines[-1] == "data: [DONE]"
    assert not any(process.is_running() for process in processes)
    assert [process.exit_code for process in site.pool.processes] == [0, 0], "nobody had to be killed"


async def test_a_process_that_cannot_start_ends_the_start(tmp_path: Path) -> None:
    cluster = ClusterConfig(model="m", gateways=2, port=0, admin_port=0, aggregated=1)
    config = GatewayConfig(model_name="m", tokenizer_folder=save_tokenizer(tmp_path), max_model_len=100)
    settings = ChildSettings(
        gateway=msgspec.structs.replace(config, tokenizer_folder=tmp_path / "not there"),
        cluster=cluster,
        host="127.0.0.1",
        port=0,
        socket_path=str(tmp_path / "0.sock"),
        cluster_url="http://127.0.0.1:1",
    )
    worker = ScriptedWorker("aggregated-0", "aggregated", answer)
    pool = GatewayPool(config, [settings])
    pool.workers.add(await worker.start())
    await pool.start()
    with pytest.raises(TandemError, match="gateway 0 ended while it started: exit code 1"):
        async with asyncio.timeout(60):
            await pool.wait_ready()
    await pool.stop()
    await worker.stop()


async def test_a_machine_without_room_for_a_process_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GatewayConfig(model_name="m", tokenizer_folder=tmp_path, max_model_len=100)
    settings = ChildSettings(
        gateway=config,
        cluster=ClusterConfig(model="m", gateways=2),
        host="127.0.0.1",
        port=0,
        socket_path=str(tmp_path / "0.sock"),
        cluster_url="http://127.0.0.1:1",
    )
    process = gateway_process.GatewayProcess(0, settings, lambda families: None)

    def spawn() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(process, "_spawn", spawn)
    monkeypatch.setattr(backoff, "FIRST_PAUSE_S", 0.001)
    running = asyncio.create_task(process.run())
    await until(lambda: process.num_ends >= 2)
    assert process.last_end == "it cannot be started: [Errno 11] Resource temporarily unavailable"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await process.close()
