"""`tandem serve`: everything that makes a cluster, started in order, stopped in the reverse order.

    ports bound -> model found  \\
                   Redis started +-> workers, all at once -> pairs measured -> one line with the URL
                   Ray started  /

A taken port or a bad model is reported before anything expensive runs. Whatever fails, what was started is stopped: it
is all on one exit stack. SIGINT and SIGTERM drain for a few seconds first; a second one ends everything at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any

import msgspec
import uvloop

from tandem.cluster.actors import IndexSettings
from tandem.cluster.background import in_background
from tandem.cluster.config import ClusterConfig
from tandem.cluster.drain import drain
from tandem.cluster.gateway_pool import bind_public, open_gateway
from tandem.cluster.gpus import count_gpus
from tandem.cluster.guard import end_processes, guarded, this_family
from tandem.cluster.http_server import StopSignals
from tandem.cluster.keys import ClusterKey
from tandem.cluster.listeners import bind, url_of
from tandem.cluster.logs import say
from tandem.cluster.model_cache import CACHE_VARIABLE
from tandem.cluster.model_source import ResolvedModel, resolve_model
from tandem.cluster.placement import placement_of
from tandem.cluster.pools import Supervisor
from tandem.cluster.progress import StartProgress
from tandem.cluster.ray_runtime import join_ray, prepare_environment, prepare_to_join, start_ray, stop_ray
from tandem.cluster.ray_watch import RayLost, RayWatch, watch_of_this_ray
from tandem.cluster.redis_server import EmbeddedRedis
from tandem.cluster.resolve import (
    ROLES,
    ResolvedConfig,
    gateway_config,
    reserve_configs,
    resolve,
    resolve_device,
    worker_configs,
)
from tandem.cluster.scaling import follow_load
from tandem.router.gateway import Gateway
from tandem.router.health import can_serve
from tandem.workers.errors import UserError, WorkerUnavailable
from tandem.workers.types import Role, WorkerAddress, WorkerSnapshot

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 120.0
QUICK_CHECK_S = 1.0
"""Most models that cannot be served are found out within this time, and then Ray is not even started."""
MAX_FOLDER_LEN = 30
"""Ray's socket names below it take 70 more, and the system allows 107."""
STOP_S = 60.0
"""What comes after the drain, or after an interrupted start, takes so long at most."""
LOST_DRAIN_S = 5.0
"""Without Ray, what still runs has at most so long."""
LOST_STOP_S = 15.0
"""And the process itself has so long to end in good order."""


def run(config: ClusterConfig, progress: StartProgress) -> None:
    """Serve until a signal comes. Raises `TandemError` when the cluster cannot be started."""
    if config.address is None:
        prepare_environment()
    else:
        prepare_to_join()
    try:
        uvloop.run(_serve(config, progress))
    except RayLost as error:
        logger.error("%s", error)
        logging.shutdown()
        os._exit(1)  # Ray's own handlers of an exit would wait for what is gone


async def _serve(config: ClusterConfig, progress: StartProgress) -> None:
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        public = stack.enter_context(bind_public(config))
        admin = stack.enter_context(bind(config.admin_host, config.admin_port, flag="--admin-port"))
        cluster = _Cluster(config, progress, stack, signals)
        stopping = asyncio.create_task(signals.stop.wait())
        with progress.showing():
            starting = asyncio.create_task(cluster.start(public, admin))
            await _first_of(starting, stopping, cluster.lost)
            if not starting.done() or cluster.lost.done():
                _end_by_force_in(STOP_S)  # a thread that downloads or converts a model cannot be interrupted
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                await cluster.leave_lost_ray()
                return
            started = starting.result()
        sys.stdout.write(_ready_text(started.resolved, url_of(public), url_of(admin), progress.elapsed_s))
        sys.stdout.flush()
        await _first_of(stopping, cluster.lost)
        if cluster.lost.done():
            await started.gateway.stop(drain_s=min(LOST_DRAIN_S, config.drain_timeout))
            await cluster.leave_lost_ray()
        say(f"stopping: running requests have {config.drain_timeout:g} s; again to stop at once")
        await drain(started.gateway, config.drain_timeout, is_followed=config.address is not None)
        _end_by_force_in(STOP_S)
        await started.gateway.stop()
        await cluster.leave_absent_ray()


