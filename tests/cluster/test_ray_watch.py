"""When is Ray away, and what follows: judged without Ray, and watched with two sockets in its place."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest

from tandem.cluster import app, ray_watch
from tandem.cluster.config import ClusterConfig
from tandem.cluster.http_server import StopSignals
from tandem.cluster.progress import StartProgress
from tandem.cluster.pulse import Pulse
from tandem.cluster.ray_watch import HEAD_GRACE_S, RAYLET_GRACE_S, Endpoint, RayLost, RayWatch, Sight, Verdict, judge


@pytest.mark.parametrize(
    ("raylet", "head", "can_decode", "own", "joined"),
    [
        (None, None, True, "up", "up"),
        (None, None, False, "up", "up"),
        (0.0, None, True, "lost", "degraded"),
        (0.0, None, False, "lost", "lost"),
        (RAYLET_GRACE_S, None, True, "lost", "lost"),
        (None, 0.0, True, "lost", "degraded"),
        (None, 10 * HEAD_GRACE_S, True, "lost", "degraded"),
        (None, 0.0, False, "lost", "degraded"),
        (None, HEAD_GRACE_S, False, "lost", "lost"),
        (1.0, 1.0, True, "lost", "degraded"),
    ],
)
def test_what_is_lost(
    raylet: float | None, head: float | None, can_decode: bool, own: Verdict, joined: Verdict
) -> None:
    sight = Sight(raylet, head, can_decode)
    assert (judge(sight, is_own=True), judge(sight, is_own=False)) == (own, joined)


@pytest.mark.parametrize("is_own", [True, False])
def test_who_hangs_is_waited_for_while_somebody_decodes(is_own: bool) -> None:
    verdicts = [
        judge(Sight(None, None, can_decode, hung_s), is_own=is_own)
        for can_decode, hung_s in ((True, 0.0), (True, 100 * HEAD_GRACE_S), (False, 0.0), (False, HEAD_GRACE_S))
    ]
    assert verdicts == ["degraded", "degraded", "degraded", "lost"]
    assert judge(Sight(None, 0.0, True, 0.0), is_own=True) == "lost", "and then its port closes"


BACKLOG = 4096
"""Nobody accepts here."""


class Port:
    """Something that listens, until it does not, and then again."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.number: int = self.socket.getsockname()[1]

    def close(self) -> None:
        self.socket.close()

    def open(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", self.number), backlog=BACKLOG)


class Scene:
    """A watch over two ports, with a clock that is set by hand."""

    def __init__(self, *, is_own: bool = False) -> None:
        self.raylet, self.head = Port(), Port()
        self.answers = threading.Event()
        self.answers.set()
        self.now = 0.0
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.watch = RayWatch(
            Endpoint("raylet", "127.0.0.1", self.raylet.number, None, may_return=False),
            Endpoint("head", "127.0.0.1", self.head.number, Pulse(self.answers.wait), may_return=not is_own),
            self.lost,
            is_own=is_own,
            clock=lambda: self.now,
        )

    def close(self) -> None:
        self.raylet.close()
        self.head.close()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "PROBE_S", 0.005)


async def seen(scene: Scene, *reasons: str) -> None:
    async with asyncio.timeout(5):
        while scene.watch.reasons() != list(reasons) or scene.watch.is_up == bool(reasons):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_head_that_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    watching = asyncio.create_task(scene.watch.watch())
    await seen(scene)
    scene.head.close()
    await seen(scene, "head is away: lost workers are not replaced")
    waiting = asyncio.create_task(scene.watch.wait_up())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    assert not scene.lost.done()
    scene.head.open()
    await asyncio.wait_for(waiting, 5)
    await seen(scene)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "head is away: lost workers are not replaced; those that live go on serving",
        "Ray is back: lost workers are replaced again",
    ]
    watching.cancel()
    scene.close()


@pytest.mark.parametrize("is_own", [True, False])
async def test_a_head_that_hangs_and_answers_again(
    is_own: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_watch, "BEAT_S", 0.05)
    scene = Scene(is_own=is_own)
    watching = asyncio.create_task(scene.watch.watch())
    scene.answers.clear()  # it still listens
    await seen(scene, "head does not answer: lost workers are not replaced")
    waiting = asyncio.create_task(scene.watch.wait_up())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    assert not scene.lost.done()
    scene.answers.set()
    await asyncio.wait_for(waiting, 5)
    await seen(scene)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING][:2] == [
        "head does not answer: lost workers are not replaced; those that live go on serving",
        "Ray is back: lost workers are replaced again",
    ]
    watching.cancel()
    scene.close()


