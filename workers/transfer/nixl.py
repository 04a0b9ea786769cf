"""KV blocks over NIXL (UCX): one-sided reads out of the peer's registered pool.

    reader:  describe() -> peer's agent known? -> READ posted on our thread -> polled until done, failed or late
    source:  registers its pool once, and lends UCX a little time now and then (`_lend_time`)

Hazards, all measured, that shape this file:
* A posted host-memory read copies inside the call. It runs on the backend's own thread, which releases the GIL.
* The first read from a peer only gets going when the peer's process lets UCX work; so do all reads over TCP.
* A one-sided read is not fenced: it also reads memory that its owner has given to somebody else.
* Releasing a read that is in progress does not prove that no more bytes will land. We wait for its real end.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.workers.errors import TransferError, UserError
from tandem.workers.transfer.base import KVPoolMemory, PullTimeout, check_pull, refused, undisturbed
from tandem.workers.transfer.nixl_library import allowed_transports, is_loopback, load_nixl

if TYPE_CHECKING:
    import torch

_MAX_DESCRIPTION_BYTES = 1 << 20
_EAGER_INTERVAL_S = 0.005
"""How often a source lets UCX work while peers are likely to connect, or always when reads may come over TCP."""
_IDLE_INTERVAL_S = 0.05
_EAGER_S = 30.0
"""How long after a `describe()` the first reads of a new peer are expected."""
_FIRST_POLL_S = 0.0002
_LONGEST_POLL_S = 0.02

Result = TypeVar("Result")


class _Description(msgspec.Struct, frozen=True, tag="nixl", forbid_unknown_fields=True):
    agent: str
    metadata: bytes
    pid: int
    address: int
    block_bytes: int
    num_blocks: int
    memory: str
    """"DRAM" or "VRAM"."""
    device: int


class NixlTransfer:
    """`Transfer` over one NIXL agent with one registered region, the pool."""

    name = "nixl"

    def __init__(self, pool: KVPoolMemory, *, worker_id: str, epoch: int, host: str) -> None:
        device = pool.blocks.device
        api, bindings = load_nixl(host, device.type)
        self._pool = pool
        self._errors = tuple(kind for name, kind in vars(bindings).items() if name.endswith("Error"))
        self._disconnected: type[Exception] = bindings.nixlRemoteDisconnectError
        self._backend_failed: type[Exception] = bindings.nixlBackendError
        self._not_found: type[Exception] = bindings.nixlNotFoundError
        self._memory, self._device = ("VRAM", device.index or 0) if device.type == "cuda" else ("DRAM", 0)
        # A name is never used twice: peers keep what they know of a dead agent under it.
        self._agent = api.nixl_agent(
            f"{worker_id}-{epoch}-{uuid.uuid4().hex}",
            api.nixl_agent_config(
                enable_prog_thread=False,  # it spins: half a core or more per idle worker
                backends=[],
                sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW,
            ),
        )
        # Without error handling a dead peer is never noticed.
        self._agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        region = (pool.address, pool.num_blocks * pool.block_bytes, self._device, "")
        try:
            self._registration = self._agent.register_memory([region], self._memory)
        except self._errors as error:
            raise UserError(f"--transfer nixl: {api.__name__} cannot register {self._memory}: {error}") from error
        self._description = msgspec.msgpack.encode(
            _Description(
                agent=self._agent.name,
                metadata=self._agent.get_agent_metadata(),
                pid=os.getpid(),
                address=pool.address,
                block_bytes=pool.block_bytes,
                num_blocks=pool.num_blocks,
                memory=self._memory,
                device=self._device,
            )
        )
        self._peers: dict[str, _Description] = {}
        """Agents that NIXL knows, by name. Touched by the backend's thread only."""
        self._thread = ThreadPoolExecutor(1, "transfer-nixl", initializer=_use_device, initargs=(device,))
        self._settling: dict[asyncio.Task[None], str] = {}
        """Reads past their deadline, and the agents that they read from."""
        self._closing = threading.Event()
        # Between GPUs without a path of their own, too, reads go over TCP.
        self._always_eager = not is_loopback(host) or _is_tcp_only() or self._memory == "VRAM"
        self._eager_until = 0.0
        self._lender = threading.Thread(target=self._lend_time, name="transfer-nixl-progress", daemon=True)
        self._lender.start()

    def describe(self) -> bytes:
        self._eager_until = time.monotonic() + _EAGER_S
        return self._description

    async def pull(
        self, peer: bytes, remote_blocks: Sequence[int], local_blocks: Sequence[int], *, timeout_s: float
    ) -> None:
        deadline = time.monotonic() + timeout_s
        source = _decode(peer)
        check_pull(
            self._pool,
            remote_blocks,
            local_blocks,
            remote_num_blocks=source.num_blocks,
            remote_block_bytes=source.block_bytes,
        )
        if local_blocks:
            await undisturbed(self._read(source, remote_blocks, local_blocks, deadline))

    def transport_of(self, peer: bytes) -> str:
        """ "tcp" or "cma" when the setting or the operating system leaves no doubt, else "ucx"."""
        if _is_tcp_only():
            return "tcp"
        source = _decode(peer)
        allowed = allowed_transports()
        may_use_cma = allowed is None or allowed & {"all", "cma", "sm", "shm"}
        both_on_host = self._memory == source.memory == "DRAM"
        if may_use_cma and both_on_host and _can_read_process(source.pid, source.address):
            return "cma"
        return "ucx"

    async def forget(self, peer: bytes) -> None:
        """Closes the connection, once no read past its deadline hangs on it any more.

        Not before: NIXL then calls such a read invalid, but its bytes land all the same when the peer wakes (measured).
        """
        agent = _decode(peer).agent
        if agent not in self._settling.values():
            await self._on_thread(self._drop_peer, agent)

    async def close(self) -> None:
        self._closing.set()
        for task in list(self._settling):
            task.cancel()
        await asyncio.gather(*self._settling, return_exceptions=True)
        for agent in list(self._peers):
            await self._on_thread(self._drop_peer, agent)
        await self._on_thread(self._lender.join)
        await self._on_thread(self._agent.deregister_memory, self._registration)
        self._thread.shutdown()
        del self._agent

    # One read

    async def _read(
        self, source: _Description, remote_blocks: Sequence[int], local_blocks: Sequence[int], deadline: float
    ) -> None:
        try:
            handle, is_done = await self._on_thread(self._start, source, remote_blocks, local_blocks, deadline)
            if not is_done:
                is_done = await self._poll(handle, deadline)
        except self._errors as error:
            if isinstance(error, self._disconnected):
                await self._on_thread(self._drop_peer, source.agent)
            raise self._translate(error) from error
        if is_done:
            await self._on_thread(self._agent.release_xfer_handle, handle)
            return
        settled = asyncio.ensure_future(self._settle(source.agent, handle))
        self._settling[settled] = source.agent
        settled.add_done_callback(self._settling.pop)
        raise PullTimeout("the read did not end in time", settled)

    def _start(
        self, source: _Description, remote_blocks: Sequence[int], local_blocks: Sequence[int], deadline: float
    ) -> tuple[Any, bool]:
        """Runs on the backend's thread. Returns the handle, and whether the read has ended already."""
        if time.monotonic() >= deadline:
            raise TransferError("no time was left to start the read", reason="timeout")
        self._add_peer(source)
        local, remote = descriptors(
            np.asarray(local_blocks, np.int64), np.asarray(remote_blocks, np.int64), self._pool.block_bytes
        )
        local[:, 0] += np.uint64(self._pool.address)
        remote[:, 0] += np.uint64(source.address)
        local[:, 2], remote[:, 2] = self._device, source.device
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(local, self._memory),
            self._agent.get_xfer_descs(remote, source.memory),
            source.agent,
            b"",  # no notification: its flush needs the peer's cooperation, and a hung peer would hang the read
        )
        return handle, self._is_done(self._agent.transfer(handle))

    async def _poll(self, handle: Any, deadline: float | None) -> bool:
        """Wait until a read ends, or the deadline. Returns whether it ended; raises NIXL's error if it failed."""
        pause_s = _FIRST_POLL_S
        while deadline is None or time.monotonic() < deadline:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
            # On our thread: over TCP a poll can copy for 200 ms.
            if self._is_done(await self._on_thread(self._agent.check_xfer_state, handle)):
                return True
        return False

    async def _settle(self, agent: str, handle: Any) -> None:
        """Follow a read that is over its deadline to its real end: bytes may land until then.

        It ends by itself when the peer wakes up, with an error when the peer dies, and otherwise never.
        """
        try:
            await self._poll(handle, None)
        except self._errors:
            await self._on_thread(self._drop_peer, agent)
        await self._on_thread(self._agent.release_xfer_handle, handle)

    def _is_done(self, state: str) -> bool:
        if state == "ERR":
            raise self._disconnected("the read failed")
        return state == "DONE"

    def _translate(self, error: Exception) -> TransferError:
        if isinstance(error, self._disconnected):
            return TransferError("the peer is gone", reason="disconnect")
        if isinstance(error, self._not_found):
            return refused("the peer's memory is not what it described")
        return TransferError(f"NIXL failed: {type(error).__name__}", reason="error")

    # Peers

    def _add_peer(self, source: _Description) -> None:
        known = self._peers.get(source.agent)
        if known == source:
            return
        if known is not None:
            self._drop_peer(source.agent)
        try:
            added = self._agent.add_remote_agent(source.metadata)
        except self._backend_failed as error:
            raise TransferError("the peer cannot be reached", reason="disconnect") from error
        except self._errors as error:
            raise refused("the peer's description holds no usable NIXL metadata") from error
        name = added.decode() if isinstance(added, bytes) else added
        self._peers[name] = source
        if name != source.agent:
            self._drop_peer(name)
            raise refused("the peer's description names another agent than its metadata")

    def _drop_peer(self, agent: str) -> None:
        if self._peers.pop(agent, None) is None:
            return
        try:
            self._agent.remove_remote_agent(agent)
        except self._errors:
            return  # NIXL has dropped it by itself

    # Threads

    async def _on_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _lend_time(self) -> None:
        """Let UCX answer peers: connections always, and data where reads are not truly one-sided (TCP)."""
        _use_device(self._pool.blocks.device)
        interval_s = _EAGER_INTERVAL_S
        while not self._closing.wait(interval_s):
            self._agent.get_new_notifs()
            eager = self._always_eager or time.monotonic() < self._eager_until
            interval_s = _EAGER_INTERVAL_S if eager else _IDLE_INTERVAL_S


