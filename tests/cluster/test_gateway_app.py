"""One more gateway: it lists whom the launcher lists, and keeps them while the launcher is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from tandem.cluster.following import ClusterAnswer, LauncherSight, Listed, apply_list, fetch, follow
from tandem.cluster.gateway_app import run_gateway
from tandem.router import health
from tandem.router import workers as router_workers
from tandem.router.config import GatewayConfig
from tandem.router.scripted_worker import ScriptedWorker
from tandem.router.workers import WorkerSet
from tandem.workers.errors import UserError


@pytest.fixture
async def workers() -> AsyncIterator[WorkerSet]:
    live_set = WorkerSet(key=b"key", peer="gateway")
    yield live_set
    await live_set.close()


def listed(worker_id: str, epoch: int, port: int = 1) -> Listed:
    return Listed(id=worker_id, role="decode", epoch=epoch, address=f"127.0.0.1:{port}")


def state(workers: WorkerSet) -> list[tuple[str, int, int]]:
    return [(link.worker_id, link.address.epoch, link.address.port) for link in workers.links()]


async def test_the_list_is_followed(workers: WorkerSet) -> None:
    apply_list(workers, (listed("decode-0", 1), listed("decode-1", 1)))
    link = workers.links()[0]
    apply_list(workers, (listed("decode-0", 1), listed("decode-2", 1)))
    assert state(workers) == [("decode-0", 1, 1), ("decode-2", 1, 1)]
    assert workers.links()[0] is link, "whoever stays is left alone"
    apply_list(workers, (listed("decode-0", 2), listed("decode-2", 1)))
    assert state(workers) == [("decode-0", 2, 1), ("decode-2", 1, 1)]


async def test_a_worker_that_the_launcher_refuses_is_none_of_ours(workers: WorkerSet) -> None:
    """Otherwise this gateway might take the other half of a mixed cluster."""
    stranger = msgspec.structs.replace(listed("decode-1", 1), state="refused")
    apply_list(workers, (listed("decode-0", 1), stranger))
    assert state(workers) == [("decode-0", 1, 1)]
    apply_list(workers, (msgspec.structs.replace(listed("decode-0", 1), state="refused"), listed("decode-1", 1)))
    assert state(workers) == [("decode-1", 1, 1)]


async def test_a_launcher_that_begins_anew_is_believed(workers: WorkerSet) -> None:
    apply_list(workers, (listed("decode-0", 5),))
    apply_list(workers, (listed("decode-0", 0, port=2),))
    assert state(workers) == [("decode-0", 0, 2)]


async def test_while_the_launcher_is_away_its_workers_stay(workers: WorkerSet) -> None:
    answers: list[Any] = [
        {"model": "m", "max_model_len": 8, "workers": [msgspec.to_builtins(listed("decode-0", 1))]},
        None,
        {"something": "else"},
    ]
    num_asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_asked
        assert request.url.path == "/cluster"
        given = answers[min(num_asked, len(answers) - 1)]
        num_asked += 1
        return httpx.Response(503) if given is None else httpx.Response(200, json=given)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://launcher") as client:
        following = asyncio.create_task(follow(client, workers, poll_s=0.001))
        async with asyncio.timeout(5):
            while num_asked < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert state(workers) == [("decode-0", 1, 1)]


async def test_what_is_missing_at_the_launcher_is_told_on(workers: WorkerSet) -> None:
    body: dict[str, Any] = {"model": "m", "max_model_len": 8, "workers": []}
    away = "Ray's head is away: lost workers are not replaced"
    now: list[dict[str, Any] | None] = [body]

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503) if now[0] is None else httpx.Response(200, json=now[0])

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://launcher") as client:
        sight = LauncherSight()
        following = asyncio.create_task(follow(client, workers, poll_s=0.001, sight=sight))
        for now[0], expected, is_draining in (
            (body | {"degraded": [away]}, [away], False),
            (body | {"degraded": [], "draining": True}, [], True),
            (None, ["the launcher does not answer: lost workers are not replaced"], False),
            (body | {"degraded": []}, [], False),
        ):
            async with asyncio.timeout(5):
                while (sight.reasons(), sight.is_draining()) != (expected, is_draining):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_what_the_launcher_shows_is_what_gateways_read(workers: WorkerSet) -> None:
    apply_list(workers, (listed("decode-0", 7, port=7400),))
    config = GatewayConfig(model_name="m", tokenizer_folder="/m", max_model_len=8)  # type: ignore[arg-type]
    shown = health.describe_cluster(config, workers, redis_up=True)
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=shown))
    async with httpx.AsyncClient(transport=transport, base_url="http://launcher") as client:
        told = msgspec.structs.replace(listed("decode-0", 7, port=7400), state="connecting")
        assert await fetch(client) == ClusterAnswer(model="m", max_model_len=8, workers=(told,))


def test_a_gateway_needs_the_launchers_key() -> None:
    from tandem.cluster.config import ClusterConfig

    with pytest.raises(UserError, match="--cluster-key"):
        run_gateway(ClusterConfig(model="m"), "http://launcher")
    with pytest.raises(UserError, match="--cluster-url must be an http:// URL, but is 'head:8001'"):
        run_gateway(ClusterConfig(model="m", cluster_key="0123456789abcdef"), "head:8001")


async def test_a_gateway_with_another_key_is_told_why_nobody_talks_to_it(
    workers: WorkerSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(router_workers, "TELL_AFTER_RETRIES", 1)
    worker = ScriptedWorker("decode-0", "decode", key=b"another key")
    workers.add(await worker.start())
    async with asyncio.timeout(5):
        while not caplog.records:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await worker.stop()
    (message,) = [record.getMessage() for record in caplog.records if record.name == "tandem.router.workers"]
    assert message == (
        "worker decode-0 cannot be reached: it hung up when we introduced ourselves: is the cluster key the same?"
    )
