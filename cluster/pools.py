"""Pools of workers: one Ray placement group per role, one actor per worker, and a supervisor that replaces the dead.

Ray's own restarts are off (`max_restarts=0`): with them the first sign of a death comes after 1 to 2 s, when the
replacement is up; without, after some 10 ms. So the gateway hears at once that a worker is gone, and again when its
next incarnation, of the same id and the next epoch, listens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from tandem.cluster.actors import IndexSettings, WorkerActor, WorkerFailure, worker_environment
from tandem.cluster.placement import Placement, actor_options
from tandem.cluster.worker_logs import WorkerProcess, last_lines, relay
from tandem.workers.config import WorkerConfig
from tandem.workers.errors import TandemError, UserError, WorkerUnavailable
from tandem.workers.types import Role, WorkerAddress

logger = logging.getLogger(__name__)

POLL_PHASE_S = 0.2
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 3.0
LAST_LINES_TIMEOUT_S = 5.0
"""A worker's last lines may have to come from another machine, which may be lost with it."""
FIRST_RESTART_S = 0.1
LAST_RESTART_S = 30.0
STEADY_S = 60.0
"""A worker that lived for so long starts its back-off afresh."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """Why an incarnation is gone, in one line, and what is known of where it ran."""

    reason: str
    traceback: str | None = None
    process: WorkerProcess | None = None
    """Where its last lines are, unless it told its reason itself."""


class WorkerSlot:
    """A place for one worker, and its present incarnation. `config.epoch` counts them."""

    def __init__(
        self, config: WorkerConfig, index: IndexSettings | None, placement: Placement, group: Any, bundle: int
    ) -> None:
        self.config = config
        self._index = index
        self._placement = placement
        self.group = group
        self._bundle = bundle
        self._actor: Any = None
        self._process: WorkerProcess | None = None
        self._listening: asyncio.Task[None] | None = None

    async def start(self, on_phase: Callable[[str], None]) -> WorkerAddress:
        """Start the present incarnation. Raises `UserError` or `WorkerUnavailable`."""
        self._actor = self._create_actor()
        self._process = None
        self._listening = asyncio.create_task(self._relay_warnings(self._actor))
        poll = asyncio.create_task(self._poll_phase(on_phase))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                outcome = await self._call("start")
        except TimeoutError as error:
            raise WorkerUnavailable(f"{self.config.worker_id} was not up after {START_TIMEOUT_S:.0f} s") from error
        except WorkerUnavailable as error:  # its process died
            await _tell_end(self.config, WorkerEnd(str(error), process=self._process))
            raise
        finally:
            poll.cancel()
            await asyncio.gather(poll, return_exceptions=True)
        if isinstance(outcome, WorkerFailure):
            if outcome.traceback is not None:
                logger.error("%s could not be started\n%s", self.config.worker_id, outcome.traceback.rstrip())
            message = f"{self.config.worker_id}: {outcome.message}"
            raise UserError(message) if outcome.is_user_error else WorkerUnavailable(message)
        return cast(WorkerAddress, outcome)

    async def wait_end(self) -> WorkerEnd:
        """Wait until the present incarnation is gone."""
        try:
            failure = await self._call("run_until_stopped")
        except WorkerUnavailable as error:
            return WorkerEnd(str(error), process=self._process)
        if isinstance(failure, WorkerFailure):
            return WorkerEnd(failure.message, traceback=failure.traceback)
        return WorkerEnd("it was stopped")

    def next_incarnation(self) -> None:
        self.config = msgspec.structs.replace(self.config, epoch=self.config.epoch + 1)

    async def stop(self) -> None:
        """Ask the worker to stop, then see to it."""
        if self._actor is None:
            return
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._call("stop")
        except (TimeoutError, WorkerUnavailable) as error:
            logger.info("%s did not stop by itself: %r", self.config.worker_id, error)
        self.kill()

    def kill(self) -> None:
        import ray

        if self._listening is not None:
            self._listening.cancel()
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)
            self._actor = None

    def _create_actor(self) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=self._bundle)
        return (
            cast(Any, ray.remote(WorkerActor))
            .options(
                **actor_options(self._placement.bundle_of(self.config)),
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=place,
                runtime_env={"env_vars": worker_environment(self.config.num_threads) | self._placement.environment},
            )
            .remote(self.config, self._index, self._placement.node)
        )

    async def _poll_phase(self, on_phase: Callable[[str], None]) -> None:
        on_phase("starting its process")
        self._process = await self._call("process")
        while True:
            phase = await self._call("phase")
            if phase != "ready":  # `start` says so itself
                on_phase(phase)
            await asyncio.sleep(POLL_PHASE_S)

    async def _relay_warnings(self, actor: Any) -> None:
        """For ever: bring what this incarnation warns of to the launcher's log."""
        from ray.exceptions import RayError

        worker_id, epoch = self.config.worker_id, self.config.epoch
        while True:
            try:
                records = await actor.take_warnings.remote()
            except RayError:  # it is dead, which others find out and tell
                return
            relay(worker_id, epoch, records)

    async def _call(self, method: str) -> Any:
        """Call the actor. Raises `WorkerUnavailable` if it is dead or its process cannot be started."""
        from ray.exceptions import RayError

        try:
            return await getattr(self._actor, method).remote()
        except RayError as error:
            raise WorkerUnavailable(f"{self.config.worker_id}: {_reason(error)}") from error