def _end_by_force_in(seconds: float) -> None:
    """From a thread: a Ray that hangs, and is asked to end something, holds the loop, and with it every signal; and the
    interpreter's own end waits for threads."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


@dataclass(frozen=True, slots=True)
class _Started:
    gateway: Gateway
    resolved: ResolvedConfig


class _Cluster:
    """The start, in the order of the picture above. Everything started is on `stack`."""

    def __init__(
        self, config: ClusterConfig, progress: StartProgress, stack: AsyncExitStack, signals: StopSignals
    ) -> None:
        self._config = config
        self._progress = progress
        self._stack = stack
        self._signals = signals
        self._key = ClusterKey.of(config.cluster_key)
        self._is_starting = True
        self._supervisor: Supervisor | None = None
        self._watch: RayWatch | None = None
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Set when Ray is gone for good, with the reason."""

    async def start(self, public: socket, admin: socket) -> _Started:
        config = self._config = with_absolute_paths(self._config)
        folder = self._stack.enter_context(run_folder())
        self._stack.enter_context(guarded(folder))
        finding = asyncio.create_task(self._find_model())
        self._stack.callback(finding.cancel)
        redis_url = config.redis_url
        if redis_url is None and config.address is None:
            redis_url = await self._start_redis(folder)
        await asyncio.wait({finding}, timeout=QUICK_CHECK_S)
        if finding.done():
            resolve(config, finding.result())
        await self._start_ray(folder)
        watch = self._watch = self._watch_ray()
        resolved = resolve(config, await finding)
        gateway = await self._start_gateway(resolved, redis_url, public, admin)
        watch.can_decode = partial(can_serve, gateway.workers)
        gateway.watch_control_plane(watch.reasons)
        await self._start_workers(resolved, redis_url, gateway, watch)
        return _Started(gateway, resolved)

    async def _find_model(self) -> ResolvedModel:
        self._progress.phase("model", "looking")

        def on_progress(message: str, done: int | None = None, total: int | None = None) -> None:
            self._progress.update("model", message, done, total)

        model = await asyncio.to_thread(
            resolve_model,
            self._config.model,
            dtype=self._config.dtype,
            device=resolve_device(self._config.device, is_elsewhere=self._config.address is not None),
            progress=on_progress,
        )
        self._progress.done("model", f"{model.name}, {model.dtype}")
        return model

    async def _start_redis(self, folder: Path) -> str:
        self._progress.phase("redis", "starting")
        redis = EmbeddedRedis(folder)
        self._stack.push_async_callback(redis.stop)
        await redis.start()
        self._progress.done("redis")
        return redis.url

    async def _start_ray(self, folder: Path) -> None:
        address = self._config.address
        self._progress.phase("ray", "starting" if address is None else f"joining {address}")
        if address is None:
            num_workers = sum(self._config.most_workers)
            num_gpus = count_gpus() if resolve_device(self._config.device) == "cuda" else 0
            # every worker has at least one thread, also where there are fewer cores than workers
            num_cpus = max(num_workers, os.cpu_count() or 1)
            begin = partial(start_ray, folder, num_cpus=num_cpus, num_gpus=num_gpus)
        else:
            begin = partial(join_ray, address)
        await self._stack.enter_async_context(_running_ray(begin, folder, self.lost))
        self._signals.install()  # Ray's handler of SIGTERM prints a C++ stack trace
        self._progress.done("ray")

    def _watch_ray(self) -> RayWatch:
        watch = watch_of_this_ray(self.lost, is_own=self._config.address is None)
        watching = in_background(watch.watch(), name="watch Ray")

        async def leave_be() -> None:
            watching.cancel()
            await asyncio.to_thread(watch.settle)

        self._stack.push_async_callback(leave_be)
        return watch

    async def leave_absent_ray(self) -> None:
        """At a stop, if Ray is away: it may come back, but who asks it to end something would wait until then."""
        if self._watch is not None and not self._watch.is_up:
            if not self.lost.done():
                self.lost.set_result("stopped while Ray was away: its workers end with this process")
            await self.leave_lost_ray()

    async def leave_lost_ray(self) -> None:
        """If Ray is lost: end in good order what does not need it, and then this process. Raises `RayLost`."""
        if not self.lost.done():
            return
        # not for ever: a call to Ray that somebody waits for may never return
        asyncio.get_running_loop().call_later(LOST_STOP_S, os._exit, 1)
        if self._supervisor is not None:
            await self._supervisor.abandon()
        raise RayLost(self.lost.result())

    async def _start_gateway(
        self, resolved: ResolvedConfig, redis_url: str | None, public: socket, admin: socket
    ) -> Gateway:
        self._progress.phase("gateway", "loading the tokenizer")
        config = gateway_config(resolved, self._key.secret, redis_url=redis_url, namespace=self._key.namespace)
        return await open_gateway(config, resolved.cluster, public, admin, self._stack, folder=Path.cwd())

    async def _start_workers(
        self, resolved: ResolvedConfig, redis_url: str | None, gateway: Gateway, watch: RayWatch
    ) -> None:
        def on_up(address: WorkerAddress) -> None:
            if self._is_starting:
                self._progress.done(address.worker_id)
            gateway.workers.add(address)

        self._supervisor = supervisor = Supervisor(
            worker_configs(resolved, self._key.secret, epoch=self._key.first_epoch),
            None if redis_url is None else IndexSettings(redis_url=redis_url, namespace=self._key.namespace),
            placement_of(resolved.cluster),
            reserve=reserve_configs(resolved, self._key.secret, epoch=self._key.first_epoch),
            wait_ray=watch.wait_up,
            on_up=on_up,
            on_down=gateway.workers.remove,
            on_phase=self._on_phase,
        )
        self._stack.push_async_callback(supervisor.stop)
        self._progress.phase("gateway", "waiting for the workers")
        await supervisor.start()
        self._progress.phase("gateway", "pairing the workers")
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await gateway.wait_ready()
        except TimeoutError as error:
            raise WorkerUnavailable(f"the workers were not paired after {READY_TIMEOUT_S:.0f} s") from error
        self._progress.done("gateway")
        self._is_starting = False

        def snapshots() -> list[WorkerSnapshot]:
            return [link.snapshot for link in gateway.workers.ready() if link.snapshot is not None]

        if bounds := _growing_pools(resolved.cluster):
            following = in_background(follow_load(supervisor, snapshots, bounds), name="scaling")
            self._stack.callback(following.cancel)

    def _on_phase(self, part: str, phase: str) -> None:
        if self._is_starting:  # later restarts of a worker are in the log
            self._progress.phase(part, phase)


