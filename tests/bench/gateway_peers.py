"""Front ends side by side: the same streams, each front end's own CPU time per token.

    python tests/bench/gateway_peers.py --dynamo $PEERS/dynamo/bin/python --vllm $PEERS/vllm/bin/python
        [--streams 64] [--tokens 1000] [--rate 8000] [--rounds 3]

    tandem   the gateway of `tandem bench gateway` before a scripted worker
    dynamo   `dynamo.frontend` before `dynamo.mocker`, which paces itself
    vllm     vLLM's API server with an engine that has no model (peers/vllm_front.py)
    --also NAME=PID@http://127.0.0.1:PORT/MODEL      anything else that speaks the API and is running already

All sides are started, then play one round after the other, another one first each time. Who waits is idle; it cannot be
stopped, since Dynamo forgets workers that are. A round: all streams are opened at once, chat, `--tokens` tokens each,
and read to their end by the same client. Counted are the CPU seconds of the front end's process alone, reading the
requests included, and the tokens that arrived. Rates should be alike, since frames are larger at higher ones: Dynamo's
mocker gives 64 streams some 8,000 tokens/s.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tandem.cluster.bench import gateway as bench
from tandem.cluster.bench.children import Child, child_process
from tandem.cluster.bench.cpu_use import ProcessMoment
from tandem.cluster.bench.gateway_requests import words
from tandem.cluster.bench.server_process import free_port
from tandem.cluster.model_source import resolve_model
from tandem.router.tokenizer import Tokenizer
from tandem.workers.errors import UserError

HERE = Path(__file__).parent
START_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Side:
    """A front end that runs."""

    name: str
    port: int
    model: str
    pid: int
    """Of the front end, whose CPU time counts."""


@asynccontextmanager
async def group(command: list[str], environment: dict[str, str], log: Path) -> AsyncIterator[int]:
    """A process in a group of its own, for as long as the block lasts. Yields its id."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, env=inherited | environment, start_new_session=True, cwd=log.parent
        )
    try:
        yield process.pid
    finally:
        for number in (signal.SIGCONT, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
        await process.wait()


async def dynamo(stack: AsyncExitStack, python: str, folder: Path, scratch: Path) -> Side:
    """As its documentation starts it without etcd and NATS."""
    port = free_port()
    environment = {"DYN_FILE_KV": str(scratch / "dynamo-store"), "DYN_LOG": "warn"}
    planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
    mocker = [python, "-m", "dynamo.mocker", "--model-path", str(folder), "--model-name", "bench"]
    front = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    log = scratch / "dynamo.log"
    await stack.enter_async_context(group([*mocker, "--max-num-seqs", "1024", *planes], environment, log))
    pid = await stack.enter_async_context(group([*front, *planes], environment, log))
    await ready(f"http://127.0.0.1:{port}/v1/models", b'"bench"', log)
    return Side("dynamo", port, "bench", pid)


async def vllm(stack: AsyncExitStack, python: str, folder: Path, scratch: Path, step_s: float) -> Side:
    port = free_port()
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, str(HERE / "peers" / "vllm_front.py"), str(step_s), "--model", str(folder), "--port", str(port)]
    command += ["--served-model-name", "bench", "--host", "127.0.0.1", "--max-model-len", "8192"]
    command += ["--dtype", "bfloat16", "--max-num-seqs", "1024", "--disable-log-stats", "--disable-uvicorn-access-log"]
    log = scratch / "vllm.log"
    pid = await stack.enter_async_context(group(command, environment, log))
    await ready(f"http://127.0.0.1:{port}/v1/models", b'"bench"', log)
    return Side("vllm", port, "bench", pid)


async def ready(url: str, sign: bytes, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if sign in await asyncio.to_thread(fetch, url):
                return
        except (urllib.error.URLError, OSError):
            pass
        await asyncio.sleep(0.5)
    raise UserError(f"{url} did not get ready, see {log}")


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        content: bytes = answer.read()
        return content


async def play(side: Side, load: Child, streams: int, tokens: int) -> dict[str, float]:
    """One round on one side."""
    order = {"host": "127.0.0.1", "port": side.port, "model": side.model, "words": words(100), "max_tokens": tokens}
    order |= {"extras": {"ignore_eos": True, "min_tokens": tokens}, "streams": streams, "at_once": streams}
    began = ProcessMoment.of(side.pid)
    await load.ask({"do": "open", "first_events": 2, **order})
    await load.ask({"do": "wait"})
    ended = ProcessMoment.of(side.pid)
    reads = await load.ask({"do": "close"})
    # the role, the finish reason and [DONE] are no tokens; some front ends send the role with the first token
    events = sum(sum(count for _, count in stream) for stream in reads.values())
    num_tokens = streams * tokens
    cpu_s, wall_s = ended.cpu_s - began.cpu_s, ended.wall_s - began.wall_s
    return {
        "us_per_token": 1e6 * cpu_s / num_tokens,
        "per_core": num_tokens / cpu_s,
        "per_s": num_tokens / wall_s,
        "events_per_token": events / num_tokens,
    }


async def run(arguments: argparse.Namespace) -> None:
    folder = resolve_model(arguments.model).folder
    figures: dict[str, list[dict[str, float]]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-peers-")))
        load = await stack.enter_async_context(child_process("tandem.cluster.bench.gateway_load"))
        options = bench.GatewayBenchOptions(tokenizer_folder=folder, num_streams=arguments.streams, num_idle=0)
        house = await stack.enter_async_context(bench.house(options, Tokenizer(folder)))
        await house.pace(arguments.rate)
        sides = [Side("tandem", house.port, bench.MODEL, house.pid)]
        if arguments.dynamo:
            sides.append(await dynamo(stack, arguments.dynamo, folder, scratch))
        if arguments.vllm:
            step_s = arguments.streams / arguments.rate
            sides.append(await vllm(stack, arguments.vllm, folder, scratch, step_s))
        for text in arguments.also:
            name, _, rest = text.partition("=")
            pid, _, url = rest.partition("@http://")
            place, _, model = url.partition("/")
            sides.append(Side(name, int(place.rpartition(":")[2]), model, int(pid)))
        for side in sides:  # warm-up
            await play(side, load, arguments.streams, 20)
        for number in range(arguments.rounds):
            for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
                figures[side.name].append(await play(side, load, arguments.streams, arguments.tokens))
                sys.stdout.write(f"{number} {side.name}: {figures[side.name][-1]}\n")
    show(figures)


def show(figures: dict[str, list[dict[str, float]]]) -> None:
    lines = ["", "| front end | us of CPU per token | tokens/s per core | tokens/s | events per token | tandem is |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, rounds in figures.items():
        median = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        ratios = [
            each["us_per_token"] / own["us_per_token"] for each, own in zip(rounds, figures["tandem"], strict=True)
        ]
        lines.append(
            f"| {name} | {median['us_per_token']:.1f} | {median['per_core']:,.0f} | {median['per_s']:,.0f} "
            f"| {median['events_per_token']:.2f} | {statistics.median(ratios):.1f}x |"
        )
    sys.stdout.write("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dynamo", help="Python of an environment with ai-dynamo")
    parser.add_argument("--vllm", help="Python of an environment with vLLM")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=PID@http://HOST:PORT/MODEL")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=8000.0, help="tokens/s of all streams together, tandem and vllm")
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
