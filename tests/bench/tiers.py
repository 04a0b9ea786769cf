"""What a prompt costs by where its KV is: nowhere, in the pool, in host memory, on disk, with a peer.

    PYTHONSAFEPATH=1 python tests/bench/tiers.py [--model smollm2-135m-instruct] [--tokens 2048] [--rounds 5]

Real workers, one thread each, in processes of their own; the peer over NIXL. Time to the first token as a gateway sees
it on the wire: medians of rounds, in each of which every source has a prompt of its own. "disk, cold": the system was
told to drop the file from memory before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import msgspec

from tandem.cluster.actors import worker_environment
from tandem.cluster.model_cache import cache_folder
from tandem.cluster.model_source import resolve_model
from tandem.kernels.tuning_cache import TUNING_FILE
from tandem.workers.config import WorkerConfig
from tandem.workers.connection import Connection, connect
from tandem.workers.protocol import Started, Submit, Tokens
from tandem.workers.transfer.base import NUM_PROBE_BLOCKS
from tandem.workers.types import CachedTokens, KVSource, Request, SamplingParams, WorkerAddress

KEY = b"measures nothing secret"


class Worker:
    """One worker process, and a gateway's connection to it."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config

    async def start(self) -> None:
        environment = os.environ | worker_environment(1)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", __file__, "--serve", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env=environment,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(self.config, enc_hook=str).replace(b"\n", b"") + b"\n")
        line = await self._process.stdout.readline()
        self.address = msgspec.json.decode(line, type=WorkerAddress)
        self.connection: Connection = await connect(self.address, key=KEY, peer="bench")

    async def stop(self) -> None:
        self.connection.abort()
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def ask(self, prompt: tuple[int, ...], source: KVSource | None = None) -> tuple[float, CachedTokens, int]:
        """(seconds to the first token, where the prompt came from, that token)."""
        request_id = f"{time.perf_counter_ns()}"
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        request = Request(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)
        began = time.perf_counter()
        self.connection.send(Submit(request=request, source=source))
        cached = CachedTokens()
        while True:
            message = await self.connection.receive()
            if isinstance(message, Started):
                cached = message.cached
            elif isinstance(message, Tokens):
                return time.perf_counter() - began, cached, message.chunks[0].token_ids[0]


async def serve() -> None:
    """The worker's process: configuration in on one line, address out, until the input ends."""
    from tandem.workers.server import WorkerServer

    config = msgspec.json.decode(sys.stdin.buffer.readline())
    config |= {"cluster_key": KEY, "model_path": Path(config["model_path"]), "tuning_file": Path(config["tuning_file"])}
    config["kv_disk_path"] = config["kv_disk_path"] and Path(config["kv_disk_path"])
    server = WorkerServer(WorkerConfig(**config))
    address = await server.start()
    sys.stdout.write(msgspec.json.encode(address).decode() + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)
    await server.stop()


def drop_from_memory(folder: Path) -> None:
    for file in folder.rglob("*.kv"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


async def measure(options: argparse.Namespace, disk: Path) -> None:
    resolved = resolve_model(options.model, dtype="bfloat16")
    block_bytes = resolved.config.kv_elements_per_token * 2 * 32
    num_blocks = -(-(options.tokens + 64) // 32)
    common = {
        "model_path": resolved.folder, "model_name": "bench", "role": "aggregated", "transfer": "nixl",
        "max_model_len": num_blocks * 32, "cluster_key": KEY, "tuning_file": cache_folder() / TUNING_FILE,
        "tuning_deadline_s": 60.0,
    }  # fmt: skip
    small = {**common, "kv_cache_memory_bytes": (num_blocks + NUM_PROBE_BLOCKS) * block_bytes}
    workers = {
        "host": Worker(WorkerConfig(**small, worker_id="host", kv_host_memory_bytes=4 * num_blocks * block_bytes)),
        "disk": Worker(
            WorkerConfig(**small, worker_id="disk", kv_disk_path=disk, kv_disk_bytes=8 * num_blocks * block_bytes)
        ),
        "peer": Worker(WorkerConfig(**common, worker_id="peer", kv_cache_memory_bytes=4 * num_blocks * block_bytes)),
    }
    for worker in workers.values():
        await worker.start()
    generator = random.Random(1)
    seconds: dict[str, list[float]] = defaultdict(list)

    def prompt() -> tuple[int, ...]:
        return tuple(generator.choices(range(1000, 40000), k=options.tokens))

    async def note(name: str, worker: Worker, tokens: tuple[int, ...], source: KVSource | None = None) -> int:
        elapsed, cached, token = await worker.ask(tokens, source)
        came = {"computed": 0, "pool": cached.pool, "host": cached.host, "peer": cached.peer}.get(name, cached.disk)
        if name == "computed" or came >= options.tokens - 160:  # a few blocks stay in the pool
            seconds[name].append(elapsed)
        else:
            print(f"{name}: {cached}", file=sys.stderr)  # noqa: T201
        return token

    for number in range(options.rounds + 1):
        host, disk_, peer = workers["host"], workers["disk"], workers["peer"]
        tokens = prompt()
        right = await note("computed", peer, tokens)
        assert right == await note("pool", peer, tokens)
        source = KVSource(address=peer.address, num_blocks=len(tokens) // 32)
        assert right == await note("peer", host, tokens, source)
        await host.ask(prompt())  # pushes it out
        assert right == await note("host", host, tokens)
        await disk_.ask(tokens, source)
        for name in ("disk", "disk, cold"):
            await disk_.ask(prompt())
            await asyncio.sleep(0.5)
            if name == "disk, cold":
                drop_from_memory(disk)
            assert right == await note(name, disk_, tokens)
        if number == 0:
            seconds.clear()  # first pairing, first touch
    report(seconds, num_blocks - 2, block_bytes)
    for worker in workers.values():
        await worker.stop()


def report(seconds: dict[str, list[float]], num_blocks: int, block_bytes: int) -> None:
    print("| KV from | first token, ms: median | best | ms per block, of the best | GB/s | rounds |")  # noqa: T201
    print("|---|---|---|---|---|---|")  # noqa: T201
    for name, values in seconds.items():
        per_block = max(min(values) - min(seconds["pool"]), 1e-9) / num_blocks
        rate = "" if name in ("pool", "computed") else f"{block_bytes / per_block / 1e9:.2f}"
        figures = f"{statistics.median(values) * 1e3:.1f} | {min(values) * 1e3:.1f} | {per_block * 1e3:.3f}"
        print(f"| {name} | {figures} | {rate} | {len(values)} |")  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if options.serve:
            asyncio.run(serve())
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            asyncio.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
