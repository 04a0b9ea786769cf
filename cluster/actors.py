"""The Ray actor that holds one worker. Thin: what a worker does is in `tandem.workers`; here it is started and stopped.

This module is imported inside the worker's process before anything else of Tandem, so it imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from traceback import format_exception
from typing import TYPE_CHECKING, Any, cast

import msgspec

from tandem.cluster.worker_logs import MAX_TEXT_LEN, WarningCollector, WorkerProcess, WorkerRecord
from tandem.workers.config import WorkerConfig
from tandem.workers.errors import TandemError, UserError
from tandem.workers.types import WorkerAddress

if TYPE_CHECKING:
    from tandem.cluster.placement import NodeSettings
    from tandem.router.index.publisher import IndexPublisher
    from tandem.workers.server import WorkerServer

LAST_WORDS_S = 0.2
"""How long a worker that failed stays, so that its reason arrives."""


class IndexSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker publishes what it holds."""

    redis_url: str
    namespace: str


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker could not be started, or cannot go on. Returned rather than raised: Ray would wrap it in a traceback
    of its own, and the process would be gone before anybody could ask."""

    message: str
    """One line."""
    is_user_error: bool = False
    traceback: str | None = None
    """Of what nobody foresaw."""


def worker_environment(num_threads: int) -> dict[str, str]:
    """Environment of a worker's process, in force before torch is imported there."""
    return {
        # One busy thread more than there are cores costs everybody else slices of 4 to 16 ms.
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        # Large temporaries come and go with every step: keep their memory instead of faulting it in again each time.
        "MALLOC_ARENA_MAX": "2",
        "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    }


class WorkerActor:
    """One worker in a process of its own."""

    def __init__(self, config: WorkerConfig, index: IndexSettings | None, node: NodeSettings | None = None) -> None:
        self._config = config
        self._node = node
        self._index = index
        self._phase = "importing"
        self._publisher: IndexPublisher | None = None
        self._server: WorkerServer | None = None
        self._stopped = asyncio.Event()
        self._warnings = WarningCollector()
        logging.basicConfig(
            stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
        )
        logging.getLogger().addHandler(self._warnings)

    async def start(self) -> WorkerAddress | WorkerFailure:
        """Load the model and listen."""
        try:
            return await self._start()
        except TandemError as error:
            return WorkerFailure(message=str(error), is_user_error=isinstance(error, UserError))
        except Exception as error:  # noqa: BLE001 torch raises anything when there is no room or no device
            return _unforeseen(error)

    async def _start(self) -> WorkerAddress:
        server_class = await asyncio.to_thread(_import_server)  # torch takes seconds; `phase` is answered meanwhile
        if self._node is not None:
            self._config = await asyncio.to_thread(_at_home, self._config, self._node, self._set_phase)
        on_event = None
        if self._index is not None:
            self._publisher = self._create_publisher(self._index)
            await self._publisher.start()
            on_event = self._publisher.record
        self._server = server_class(
            self._config, on_cache_event=on_event, on_tier_event=on_event, on_progress=self._set_phase
        )
        return await self._server.start()

    def _create_publisher(self, index: IndexSettings) -> IndexPublisher:
        from tandem.router.index.publisher import IndexPublisher

        return IndexPublisher(
            index.redis_url,
            namespace=index.namespace,
            worker_id=self._config.worker_id,
            epoch=self._config.epoch,
        )

    def _set_phase(self, phase: str) -> None:
        self._phase = phase

    async def phase(self) -> str:
        """What the worker is doing in order to start."""
        return self._phase

    async def process(self) -> WorkerProcess:
        """Where this is, for those who want to read what it said when it is no more."""
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        return WorkerProcess(node_id=node_id, stderr_file=os.readlink("/proc/self/fd/2"))

    async def take_warnings(self) -> list[WorkerRecord]:
        """What was logged at WARNING and above since the last call; waits until there is something."""
        return await self._warnings.take()

    async def run_until_stopped(self) -> WorkerFailure | None:
        """Returns after `stop`. If the process dies, whoever waits for this call hears of it in some 10 ms."""
        assert self._server is not None
        try:
            await self._server.run_until_failure()
        except Exception as error:  # noqa: BLE001 a bug ended the engine: a worker that only answers pings must not stay
            # after the reason has been told; nobody need be there to hear it
            asyncio.get_running_loop().call_later(LAST_WORDS_S, os._exit, 1)
            return _unforeseen(error)
        await self._stopped.wait()
        return None

    async def stop(self) -> None:
        """Stop the worker, and withdraw what it published."""
        if self._server is not None:
            await self._server.stop()
        if self._publisher is not None:
            await self._publisher.stop()
        self._stopped.set()


def _unforeseen(error: Exception) -> WorkerFailure:
    first_line = next(iter(str(error).splitlines()), "no message")
    return WorkerFailure(
        message=f"{type(error).__name__}: {first_line}", traceback="".join(format_exception(error))[-MAX_TEXT_LEN:]
    )


def _at_home(config: WorkerConfig, node: NodeSettings, on_phase: Callable[[str], None]) -> WorkerConfig:
    """The configuration with what only this machine knows: its address, and where it keeps the model."""
    import ray

    from tandem.cluster.model_source import resolve_model
    from tandem.cluster.network import local_address

    host = cast(Any, ray.util).get_node_ip_address() if node.network is None else local_address(node.network)
    folder = config.model_path
    if not folder.exists():
        on_phase("looking for the model")
        folder = resolve_model(node.model, dtype=config.dtype, device=config.device).folder
    return msgspec.structs.replace(config, host=host, model_path=folder)


def _import_server() -> type[WorkerServer]:
    from tandem.workers.server import WorkerServer

    return WorkerServer
