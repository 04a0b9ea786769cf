"""Readers and sources for every transport: in this process, and in processes that may be stopped and killed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tandem.workers.transfer.backends import create_transfer
from tandem.workers.transfer.base import KVPoolMemory, Transfer
from tandem.workers.transfer.local import LocalPools

PEER_SCRIPT = Path(__file__).with_name("peer.py")
NUM_BLOCKS = 64
BLOCK_BYTES = 24 * 1024


def _load_peer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transfer_peer", PEER_SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


content = _load_peer().content


@dataclass
class Pair:
    """A reader and a source in this process."""

    reader: Transfer
    source: Transfer
    reader_pool: KVPoolMemory
    source_pool: KVPoolMemory
    description: bytes
    make: MakeTransfer


class MakeTransfer:
    """Makes transports of one kind that can reach each other, and closes what the test has not closed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._pools = LocalPools()
        self._made: list[Transfer] = []

    def __call__(self, pool: KVPoolMemory, *, epoch: int = 0) -> Transfer:
        transfer = create_transfer(self.name, pool, "worker", epoch, "cpu", local_pools=self._pools)  # type: ignore[arg-type]
        self._made.append(transfer)
        return transfer

    async def close(self, transfer: Transfer) -> None:
        self._made.remove(transfer)
        await transfer.close()

    async def close_all(self) -> None:
        for transfer in list(self._made):
            await self.close(transfer)


@pytest.fixture(params=["local", "nixl", "nccl"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def make(backend: str) -> AsyncIterator[MakeTransfer]:
    maker = MakeTransfer(backend)
    yield maker
    await maker.close_all()


@pytest.fixture
async def pair(make: MakeTransfer) -> Pair:
    source_pool = KVPoolMemory.of(content(NUM_BLOCKS, BLOCK_BYTES, seed=1))
    reader_pool = KVPoolMemory.of(content(NUM_BLOCKS, BLOCK_BYTES, seed=2))
    source, reader = make(source_pool), make(reader_pool)
    return Pair(reader, source, reader_pool, source_pool, source.describe(), make)


class PeerProcess:
    """The script `peer.py`, running."""

    def __init__(self, backend: str, num_blocks: int, block_bytes: int) -> None:
        environment = os.environ | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(PEER_SCRIPT), backend, str(num_blocks), str(block_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.expected = content(num_blocks, block_bytes, seed=1)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if _is_hex(line):  # the libraries write there too
                self.description = bytes.fromhex(line)
                break

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()


def _is_hex(line: str) -> bool:
    text = line.strip()
    return len(text) > 32 and all(character in "0123456789abcdef" for character in text)


class StartPeer:
    def __init__(self) -> None:
        self.started: list[PeerProcess] = []

    async def __call__(self, backend: str, num_blocks: int = NUM_BLOCKS, block_bytes: int = BLOCK_BYTES) -> PeerProcess:
        peer = await asyncio.to_thread(PeerProcess, backend, num_blocks, block_bytes)
        self.started.append(peer)
        return peer


@pytest.fixture
def start_peer() -> Iterator[StartPeer]:
    start = StartPeer()
    yield start
    for peer in start.started:
        peer.close()


def zeros(num_blocks: int = NUM_BLOCKS, block_bytes: int = BLOCK_BYTES) -> KVPoolMemory:
    """A pool whose memory has been touched, as a worker's has."""
    return KVPoolMemory.of(torch.ones((num_blocks, block_bytes), dtype=torch.uint8).zero_())


@pytest.fixture
def empty_pool() -> KVPoolMemory:
    return zeros()
