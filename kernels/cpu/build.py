"""Compiles the native ops on first use, and keeps the result in the user's cache.

    level_of_this_machine() ─> load_library(level) ─> ctypes.CDLL

The cache entry is named by a hash of the sources, the compiler, the flags and the version of torch. It appears by one
rename, under a lock that dies with its holder: processes that start together compile once.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import platformdirs
import torch

from tandem.kernels.cpu.records import RECORD

logger = logging.getLogger(__name__)

NATIVE = Path(__file__).parent / "native"
COMPILER_VARIABLE = "TANDEM_CXX"
LEVEL_VARIABLE = "TANDEM_CPU_LEVEL"

_COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-w")
"""No contraction: which products are fused must not be the compiler's choice."""

LEVELS: dict[str, tuple[str, ...]] = {
    "amx_bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16"),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
    "plain": (),
}
"""Instruction sets, best first, with what the compiler is told."""

_PROBE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
sys.exit(library.tandem_probe())
"""


class BuildError(Exception):
    """The native ops cannot be built or run here; the message says what to do."""


@lru_cache(maxsize=1)
def find_compiler() -> str:
    """Path of the C++ compiler: `TANDEM_CXX`, or the first of g++, c++, clang++. Raises `BuildError`."""
    wanted = os.environ.get(COMPILER_VARIABLE)
    for name in (wanted,) if wanted else ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path:
            return path
    raise BuildError(
        f"{wanted} ({COMPILER_VARIABLE}) is not there"
        if wanted
        else "no C++ compiler found: install g++ (Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++)"
    )


@lru_cache(maxsize=1)
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def source_files() -> list[Path]:
    return sorted(path for path in NATIVE.iterdir() if path.suffix in (".h", ".cpp"))


@lru_cache(maxsize=len(LEVELS))
def build_key(level: str) -> str:
    """16 hex digits that change with anything that could change the machine code. Raises `BuildError`."""
    compiler = find_compiler()
    digest = hashlib.blake2b(digest_size=8)
    words = [compiler, _compiler_version(compiler), *_COMMON_FLAGS, *LEVELS[level], torch.__version__]
    digest.update("\0".join(words).encode())
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where compiled libraries are kept."""
    configured = os.environ.get("TANDEM_CACHE_DIR")
    base = Path(configured).expanduser() if configured else Path(platformdirs.user_cache_dir("tandem"))
    return base / "native"


def build(level: str, on_progress: Callable[[str], None] | None = None) -> Path:
    """The library for an instruction set, compiled if it is not in the cache. Raises `BuildError`."""
    library = cache_folder() / f"{level}-{build_key(level)}.so"
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with open(library.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                if on_progress is not None:
                    on_progress(f"compiling native ops ({level})")
                _compile(level, library)
    except OSError as error:
        raise BuildError(f"{error.filename or library} cannot be written: {error.strerror or error}") from error
    return library


def _compile(level: str, library: Path) -> None:
    """One compiler process per source file, then the linker; an atomic rename at the end."""
    compiler = find_compiler()
    flags = [*_COMMON_FLAGS, *LEVELS[level]]
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as folder:
        sources = [path for path in source_files() if path.suffix == ".cpp"]
        objects = [str(Path(folder) / f"{path.stem}.o") for path in sources]
        commands = [[compiler, *flags, "-c", str(source), "-o", out] for source, out in zip(sources, objects)]
        running = [
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for command in commands
        ]
        failures = [process.communicate()[1] for process in running]
        if any(process.returncode for process in running):
            raise BuildError(f"{compiler} failed: {_first_error(''.join(failures))}")
        linked = str(Path(folder) / "linked.so")
        link = subprocess.run(
            [compiler, "-shared", "-pthread", *objects, "-o", linked], capture_output=True, text=True, check=False
        )
        if link.returncode:
            raise BuildError(f"{compiler} failed: {_first_error(link.stderr)}")
        os.replace(linked, library)


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line] or output.splitlines() or ["no message"]
    return lines[0]


def load_library(level: str) -> ctypes.CDLL:
    """Build (or find) and load the library for a level that this machine can run. Raises `BuildError`."""
    library = ctypes.CDLL(str(build(level)))
    library.tandem_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.tandem_run.restype = ctypes.c_int
    library.tandem_op_size.restype = ctypes.c_int64
    assert library.tandem_op_size() == RECORD.size, "records.py and op.h differ"
    return library


def can_run(level: str, on_progress: Callable[[str], None] | None = None) -> bool:
    """Whether a child process survives the level's instructions: a CPU may list what the system then refuses.

    Raises `BuildError`.
    """
    if platform.machine() not in ("x86_64", "AMD64") and level != "plain":
        return False
    return _survives(build(level, on_progress))


@lru_cache(maxsize=len(LEVELS))
def _survives(library: Path) -> bool:
    return subprocess.run([sys.executable, "-c", _PROBE, str(library)], check=False, timeout=60).returncode == 0


def level_of_this_machine(on_progress: Callable[[str], None] | None = None) -> str:
    """The best level that works here, or the one named by `TANDEM_CPU_LEVEL`. Raises `BuildError`."""
    wanted = os.environ.get(LEVEL_VARIABLE)
    if wanted is not None and wanted not in LEVELS:
        raise BuildError(f"{LEVEL_VARIABLE} must be one of {', '.join(LEVELS)}, but is {wanted!r}")
    for level in (wanted,) if wanted else LEVELS:
        if _is_listed(level) and can_run(level, on_progress):
            return level
        logger.debug("this machine cannot run %s", level)
    raise BuildError(f"this machine cannot run the native ops ({wanted or 'any level'})")


def levels() -> list[str]:
    """All levels that work here, best first. Builds them; for tests."""
    return [level for level in LEVELS if _is_listed(level) and can_run(level)]


_NEEDED_FLAGS = {
    "amx_bf16": {"amx_tile", "amx_bf16", "avx512_bf16", "avx512bw", "avx512vl", "avx512dq"},
    "avx512_bf16": {"avx512_bf16", "avx512bw", "avx512vl", "avx512dq"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx2": {"avx2", "fma", "f16c", "bmi2"},
    "plain": set(),
}


@lru_cache(maxsize=1)
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))


def _is_listed(level: str) -> bool:
    """Spares compiling what the CPU does not even list."""
    return _NEEDED_FLAGS[level] <= _cpu_flags()
