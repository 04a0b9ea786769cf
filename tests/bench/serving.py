"""The serving comparison: the same Poisson load against `tandem serve` (1 prefill + 1 decode worker) and vLLM's server.

    python tests/bench/serving.py --vllm /opt/vllm/bin/python [--rates 1,2,3,4,5,6] [--duration 30] [--rounds 2]

One server at a time, since each wants both cores: for each round, start a side, run all rates, stop it, then the other
side; odd rounds begin with the other one. Every rate of every round gets prompts that no server has seen. Servers are
ended by their own process ids. Prints goodput per rate and side.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m-instruct"
VOCAB = "49000"
START_TIMEOUT_S = 1200.0
STOP_TIMEOUT_S = 40.0
LOAD = (
    "--input-len",
    "512",
    "--input-len-spread",
    "256",
    "--shared-prefix-len",
    "256",
    "--output-len",
    "64",
    "--warmup",
    "3",
)
LIMITS = ("--slo-ttft", "1", "--slo-itl", "0.1")


@dataclass(frozen=True)
class Server:
    """How to start one side, and what its answer to a rate needs besides the URL."""

    name: str
    command: Callable[[int, int], list[str]]
    """(port, another free port) -> command line."""
    environment: dict[str, str]
    ready_path: str
    """Answers 200 once requests can be served."""
    has_admin_port: bool = False


def tandem_server(arguments: list[str]) -> Server:
    def command(port: int, admin_port: int) -> list[str]:
        ports = ["--port", str(port), "--admin-port", str(admin_port)]
        return [*TANDEM, "serve", MODEL, "--prefill", "1", "--decode", "1", *ports, *arguments]

    return Server("tandem, 1 P + 1 D", command, {}, "/ready", has_admin_port=True)


def vllm_server(python: Path, cores: str, folder: Path, scratch: Path) -> Server:
    """As vLLM's documentation sets it up for a CPU."""
    library_folder = python.parent.parent / "lib"
    libraries = [library_folder / name for name in ("libtcmalloc_minimal.so.4", "libiomp5.so")]

    def command(port: int, _: int) -> list[str]:
        server = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        server += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
        return [*server, "--max-model-len", "2048", "--dtype", "bfloat16", "--max-num-seqs", "64"]

    environment = {
        "LD_PRELOAD": ":".join(str(path) for path in libraries if path.exists()),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CACHE_ROOT": str(scratch / "vllm-server"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Server(f"vLLM CPU, cores {cores}", command, environment, "/health")


TANDEM = [sys.executable, "-P", "-c", "from tandem.cluster.cli import main; main()"]


@contextmanager
def running(server: Server, log: Path) -> Iterator[tuple[str, str]]:
    """Start it, wait until it answers, end it. Yields the URL and the admin URL."""
    port, other = _free_port(), _free_port()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with log.open("ab") as output:
        process = subprocess.Popen(
            server.command(port, other),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**inherited, **server.environment},
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(process, url + server.ready_path, log)
        yield url, f"http://127.0.0.1:{other}"
    finally:
        _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"the server did not get ready, see {log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask; then end what is left of its own process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_rate(server: Server, urls: tuple[str, str], rate: float, duration_s: float, folder: Path) -> dict[str, Any]:
    """One run of `tandem bench serve`; its report."""
    report = folder / "report.json"
    command = [*TANDEM, "bench", "serve", "--url", urls[0], "--rate", str(rate), "--duration", str(duration_s)]
    command += [*LOAD, *LIMITS, "--tokens", VOCAB, "--seed", str(secrets.randbelow(1 << 30)), "--json", str(report)]
    if server.has_admin_port:
        command += ["--admin-url", urls[1]]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600)
    body: dict[str, Any] = json.loads(report.read_text())
    report.unlink()
    return body


def show(results: dict[tuple[float, str], list[dict[str, Any]]], names: list[str]) -> list[str]:
    """A Markdown table: per rate and side, the share of good requests, and the latencies behind it."""
    head = "share good | TTFT p50 / p90, s | mean ITL p50 / p90, ms | handover p50, ms"
    lines = [f"| req/s | side | runs | requests | {head} |", "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for rate in sorted({rate for rate, _ in results}):
        for name in names:
            runs = results.get((rate, name), [])
            if runs:
                lines.append(f"| {rate:g} | {name} | {len(runs)} | {_cells(runs)} |")
    return lines


def _cells(runs: list[dict[str, Any]]) -> str:
    summaries = [run["summary"] for run in runs]
    total = sum(one["num_ok"] + one["num_failed"] for one in summaries)
    failed = sum(one["num_failed"] for one in summaries)
    good = sum(one["goodput"]["good"] for one in summaries)

    def latencies(name: str, unit: float, digits: int) -> str:
        found = [one[name] for one in summaries if one[name] is not None]
        if not found:
            return "n/a"
        return " / ".join(f"{unit * sum(one[p] for one in found) / len(found):.{digits}f}" for p in ("p50", "p90"))

    handovers = [run["handover"]["p50"] for run in runs if run.get("handover")]
    handover = f"{1e3 * sum(handovers) / len(handovers):.1f}" if handovers else ""
    share = f"{good / total:.0%}" if total else "n/a"
    requests = f"{total}, {failed} failed" if failed else f"{total}"
    return f"{requests} | {share} | {latencies('ttft', 1, 2)} | {latencies('itl_per_request', 1e3, 0)} | {handover}"


def main() -> None:
    options = _parse()
    sides = [tandem_server(options.tandem_argument)]
    if options.vllm is not None:
        sides.append(vllm_server(options.vllm, options.cores, options.model_folder or _demo_folder(), options.scratch))
    results: dict[tuple[float, str], list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="serving-") as name:
        for number in range(options.rounds):
            for server in sides if number % 2 == 0 else sides[::-1]:
                _note(f"round {number + 1}: starting {server.name}")
                with running(server, options.scratch / f"{server.name.split(',')[0]}.log") as urls:
                    for rate in options.rates:
                        body = run_rate(server, urls, rate, options.duration, Path(name))
                        results[rate, server.name].append(body)
                        good = body["summary"]["goodput"]["share"]
                        errors = body["summary"]["errors"] or ""
                        _note(f"round {number + 1}: {server.name}, {rate:g} req/s: {good:.0%} good {errors}")
    sys.stdout.write("\n".join(show(results, [server.name for server in sides])) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM; without it only Tandem runs")
    parser.add_argument("--model-folder", type=Path, help="weights for vLLM (default: the demo model, from our cache)")
    parser.add_argument(
        "--rates", type=lambda text: [float(rate) for rate in text.split(",")], default=[1, 2, 3, 4, 5, 6]
    )
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of arrivals per rate")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cores", default="0-1", help="cores that vLLM's threads are bound to")
    parser.add_argument(
        "--scratch", type=Path, default=Path(tempfile.gettempdir()) / "tandem-serving", help="logs, caches"
    )
    parser.add_argument("--tandem-argument", action="append", default=[], help="passed on to tandem serve; repeat")
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    return options


def _demo_folder() -> Path:
    from tandem.cluster.model_source import resolve_model

    return resolve_model(MODEL, dtype="bfloat16").folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _note(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


if __name__ == "__main__":
    main()