async def test_a_full_queue_of_connections_is_no_death() -> None:
    """Who hangs for half an hour takes no more connections either."""
    hung = Pulse(lambda: None)
    endpoint = Endpoint("head", "127.0.0.1", 1, hung, may_return=True)
    for number in range(4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray_watch, "_can_connect", never)
            patch.setattr(Pulse, "is_hung", number < 2)
            endpoint.beat(0.0)
            await endpoint.probe(0.0)
            assert endpoint.trouble() == ["does not answer", "does not answer", None, "is away"][number]


async def never(host: str, port: int) -> bool:
    raise TimeoutError


async def test_a_head_that_hangs_is_given_up_when_nobody_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "BEAT_S", 0.05)
    scene = Scene()
    scene.watch.can_decode = lambda: False
    watching = asyncio.create_task(scene.watch.watch())
    scene.answers.clear()
    await seen(scene, "head does not answer: lost workers are not replaced")
    assert not scene.lost.done()
    scene.now = HEAD_GRACE_S
    assert await asyncio.wait_for(scene.lost, 5) == (
        "Ray does not answer, and no worker decodes; this process ends, so that it is started anew"
    )
    scene.answers.set()
    await watching
    scene.close()


async def test_what_listens_in_the_place_of_a_lost_raylet_is_another() -> None:
    scene = Scene()
    watching = asyncio.create_task(scene.watch.watch())
    scene.raylet.close()
    away = "raylet is away: lost workers are not replaced"
    await seen(scene, away)
    scene.raylet.open()
    await asyncio.sleep(0.05)
    await seen(scene, away)
    scene.watch.can_decode = lambda: False
    assert "raylet is gone" in await asyncio.wait_for(scene.lost, 5)
    await watching
    scene.close()


async def test_workers_that_live_are_waited_for_but_not_for_ever() -> None:
    scene = Scene()
    watching = asyncio.create_task(scene.watch.watch())
    scene.raylet.close()
    await seen(scene, "raylet is away: lost workers are not replaced")
    scene.now = RAYLET_GRACE_S - 1
    await asyncio.sleep(0.05)
    assert not scene.lost.done()
    scene.now = RAYLET_GRACE_S
    await asyncio.wait_for(scene.lost, 5)
    await watching
    scene.close()


@pytest.mark.parametrize("part", ["raylet", "head"])
async def test_a_ray_of_our_own_is_not_waited_for(part: str) -> None:
    scene = Scene(is_own=True)
    watching = asyncio.create_task(scene.watch.watch())
    getattr(scene, part).close()
    assert await asyncio.wait_for(scene.lost, 5) == f"{part} is gone; this process ends, so that it is started anew"
    await watching
    scene.close()


async def test_who_stops_while_ray_is_away_asks_it_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LOST_STOP_S", 3600.0)
    abandoned: list[bool] = []

    async def abandon() -> None:
        abandoned.append(True)

    async with AsyncExitStack() as stack:
        cluster = app._Cluster(ClusterConfig(model="m"), StartProgress(), stack, StopSignals())
        cluster._supervisor = SimpleNamespace(abandon=abandon)  # type: ignore[assignment]
        cluster._watch = SimpleNamespace(is_up=True)  # type: ignore[assignment]
        await cluster.leave_absent_ray()
        cluster._watch = SimpleNamespace(is_up=False)  # type: ignore[assignment]
        for _ in range(2):  # the second time it was lost meanwhile
            with pytest.raises(RayLost, match="stopped while Ray was away"):
                await cluster.leave_absent_ray()
    assert abandoned == [True, True]


def test_a_stop_ends_also_where_ray_holds_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that hangs still takes connections: it counts as there."""
    codes: list[int] = []
    ended = threading.Event()
    monkeypatch.setattr(app.os, "_exit", lambda code: (codes.append(code), ended.set()))
    app._end_by_force_in(0.01)
    assert ended.wait(5)  # nobody has let go of this thread
    assert codes == [1]
