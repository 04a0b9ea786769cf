"""Workers that compute with different instruction sets exchange nothing; at one that all have, they are as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fetch_scene import NUM_BLOCKS, PROMPT_LEN, SMALL_POOL, make_eager, push_out

from tandem.kernels.cpu.build import levels
from tandem.workers.protocol import Pair
from tandem.workers.types import CachedTokens, Request


@pytest.fixture(scope="module")
def two_levels() -> tuple[str, str]:
    """The lowest that this machine runs, the better one first."""
    runnable = levels()
    if len(runnable) < 2:
        pytest.skip("this machine runs plain code only")
    return runnable[-2], runnable[-1]


async def test_workers_of_different_levels_do_not_pair(
    bench: Any, make_request: Callable[..., Request], two_levels: tuple[str, str]
) -> None:
    better, plain = two_levels
    decode = await bench.worker("decode", "d0", cpu_level=better)
    prefill = await bench.worker("prefill", "p0", cpu_level=plain)
    gateway = await bench.gateway(decode)
    gateway.connection.send(Pair(prefill=(prefill.address,)))
    paired = await asyncio.wait_for(gateway.paired.get(), 10)
    version = decode.identity.numerics.rpartition("/")[2]
    assert paired.error == (
        f"numerics differs: ours 'cpu/{better}/{version}', theirs 'cpu/{plain}/{version}'; "
        f"--cpu-level {plain} makes all workers compute the same"
    )
    answer = await gateway.ask(make_request("r", 100), prefill.address)  # told to take its KV all the same
    assert [started.path for started in answer.started] == ["local"]
    await bench.settled()


async def test_at_a_common_level_two_workers_say_what_one_says(
    bench: Any, make_request: Callable[..., Request], two_levels: tuple[str, str]
) -> None:
    """And nothing of it runs at the machine's own level: there the same worker says something else."""
    own, plain = two_levels
    outcomes = {}
    for level in (own, plain):
        alone = await bench.worker("aggregated", f"a-{level}", cpu_level=level)
        outcomes[level] = (await (await bench.gateway(alone)).ask(make_request("r", 200))).outcome
    assert outcomes[own] != outcomes[plain]
    prefill = await bench.worker("prefill", "p0", cpu_level=plain)
    decode = await bench.worker("decode", "d0", cpu_level=plain)
    answer = await (await bench.gateway(decode)).ask(make_request("r", 200), prefill.address)
    assert [started.path for started in answer.started] == ["remote"]
    assert answer.outcome == outcomes[plain]
    await bench.settled()


async def test_a_disk_that_another_level_wrote_is_not_read(
    bench: Any, make_request: Callable[..., Request], two_levels: tuple[str, str], tmp_path: Path
) -> None:
    own, plain = two_levels
    disk = {"kv_disk_path": tmp_path, "kv_disk_bytes": 8 << 20, "kv_cache_memory_bytes": SMALL_POOL}
    cached = []
    for epoch, level in enumerate((own, plain, own)):
        worker = await bench.worker("aggregated", "a0", epoch=epoch, cpu_level=level, **disk)
        make_eager(worker)
        await bench.settled()  # the disk is read beside the start
        gateway = await bench.gateway(worker)
        answer = await gateway.ask(make_request("r", PROMPT_LEN))
        cached.append(answer.started[0].cached)
        if epoch == 0:
            await push_out(gateway, make_request)
        await bench.settled()
        bench.servers.remove(worker)
        await worker.stop()
    assert cached == [CachedTokens(), CachedTokens(), CachedTokens(disk=NUM_BLOCKS * 16)]