async def _always_there() -> None:
    """Of a Ray that is not watched."""


class Supervisor:
    """Starts all workers, keeps them alive, stops them.

    `on_up` and `on_down` tell the gateway who exists; `on_phase(worker_id, phase)` tells the user what goes on at the
    start. All are called on the event loop. `reserve` are the workers that `resize` may add. `wait_ray` waits while
    Ray's control plane is away: asked then, it would block the loop, and with it every stream.
    """

    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        index: IndexSettings | None,
        placement: Placement | None = None,
        *,
        reserve: Sequence[WorkerConfig] = (),
        wait_ray: Callable[[], Awaitable[None]] = _always_there,
        on_up: Callable[[WorkerAddress], None],
        on_down: Callable[[str, int], None],
        on_phase: Callable[[str, str], None],
    ) -> None:
        self._configs = configs
        self._reserve = list(reserve)
        self._index = index
        self._placement = placement or Placement()
        self._wait_ray = wait_ray
        self._on_up = on_up
        self._on_down = on_down
        self._on_phase = on_phase
        self._slots: list[WorkerSlot] = []
        self._groups: list[Any] = []
        self._watches: list[asyncio.Task[None]] = []
        self._is_abandoned = False
        self._added: dict[str, asyncio.Task[None]] = {}
        """By worker id, in the order in which `resize` added them: each from its place to its end."""
        self._telling: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Place the pools and start every worker, all at once. Raises what the first failing worker raises."""
        pools = [
            self._place(role, [config for config in self._configs if config.role == role])
            for role in dict.fromkeys(config.role for config in self._configs)
        ]
        # together: a cluster that scales itself must see all of what is wanted
        self._slots += [slot for slots in await _all_or_first_error(pools) for slot in slots]
        await _all_or_first_error([self._start_slot(slot) for slot in self._slots])
        self._watches = [asyncio.create_task(self._keep_alive(slot)) for slot in self._slots]

    async def stop(self) -> None:
        await self._stop_watching()
        await asyncio.gather(*(slot.stop() for slot in self._slots))
        self._remove_groups()

    async def abandon(self) -> None:
        """Instead of `stop`, where Ray is lost: nothing is asked of it any more. Its processes end by other hands."""
        self._is_abandoned = True
        await self._stop_watching()
        self._slots.clear()
        self._groups.clear()

    def num_workers(self, role: Role) -> int:
        """That it keeps alive, or is about to."""
        added = sum(worker_id.rpartition("-")[0] == role for worker_id in self._added)
        return sum(config.role == role for config in self._configs) + added

    async def resize(self, role: Role, count: int) -> None:
        """Begin to add workers of the reserve, or end those that were added last. What `start` started stays."""
        await self._wait_ray()
        while self.num_workers(role) < count and (config := self._take_reserve(role)) is not None:
            self._added[config.worker_id] = asyncio.create_task(self._serve_added(config), name=config.worker_id)
        added = [worker_id for worker_id in self._added if worker_id.rpartition("-")[0] == role]
        surplus = self.num_workers(role) - count
        ending = [self._added[worker_id] for worker_id in added[::-1][: max(0, surplus)]]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def _take_reserve(self, role: Role) -> WorkerConfig | None:
        found = next((config for config in self._reserve if config.role == role), None)
        if found is not None:
            self._reserve.remove(found)
        return found

    async def _serve_added(self, config: WorkerConfig) -> None:
        """One worker more, in a placement group of its own, until this is cancelled or it cannot be started."""
        slots: list[WorkerSlot] = []
        try:
            await self._wait_ray()
            slots += await self._place(config.role, [config])
            await self._start_slot(slots[0])
            await self._keep_alive(slots[0])
        except TandemError as error:
            logger.error("no worker more: %s", error)
        finally:
            del self._added[config.worker_id]
            for slot in slots:
                self._on_down(slot.config.worker_id, slot.config.epoch)
                config = msgspec.structs.replace(slot.config, epoch=slot.config.epoch + 1)
                if not self._is_abandoned:
                    await slot.stop()
                    self._remove_group(slot.group)
            self._reserve.insert(0, config)

    async def _stop_watching(self) -> None:
        tasks = [*self._watches, *self._added.values(), *self._telling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _place(self, role: Role, configs: Sequence[WorkerConfig]) -> list[WorkerSlot]:
        """A placement group with one bundle per worker of the role."""
        import ray
        from ray.exceptions import RayError

        bundles = [self._placement.bundle_of(config) for config in configs]
        for config in configs:
            self._on_phase(config.worker_id, "waiting for a place")
        try:
            # one name, one group: a pool that grows has several
            group = ray.util.placement_group(bundles, strategy=self._placement.strategy, name=configs[0].worker_id)
        except RayError as error:
            raise WorkerUnavailable(f"Ray gives no place to {configs[0].worker_id}: {_reason(error)}") from error
        self._groups.append(group)
        try:
            async with asyncio.timeout(self._placement.timeout_s):
                await group.ready()
        except asyncio.CancelledError:
            if not self._is_abandoned:
                self._remove_group(group)  # nobody waits for this place any more
            raise
        except (TimeoutError, RayError) as error:
            self._remove_group(group)
            raise WorkerUnavailable(f"there is no room for {len(configs)} {role} workers with {bundles[0]}") from error
        return [
            WorkerSlot(config, self._index, self._placement, group, number) for number, config in enumerate(configs)
        ]

    def _remove_groups(self) -> None:
        for group in list(self._groups):
            self._remove_group(group)

    def _remove_group(self, group: Any) -> None:
        import ray

        ray.util.remove_placement_group(group)
        self._groups.remove(group)

    async def _start_slot(self, slot: WorkerSlot) -> None:
        worker_id = slot.config.worker_id
        address = await slot.start(lambda phase: self._on_phase(worker_id, phase))
        self._on_up(address)

    async def _keep_alive(self, slot: WorkerSlot) -> None:
        """For ever: wait for the worker's end, tell the gateway, start the next incarnation."""
        pause_s = FIRST_RESTART_S
        while True:
            born = time.monotonic()
            end = await slot.wait_end()
            self._on_down(slot.config.worker_id, slot.config.epoch)
            telling = asyncio.create_task(_tell_end(slot.config, end))  # the next incarnation need not wait for it
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)
            if time.monotonic() - born > STEADY_S:
                pause_s = FIRST_RESTART_S
            pause_s = await self._restart(slot, pause_s)

    async def _restart(self, slot: WorkerSlot, pause_s: float) -> float:
        """Try until it works; returns the next pause."""
        await self._wait_ray()
        slot.kill()  # where the network failed, it may live on, and would keep the place
        while True:
            await asyncio.sleep(pause_s)
            await self._wait_ray()
            pause_s = min(2 * pause_s, LAST_RESTART_S)
            slot.next_incarnation()
            try:
                await self._start_slot(slot)
            except TandemError as error:
                logger.error("%s; next attempt in %.1f s", error, pause_s)
                slot.kill()
            else:
                logger.warning("%s is back, epoch %d", slot.config.worker_id, slot.config.epoch)
                return pause_s


