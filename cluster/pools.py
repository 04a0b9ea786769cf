"""Pools of workers: one Ray placement group per role, one slot per worker, and a supervisor that replaces the dead.

Ray's own restarts are off (`max_restarts=0`): with them the first sign of a death comes after 1 to 2 s, when the
replacement is up; without, after some 10 ms. So the gateway hears at once that a worker is gone, and again when its
next incarnation, of the same id and the next epoch, listens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from tandem.cluster.actors import IndexSettings
from tandem.cluster.background import in_background
from tandem.cluster.backoff import Backoff
from tandem.cluster.placement import Placement
from tandem.cluster.worker_slot import WorkerSlot, reason_of, tell_end
from tandem.workers.config import WorkerConfig
from tandem.workers.errors import TandemError, WorkerUnavailable
from tandem.workers.types import Role, WorkerAddress

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


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
        self._watches = [
            in_background(self._keep_alive(slot), name=f"keep {slot.config.worker_id} alive") for slot in self._slots
        ]

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
            self._added[config.worker_id] = in_background(
                self._serve_added(config), name=f"keep {config.worker_id} alive"
            )
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
            raise WorkerUnavailable(f"Ray gives no place to {configs[0].worker_id}: {reason_of(error)}") from error
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
        backoff = Backoff()
        while True:
            born = time.monotonic()
            end = await slot.wait_end()
            self._on_down(slot.config.worker_id, slot.config.epoch)
            # the next incarnation need not wait for it
            telling = in_background(tell_end(slot.config, end), name=f"the end of {slot.config.worker_id}")
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)
            backoff.note_life(time.monotonic() - born)
            await self._restart(slot, backoff)

    async def _restart(self, slot: WorkerSlot, backoff: Backoff) -> None:
        """Try until it works."""
        await self._wait_ray()
        slot.kill()  # where the network failed, it may live on, and would keep the place
        while True:
            await backoff.pause()
            await self._wait_ray()
            slot.next_incarnation()
            try:
                await self._start_slot(slot)
            except TandemError as error:
                logger.error("%s; next attempt in %.1f s", error, backoff.pause_s)
            except Exception:  # Ray's, or a bug of ours: it must not have been the last attempt
                logger.exception("%s; next attempt in %.1f s", slot.config.worker_id, backoff.pause_s)
            else:
                logger.warning("%s is back, epoch %d", slot.config.worker_id, slot.config.epoch)
                return
            slot.kill()


async def _all_or_first_error(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run together; when one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
