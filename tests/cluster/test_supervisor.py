"""The supervisor, with workers that are not processes: who is told what, and in what order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from ray.exceptions import RaySystemError

from tandem.cluster import backoff
from tandem.cluster.pools import Supervisor
from tandem.cluster.worker_slot import WorkerEnd, WorkerSlot
from tandem.workers.config import WorkerConfig
from tandem.workers.errors import UserError, WorkerUnavailable
from tandem.workers.types import WorkerAddress


class FakeSlot:
    """A slot whose incarnations fail to start where `failures` says so, and die when `die` is called."""

    def __init__(self, config: WorkerConfig, failures: dict[int, Exception] | None = None) -> None:
        self.config = config
        self.group = f"of {config.worker_id}"
        self.failures = failures or {}
        self.started: list[int] = []
        self.is_stopped = False
        self.num_kills = 0
        self.end = WorkerEnd("killed")
        self._death = asyncio.Event()

    async def start(self, on_phase: Callable[[str], None]) -> WorkerAddress:
        on_phase("starting")
        self.started.append(self.config.epoch)
        await asyncio.sleep(0)
        if self.config.epoch in self.failures:
            raise self.failures[self.config.epoch]
        self._death.clear()
        return WorkerAddress(
            worker_id=self.config.worker_id, epoch=self.config.epoch, role=self.config.role, host="h", port=1
        )

    async def wait_end(self) -> WorkerEnd:
        await self._death.wait()
        return self.end

    def die(self) -> None:
        self._death.set()

    def next_incarnation(self) -> None:
        self.config = msgspec.structs.replace(self.config, epoch=self.config.epoch + 1)

    async def stop(self) -> None:
        self.is_stopped = True

    def kill(self) -> None:
        self.num_kills += 1


class Story:
    """Supervisor, slots, and what was said."""

    def __init__(self, slots: list[FakeSlot]) -> None:
        self.told: list[tuple[str, str, int]] = []
        self.slots = slots
        self.ray_is_up = asyncio.Event()
        self.ray_is_up.set()
        self.supervisor = Supervisor(
            [],
            None,
            wait_ray=self.wait_ray,
            on_up=lambda address: self.told.append(("up", address.worker_id, address.epoch)),
            on_down=lambda worker_id, epoch: self.told.append(("down", worker_id, epoch)),
            on_phase=lambda worker_id, phase: None,
        )
        self.supervisor._slots = slots  # type: ignore[assignment]

    async def wait_ray(self) -> None:
        await self.ray_is_up.wait()

    async def told_of(self, *expected: tuple[str, str, int]) -> None:
        await self.until(lambda: self.told == list(expected))

    async def until(self, question: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not question():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


def config(worker_id: str) -> WorkerConfig:
    return WorkerConfig(model_path=Path("/m"), model_name="m", role="decode", worker_id=worker_id)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "FIRST_PAUSE_S", 0.01)


async def test_a_dead_worker_is_reported_and_replaced_by_its_next_epoch() -> None:
    slot = FakeSlot(config("decode-0"))
    story = Story([slot])
    await story.supervisor.start()
    slot.die()
    await story.told_of(("up", "decode-0", 0), ("down", "decode-0", 0), ("up", "decode-0", 1))
    slot.die()
    await story.told_of(*story.told[:3], ("down", "decode-0", 1), ("up", "decode-0", 2))
    await story.supervisor.stop()
    assert slot.is_stopped


async def test_a_restart_that_fails_is_tried_again() -> None:
    slot = FakeSlot(config("decode-0"), {1: WorkerUnavailable("no room"), 2: RuntimeError("nobody thought of this")})
    story = Story([slot])
    await story.supervisor.start()
    slot.die()
    await story.told_of(("up", "decode-0", 0), ("down", "decode-0", 0), ("up", "decode-0", 3))
    assert slot.started == [0, 1, 2, 3]
    await story.supervisor.stop()


async def test_a_first_start_that_fails_is_an_error() -> None:
    story = Story([FakeSlot(config("a")), FakeSlot(config("b"), {0: UserError("b: too large")})])
    with pytest.raises(UserError, match="b: too large"):
        await story.supervisor.start()
    await story.supervisor.stop()
    assert all(slot.is_stopped for slot in story.slots)


async def test_nothing_is_started_again_after_stop() -> None:
    slot = FakeSlot(config("decode-0"))
    story = Story([slot])
    await story.supervisor.start()
    await story.supervisor.stop()
    slot.die()
    await asyncio.sleep(0.05)
    assert slot.started == [0]


async def test_a_bug_that_ends_the_watch_over_a_worker_is_heard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slot = FakeSlot(config("decode-0"))

    async def stumble() -> WorkerEnd:
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(slot, "wait_end", stumble)
    story = Story([slot])
    await story.supervisor.start()
    await story.until(lambda: "keep decode-0 alive: this goes on no longer" in caplog.text)
    assert "nobody thought of this" in caplog.text
    await story.supervisor.stop()


async def test_without_ray_nobody_is_replaced_until_it_is_back() -> None:
    slot = FakeSlot(config("decode-0"))
    story = Story([slot])
    await story.supervisor.start()
    story.ray_is_up.clear()
    slot.die()
    await story.told_of(("up", "decode-0", 0), ("down", "decode-0", 0))
    await asyncio.sleep(0.05)
    assert (slot.started, slot.num_kills) == ([0], 0)
    story.ray_is_up.set()
    await story.told_of(*story.told[:2], ("up", "decode-0", 1))
    await story.supervisor.stop()


async def test_a_ray_that_goes_while_it_is_tried_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = FakeSlot(config("decode-0"), {1: WorkerUnavailable("no Ray")})
    story = Story([slot])
    await story.supervisor.start()
    monkeypatch.setattr(slot, "kill", story.ray_is_up.clear)  # as it cleans up after the attempt that failed
    slot.die()
    await story.until(lambda: not story.ray_is_up.is_set())  # before the first attempt
    story.ray_is_up.set()
    await story.until(lambda: not story.ray_is_up.is_set())  # after it
    await asyncio.sleep(0.1)
    assert slot.started == [0, 1]
    story.ray_is_up.set()
    await story.told_of(("up", "decode-0", 0), ("down", "decode-0", 0), ("up", "decode-0", 2))
    await story.supervisor.stop()


async def test_a_lost_ray_is_asked_for_nothing() -> None:
    slot = FakeSlot(config("decode-0"))
    story = Story([slot])
    await story.supervisor.start()
    await story.supervisor.abandon()
    await story.supervisor.stop()
    slot.die()
    await asyncio.sleep(0.05)
    assert slot.started == [0]
    assert not slot.is_stopped


async def test_what_a_worker_said_last_is_told_with_its_end(caplog: pytest.LogCaptureFixture) -> None:
    slot = FakeSlot(config("decode-0"))
    slot.end = WorkerEnd("RuntimeError: no room", traceback="Traceback\n  line\nRuntimeError: no room\n")
    story = Story([slot])
    await story.supervisor.start()
    slot.die()
    await story.told_of(("up", "decode-0", 0), ("down", "decode-0", 0), ("up", "decode-0", 1))
    await story.supervisor.stop()
    (told,) = [record for record in caplog.records if "has ended" in record.message]
    assert told.message == (
        "decode-0 epoch 0 has ended: RuntimeError: no room\n  | Traceback\n  |   line\n  | RuntimeError: no room"
    )
    assert told.__dict__["fields"] == {"worker": "decode-0", "epoch": 0}


def growing(story: Story, monkeypatch: pytest.MonkeyPatch, **failures: Exception) -> dict[str, FakeSlot]:
    """A supervisor with three workers in reserve. Returns the slots that get a place, as they get it."""
    placed: dict[str, FakeSlot] = {}
    supervisor = story.supervisor
    supervisor._configs = [config("decode-0")]
    supervisor._reserve = [config(f"decode-{number}") for number in (1, 2, 3)]

    async def place(role: str, configs: list[WorkerConfig]) -> list[FakeSlot]:
        (given,) = configs
        if given.worker_id in failures:
            raise failures.pop(given.worker_id)
        slot = placed[given.worker_id] = FakeSlot(given)
        return [slot]

    monkeypatch.setattr(supervisor, "_place", place)
    monkeypatch.setattr(supervisor, "_remove_group", lambda group: story.told.append(("group", group, 0)))
    return placed


async def test_a_pool_grows_and_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story([])
    placed, supervisor = growing(story, monkeypatch), story.supervisor
    await supervisor.resize("decode", 3)
    assert supervisor.num_workers("decode") == 3
    await story.told_of(("up", "decode-1", 0), ("up", "decode-2", 0))
    story.told.clear()
    placed["decode-1"].die()  # what was added is kept alive, too
    await story.told_of(("down", "decode-1", 0), ("up", "decode-1", 1))
    story.told.clear()
    await supervisor.resize("decode", 1)
    assert story.told == [
        *(("down", "decode-2", 0), ("group", "of decode-2", 0)),
        *(("down", "decode-1", 1), ("group", "of decode-1", 0)),
    ]
    assert placed["decode-2"].is_stopped
    story.told.clear()
    await supervisor.resize("decode", 0)  # what was started first stays
    assert supervisor.num_workers("decode") == 1
    await supervisor.resize("decode", 9)  # all of the reserve
    assert supervisor.num_workers("decode") == 4
    async with asyncio.timeout(5):
        while len(story.told) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert sorted(story.told) == [("up", "decode-1", 2), ("up", "decode-2", 1), ("up", "decode-3", 0)]
    await supervisor.stop()
    assert all(slot.is_stopped for slot in placed.values())


async def test_without_ray_a_pool_keeps_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """To end a worker asks Ray, too."""
    story = Story([])
    placed, supervisor = growing(story, monkeypatch), story.supervisor
    await supervisor.resize("decode", 2)
    await story.told_of(("up", "decode-1", 0))
    story.ray_is_up.clear()
    shrinking = asyncio.create_task(supervisor.resize("decode", 1))
    await asyncio.sleep(0.02)
    assert not placed["decode-1"].is_stopped
    story.ray_is_up.set()
    await asyncio.wait_for(shrinking, 5)
    assert placed["decode-1"].is_stopped
    await supervisor.stop()


async def test_a_pool_that_finds_no_place_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story([])
    growing(story, monkeypatch, **{"decode-1": WorkerUnavailable("there is no room")})
    supervisor = story.supervisor
    await supervisor.resize("decode", 2)
    async with asyncio.timeout(5):
        while supervisor.num_workers("decode") != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await supervisor.resize("decode", 2)  # and is asked for again
    await story.told_of(("up", "decode-1", 0))
    await supervisor.abandon()  # Ray is lost: nothing is asked of it
    assert [what for what, *_ in story.told] == ["up", "down"]


async def test_every_place_has_a_name_of_its_own_and_ray_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives a name once; a refusal is no bug of ours."""
    names: list[str] = []

    class Group:
        async def ready(self) -> None: ...

    def placement_group(bundles: object, strategy: str, name: str) -> Group:
        if name in names:
            raise RaySystemError(f"name '{name}' already exists.")
        names.append(name)
        return Group()

    monkeypatch.setattr("ray.util.placement_group", placement_group)
    supervisor = Story([]).supervisor
    for worker_ids in (["decode-0", "decode-1"], ["decode-2"], ["decode-3"]):
        await supervisor._place("decode", [config(worker_id) for worker_id in worker_ids])
    assert len(names) == 3
    with pytest.raises(WorkerUnavailable, match="already exists"):
        await supervisor._place("decode", [config("decode-3")])


def test_the_fake_has_the_methods_of_the_real_slot() -> None:
    real = {name for name in vars(WorkerSlot) if not name.startswith("_")}
    assert real <= set(vars(FakeSlot))
