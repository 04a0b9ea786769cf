"""The serving comparison: the same Poisson load against `tandem serve` (1 prefill + 1 decode worker) and vLLM's server.

    python tests/bench/serving.py --vllm /opt/vllm/bin/python [--rates 1,2,3,4,5,6] [--duration 30] [--rounds 2]

With `--disaggregated` vLLM's two servers with its NIXL connector, one core each, are a third side. One side at a time,
since each wants both cores: for each round, start a side, run all rates, stop it, then the next; odd rounds begin with
the last one. Every rate of every round gets prompts that no server has seen. Servers are ended by their process ids.
Prints goodput per rate and side.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
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
class Process:
    """One process of a side."""

    command: list[str]
    ready_url: str
    """Answers 200 once it can serve."""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Server:
    """How to start one side, and what its answer to a rate needs besides the URL."""

    name: str
    processes: Callable[[int, int], list[Process]]
    """(port to serve at, another free port) -> what is started together."""
    has_admin_port: bool = False


def tandem_server(arguments: list[str]) -> Server:
    def processes(port: int, admin_port: int) -> list[Process]:
        ports = ["--port", str(port), "--admin-port", str(admin_port)]
        command = [*TANDEM, "serve", MODEL, "--prefill", "1", "--decode", "1", *ports, *arguments]
        return [Process(command, f"{_url(port)}/ready")]

    return Server("tandem, 1 P + 1 D", processes, has_admin_port=True)


@dataclass(frozen=True)
class Vllm:
    """vLLM's servers, as its documentation sets them up for a CPU."""

    python: Path
    model_folder: Path
    scratch: Path

    def one(self, cores: str) -> Server:
        """One server on all of these cores."""
        return Server(f"vLLM CPU, cores {cores}", lambda port, _: [self._engine(port, cores)])

    def disaggregated(self, cores: tuple[str, str]) -> Server:
        """A prefill server, a decode server, and the project's own router in front."""

        def processes(port: int, _: int) -> list[Process]:
            engines = [self._pool_engine(core, role) for core, role in zip(cores, ("kv_producer", "kv_consumer"))]
            prefill, decode = (engine.ready_url.removesuffix("/health") for engine in engines)
            router = [str(self.python.parent / "vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
            router += ["--prefill", prefill, "--decode", decode, "--host", "127.0.0.1", "--port", str(port)]
            router += [
                "--prometheus-port",
                str(_free_port()),
                "--worker-startup-timeout-secs",
                str(int(START_TIMEOUT_S)),
            ]
            return [*engines, Process(router, f"{_url(port)}/health")]

        return Server(f"vLLM CPU, 1 P + 1 D, cores {' and '.join(cores)}", processes)

    def _pool_engine(self, core: str, role: str) -> Process:
        config = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu", "kv_role": role}
        environment = {
            "UCX_TLS": "tcp,self,sm",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_port()),
        }
        return self._engine(_free_port(), core, ["--kv-transfer-config", json.dumps(config)], environment)

    def _engine(
        self, port: int, cores: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> Process:
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model_folder)]
        command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--max-model-len", "2048", "--dtype", "bfloat16", "--max-num-seqs", "64", *arguments]
        library_folder = self.python.parent.parent / "lib"
        libraries = [library_folder / name for name in ("libtcmalloc_minimal.so.4", "libiomp5.so")]
        common = {
            "LD_PRELOAD": ":".join(str(path) for path in libraries if path.exists()),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CACHE_ROOT": str(self.scratch / "vllm-server"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return Process(command, f"{_url(port)}/health", {**common, **(environment or {})})


TANDEM = [sys.executable, "-P", "-c", "from tandem.cluster.cli import main; main()"]


@contextmanager
def running(server: Server, log: Path) -> Iterator[tuple[str, str]]:
    """Start it, wait until it answers, end it. Yields the URL and the admin URL."""
    port, other = _free_port(), _free_port()
    with ExitStack() as stack:
        processes = server.processes(port, other)
        started = [stack.enter_context(_started(process, log)) for process in processes]
        for process, running in zip(processes, started):
            _wait_ready(running, process.ready_url, log)
        yield _url(port), _url(other)


@contextmanager
def _started(process: Process, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with log.open("ab") as output:
        running = subprocess.Popen(
            process.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**inherited, **process.environment},
            start_new_session=True,
        )
    try:
        yield running
    finally:
        _stop(running)


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
        vllm = Vllm(options.vllm, options.model_folder or _demo_folder(), options.scratch)
        sides.append(vllm.one(options.cores))
        if options.disaggregated:
            sides.append(vllm.disaggregated(("0", "1")))
    results: dict[tuple[float, str], list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="serving-") as name:
        for number in range(options.rounds):
            for server in sides if number % 2 == 0 else sides[::-1]:
                _note(f"round {number + 1}: starting {server.name}")
                with running(server, options.scratch / f"{server.name}.log") as urls:
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
    parser.add_argument("--disaggregated", action="store_true", help="vLLM's two servers, on cores 0 and 1, as well")
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


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _note(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


if __name__ == "__main__":
    main()
