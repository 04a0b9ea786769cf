"""A place for one worker: one Ray actor after another, of which each is an incarnation with an epoch of its own.

Started, listened to for what it warns of, waited for until it ends, and then quoted with what it said last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from tandem.cluster.actors import IndexSettings, WorkerActor, WorkerFailure, worker_environment
from tandem.cluster.background import in_background
from tandem.cluster.placement import Placement, actor_options
from tandem.cluster.worker_logs import WorkerProcess, last_lines, relay
from tandem.workers.config import WorkerConfig
from tandem.workers.errors import UserError, WorkerUnavailable
from tandem.workers.types import WorkerAddress

logger = logging.getLogger(__name__)

POLL_PHASE_S = 0.2
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 3.0
LAST_LINES_TIMEOUT_S = 5.0
"""A worker's last lines may have to come from another machine, which may be lost with it."""


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
        from ray.exceptions import RayError

        try:
            self._actor = self._create_actor()
        except RayError as error:
            raise WorkerUnavailable(f"{self.config.worker_id}: {reason_of(error)}") from error
        self._process = None
        self._listening = in_background(self._relay_warnings(self._actor), name=f"warnings of {self.config.worker_id}")
        poll = asyncio.create_task(self._poll_phase(on_phase))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                outcome = await self._call("start")
        except TimeoutError as error:
            raise WorkerUnavailable(f"{self.config.worker_id} was not up after {START_TIMEOUT_S:.0f} s") from error
        except WorkerUnavailable as error:  # its process died
            await tell_end(self.config, WorkerEnd(str(error), process=self._process))
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
        """At once, whether it answers or not. Idempotent."""
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
            raise WorkerUnavailable(f"{self.config.worker_id}: {reason_of(error)}") from error


async def tell_end(config: WorkerConfig, end: WorkerEnd) -> None:
    """One record about a worker that has ended, with what it said last."""
    lines = end.traceback.splitlines() if end.traceback is not None else await _last_lines_of(end.process)
    logger.warning(
        "%s epoch %d has ended: %s%s",
        config.worker_id,
        config.epoch,
        end.reason,
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


def reason_of(error: Exception) -> str:
    """Ray's errors are paragraphs; the reason is the first line, or the last where that line heads a traceback."""
    from ray.exceptions import RayTaskError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RayTaskError):
        lines.reverse()
    return lines[0] if lines else type(error).__name__