def _use_device(device: torch.device) -> None:
    """Give the calling thread the device's context. A new thread has none, and UCX then sees no path from GPU to GPU
    and takes TCP, without a word."""
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # contexts are made when they are needed


def descriptors(
    local_blocks: npt.NDArray[np.int64], remote_blocks: npt.NDArray[np.int64], block_bytes: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Rows (offset, bytes, 0), uint64 [num_runs, 3], for both sides; runs adjacent on both sides become one row."""
    starts_run = np.ones(len(local_blocks), bool)
    starts_run[1:] = (np.diff(local_blocks) != 1) | (np.diff(remote_blocks) != 1)
    first = np.flatnonzero(starts_run)
    run_bytes = np.diff(first, append=len(local_blocks)) * block_bytes
    rows = np.zeros((2, len(first), 3), np.uint64)
    rows[:, :, 1] = run_bytes
    rows[0, :, 0] = local_blocks[first] * block_bytes
    rows[1, :, 0] = remote_blocks[first] * block_bytes
    return rows[0], rows[1]


def _decode(peer: bytes) -> _Description:
    if len(peer) > _MAX_DESCRIPTION_BYTES:
        raise refused("the peer's description is too large")
    try:
        source = msgspec.msgpack.decode(peer, type=_Description)
    except msgspec.DecodeError as error:
        raise refused("not the description of a NIXL worker") from error
    if source.memory not in ("DRAM", "VRAM") or source.block_bytes < 1 or source.num_blocks < 0:
        raise refused("the peer's description makes no sense")
    end = source.address + source.block_bytes * source.num_blocks
    if source.address < 0 or end >= 1 << 63 or source.pid < 1 or not 0 <= source.device < 1 << 16:
        raise refused("the peer's description makes no sense")
    return source


def _is_tcp_only() -> bool:
    allowed = allowed_transports()
    return allowed is not None and allowed <= {"tcp", "self"}


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _can_read_process(pid: int, address: int) -> bool:
    """Whether the kernel lets us read this process's memory: what UCX's cma transport does for every block."""
    library = ctypes.CDLL(None, use_errno=True)
    byte = ctypes.c_char()
    ours = _IoVector(ctypes.addressof(byte), 1)
    theirs = _IoVector(address, 1)
    return bool(library.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) == 1)
