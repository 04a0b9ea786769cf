"""One worker as a server: loads the model, listens, and hands each message to its role. No Ray, no Redis, no HTTP.

WorkerServer ── listens ──> Connection ── messages ──> PrefillWorker or DecodeWorker ──> Engine ──> ModelRunner
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable

import torch

from tandem.workers.attempt import Reader
from tandem.workers.config import WorkerConfig
from tandem.workers.connection import Connection, accept
from tandem.workers.decode import DecodeWorker
from tandem.workers.embedder import Embedder
from tandem.workers.engine import Engine
from tandem.workers.errors import ProtocolError, UserError, WorkerUnavailable
from tandem.workers.fill import Filler
from tandem.workers.grammar import GrammarCache, load_grammar_tokenizer
from tandem.workers.kv_cache import KVCache
from tandem.workers.load import identity_of, load_runner
from tandem.workers.metrics import WorkerMetrics
from tandem.workers.offload.create import create_tiers
from tandem.workers.offload.records import TierEvent, nobody_listens
from tandem.workers.peers import Peers, write_probe_pattern
from tandem.workers.pooling import read_pooling
from tandem.workers.prefill import PrefillWorker
from tandem.workers.prefix_cache import CacheEvent
from tandem.workers.promises import Promises
from tandem.workers.protocol import Ping, Pong
from tandem.workers.role import Role, Services
from tandem.workers.speeds import SpeedMeter
from tandem.workers.steps import StepTimes
from tandem.workers.transfer.backends import create_transfer
from tandem.workers.transfer.base import KVPoolMemory, Transfer
from tandem.workers.transfer.local import LocalPools
from tandem.workers.types import WorkerAddress, WorkerSnapshot
from tandem.workers.warm_up import WarmUp

logger = logging.getLogger(__name__)

GIL_SWITCH_INTERVAL_S = 0.0005
"""The event loop waits at most this long for the thread that runs the model; Python's default is 5 ms."""