async def _tell_end(config: WorkerConfig, end: WorkerEnd) -> None:
    """One record about a worker that has ended, with what it said last."""
    lines = end.traceback.splitlines() if end.traceback is not None else await _last_lines_of(end.process)
    logger.warning(
        "%s epoch %d has ended: %s%s",
        *(config.worker_id, config.epoch, end.reason),
        "".join(f"\n  | {line}" for line in lines),
        extra={"fields": {"worker": config.worker_id, "epoch": config.epoch}},
    )


async def _last_lines_of(process: WorkerProcess | None) -> list[str]:
    """From the file itself, or by a task of Ray's on the machine where it is; empty where that cannot be."""
    if process is None:
        return []
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if process.node_id == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(last_lines, process.stderr_file)
    place = NodeAffinitySchedulingStrategy(node_id=process.node_id, soft=False)
    read = cast(Any, ray.remote(last_lines)).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
    try:
        async with asyncio.timeout(LAST_LINES_TIMEOUT_S):
            lines: list[str] = await read.remote(process.stderr_file)
    except (TimeoutError, RayError):
        return ["(its machine does not say)"]
    return lines


def _reason(error: Exception) -> str:
    """Ray's errors are paragraphs; the reason is the first line, or the last where that line heads a traceback."""
    from ray.exceptions import RayTaskError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RayTaskError):
        lines.reverse()
    return lines[0] if lines else type(error).__name__


async def _all_or_first_error(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run together; when one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