def _growing_pools(config: ClusterConfig) -> dict[Role, tuple[int, int]]:
    """(least, most) workers of each pool that may change its size."""
    counts = zip(ROLES, config.num_workers, config.most_workers, strict=True)
    return {role: (least, most) for role, least, most in counts if least < most}


# Parts with a beginning and an end


@contextmanager
def run_folder() -> Iterator[Path]:
    """A folder for sockets and logs, which only this user may enter; also the current folder while it lasts.

    Ray puts the current folder on the module path of every process it starts: a file of the user's there could take
    the place of a module. Raises `UserError` where no such folder can be made.
    """
    try:
        parent = tempfile.gettempdir()
        folder = Path(tempfile.mkdtemp(prefix="tandem-", dir=parent if len(parent) < MAX_FOLDER_LEN - 16 else "/tmp"))
    except OSError as error:
        reason = f"no temporary folder for sockets and logs: {error.strerror}"
        raise UserError(f"{reason}; make room in /tmp, or name a folder in TMPDIR") from error
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def _running_ray(begin: Callable[[], None], folder: Path, lost: asyncio.Future[str]) -> AsyncIterator[None]:
    # One thread that lasts: Ray's processes are killed by the system when the thread that started them ends.
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")
    loop = asyncio.get_running_loop()
    before = this_family()
    starting = loop.run_in_executor(executor, begin)
    try:
        await asyncio.shield(starting)
        yield
    finally:
        await asyncio.wait({starting})  # a start cannot be interrupted, only undone
        if lost.done():  # asked to stop, it might wait for what is gone
            await asyncio.to_thread(end_processes, str(folder), spared=before)
        else:
            await loop.run_in_executor(executor, stop_ray)
        executor.shutdown()


def with_absolute_paths(config: ClusterConfig) -> ClusterConfig:
    """The current folder is about to change."""
    cache = os.environ.get(CACHE_VARIABLE)
    if cache:
        os.environ[CACHE_VARIABLE] = str(Path(cache).expanduser().absolute())
    names = ("model", "chat_template", "api_key_file", "kv_disk_path")
    given = {name: value for name in names if (value := getattr(config, name)) is not None}
    paths = {name: Path(value).expanduser() for name, value in given.items()}
    # a model that is no path may be the name of one
    return msgspec.structs.replace(
        config,
        **{
            name: str(path.absolute())
            for name, path in paths.items()
            if name != "model" or path.exists() or path.suffix == ".gguf"
        },
    )


def _ready_text(resolved: ResolvedConfig, url: str, admin_url: str, seconds: float) -> str:
    prefill, decode, aggregated = resolved.cluster.num_workers
    parts = [(prefill, "prefill"), (decode, "decode"), (aggregated, "aggregated")]
    workers = " + ".join(f"{count} {role}" for count, role in parts if count)
    if resolved.cluster.gateways > 1:
        workers += f" behind {resolved.cluster.gateways} gateways"
    key = ' -H "Authorization: Bearer $API_KEY"' if resolved.cluster.api_key or resolved.cluster.api_key_file else ""
    body = f'{{"model": "{resolved.model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return (
        f"ready: {resolved.model_name} at {url}/v1 ({workers}; {seconds:.1f} s; admin {admin_url})\n"
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'\n"
        f"  tandem chat --url {url}        tandem status --url {admin_url}\n"
    )