class WorkerServer:
    """`start`, use, `stop`. Everything runs on the event loop that called `start`, the model in one thread beside it.

    `on_cache_event` is called on that loop for every block that enters or leaves the prefix cache, `on_tier_event` for
    those of lower tiers; `on_progress` with the name of each phase of the start as it begins. `local_pools` is shared
    by workers of one process that use the "local" transfer; `wrap_transfer` lets tests put faults around the transport.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        on_cache_event: CacheEvent | None = None,
        on_tier_event: TierEvent | None = None,
        on_progress: Callable[[str], None] | None = None,
        local_pools: LocalPools | None = None,
        wrap_transfer: Callable[[Transfer, KVPoolMemory], Transfer] | None = None,
    ) -> None:
        self.config = config
        self.metrics = WorkerMetrics()
        self._speed_meter = SpeedMeter()
        self._on_cache_event = on_cache_event
        self._on_tier_event = on_tier_event or nobody_listens
        self._progress = on_progress or logger.info
        self._local_pools = local_pools
        self._wrap_transfer = wrap_transfer
        self._connections: set[Connection] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> WorkerAddress:
        """Load, bind, serve. Raises `UserError` for what somebody can mend: the model, the memory, the port."""
        config = self.config
        sys.setswitchinterval(GIL_SWITCH_INTERVAL_S)
        torch.set_num_threads(config.num_threads)
        model, kv_cache, runner = await asyncio.to_thread(load_runner, config, WarmUp(self._progress))
        self._step_counts = runner.counts
        self._progress("connecting")
        self.identity = identity_of(config, runner.ops, kv_cache)
        self.engine = Engine(
            *(runner, config, kv_cache.num_blocks, self.identity, self._on_cache_event),
            vocab_size=model.vocab_size,
            overlaps=runner.can_overlap,
        )
        self.engine.grammars = GrammarCache(
            lambda: load_grammar_tokenizer(config.model_path, model.vocab_size, model.eos_token_ids)
        )
        self.engine.can_generate = model.generates
        self.engine.on_step = self._observe_step
        self._server = await self._listen()
        port = self._server.sockets[0].getsockname()[1]
        self.address = WorkerAddress(
            worker_id=config.worker_id, epoch=config.epoch, role=config.role, host=config.host, port=port
        )
        self.tiers = create_tiers(config, self.identity, kv_cache, self.metrics, self._on_tier_event)
        self.role = self._create_role(kv_cache)
        if self.tiers is not None:
            self.tiers.start()
        self.engine.on_outputs = self.role.on_outputs
        self.engine.on_incoming = self.role.on_incoming
        self._tasks = [
            asyncio.create_task(self.engine.run(), name="engine"),
            asyncio.create_task(self.role.run(), name="role"),
        ]
        await self._server.start_serving()
        self._progress("ready")
        return self.address

    async def stop(self) -> None:
        """Close all connections, end the step in flight, release the transport."""
        self._server.close()
        for connection in list(self._connections):
            connection.abort()
        await self.role.close()
        self.engine.close()
        engine_task, role_task = self._tasks
        role_task.cancel()
        await asyncio.wait([engine_task, role_task])
        if self.engine.grammars is not None:
            self.engine.grammars.close()
        if self.tiers is not None:
            await self.tiers.close()
        await self.transfer.close()

    async def run_until_failure(self) -> None:
        """Raise what ended the engine or the role, which only a bug does. Returns after `stop`."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled():
                task.result()

    def snapshot(self) -> WorkerSnapshot:
        return WorkerSnapshot(
            worker_id=self.config.worker_id,
            epoch=self.config.epoch,
            role=self.config.role,
            pid=os.getpid(),
            blocks=self.engine.counts(),
            num_running=self.engine.num_running,
            num_waiting=self.engine.num_waiting,
            num_waiting_tokens=self.engine.num_waiting_tokens,
            max_model_len=self.config.max_model_len,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
            speeds=self._speed_meter.speeds(),
            kv_tier_blocks={} if self.tiers is None else self.tiers.num_blocks(),
            counters=self.metrics.counters | self._step_counts.series(self.config.role) | self._decided_steps(),
            histograms=self.metrics.take_observations(),
        )

    # Inside

    def _decided_steps(self) -> dict[str, float]:
        """Where steps overlap: how many were decided ahead, and why the others were not. As counters for /metrics."""
        role, orders = self.config.role, self.engine.step_orders
        return {f'steps_decided_total{{role="{role}",order="{order}"}}': float(num) for order, num in orders.items()}

    def _create_role(self, kv_cache: KVCache) -> Role:
        config = self.config
        pool = KVPoolMemory.of(kv_cache.tensor)
        write_probe_pattern(kv_cache)
        self.transfer = create_transfer(
            config.transfer,
            pool,
            config.worker_id,
            config.epoch,
            config.device,
            host=config.host,
            local_pools=self._local_pools,
        )
        if self._wrap_transfer is not None:
            self.transfer = self._wrap_transfer(self.transfer, pool)
        tiers, metrics, engine = self.tiers, self.metrics, self.engine
        peers = Peers(
            self.identity,
            kv_cache,
            self.transfer,
            key=config.cluster_key,
            name=config.worker_id,
            heartbeat_s=config.heartbeat_s,
        )
        settle = _nothing_waits if tiers is None else tiers.settle
        reader = Reader(kv_cache, self.transfer, metrics, settle)
        filler = Filler(self.address, engine, reader, peers, tiers, self._speed_meter.speeds)
        promises = Promises(self.address, engine, kv_cache, self.transfer, metrics, tiers)
        embedder = Embedder(self.address, engine, filler, metrics, read_pooling(config.model_path))
        services = Services(engine, promises, filler, peers, metrics, embedder)
        if config.role == "prefill":
            return PrefillWorker(services, kv_cache)
        return DecodeWorker(services, self.address)

    async def _listen(self) -> asyncio.Server:
        try:
            return await asyncio.start_server(self._serve, self.config.host, self.config.port, start_serving=False)
        except OSError as error:
            raise UserError(f"cannot listen on {self.config.host}:{self.config.port}: {error.strerror}") from error

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        self._connections.add(connection)
        try:
            await accept(connection, self.address, self.identity, key=self.config.cluster_key)
            while True:
                message = await connection.receive()
                if isinstance(message, Ping):
                    connection.post(Pong(snapshot=self.snapshot()))
                else:
                    self.role.handle(connection, message)
        except WorkerUnavailable:
            logger.debug("a peer has gone")
        except ProtocolError as error:
            logger.warning("a peer broke the protocol: %s", error)
        finally:
            connection.abort()
            self._connections.discard(connection)
            self.role.connection_lost(connection)

    def _observe_step(self, times: StepTimes) -> None:
        seconds = times.schedule_s + times.execute_s + times.apply_s
        self.metrics.observe("step_seconds", seconds)
        self._speed_meter.observe_step(
            seconds,
            num_decodes=times.num_decodes,
            num_prefill_tokens=times.num_tokens - times.num_decodes,
            num_attended=times.num_attended,
        )


async def _nothing_waits(block_ids: list[int]) -> None:
    """There are no tiers: blocks may be overwritten at once."""
