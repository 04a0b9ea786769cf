"""Compiles the native ops on first use, and keeps the result in the user's cache.

    level_of_this_machine() ─> load_library(level) ─> ctypes.CDLL

The cache entry is named by a hash of the sources, the compiler, the flags and the version of torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

import torch

from tandem.kernels.compiler import BuildError, build_once, cache_folder, digest_of, fingerprint
from tandem.kernels.cpu.records import RECORD

logger = logging.getLogger(__name__)

NATIVE = Path(__file__).parent / "native"
LEVEL_VARIABLE = "TANDEM_CPU_LEVEL"
X86 = ("x86_64", "AMD64")

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

_UNLOADABLE = 100
_PROBE = f"""
import ctypes, sys
try:
    library = ctypes.CDLL(sys.argv[1])
except OSError as error:
    print(error)
    sys.exit({_UNLOADABLE})
sys.exit(library.tandem_probe())
"""


def source_files() -> list[Path]:
    return sorted(path for path in NATIVE.iterdir() if path.suffix in (".h", ".cpp"))


@lru_cache(maxsize=len(LEVELS))
def build_key(level: str) -> str:
    """16 hex digits that change with anything that could change the machine code. Raises `BuildError`."""
    return digest_of([*_COMMON_FLAGS, *LEVELS[level], torch.__version__], source_files())


@cache
def code_version() -> str:
    """16 hex digits that change with what is computed, and in which order. Not with the compiler: under these flags it
    may neither contract nor reorder, so all make the same bits of the same sources."""
    return fingerprint([*_COMMON_FLAGS, repr(LEVELS)], source_files())


def build(level: str, on_progress: Callable[[str], None] | None = None) -> Path:
    """The library for an instruction set, compiled if it is not in the cache. Raises `BuildError`."""

    def tell() -> None:
        if on_progress is not None:
            on_progress(f"compiling native ops ({level})")

    return build_once(
        cache_folder() / f"{level}-{build_key(level)}.so",
        [path for path in source_files() if path.suffix == ".cpp"],
        [*_COMMON_FLAGS, *LEVELS[level]],
        tell,
    )


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
    if platform.machine() not in X86 and level != "plain":
        return False
    return _survives(build(level, on_progress))


@lru_cache(maxsize=len(LEVELS))
def _survives(library: Path) -> bool:
    """Raises `BuildError` where it cannot even be loaded: no other level could."""
    command = [sys.executable, "-c", _PROBE, str(library)]
    probe = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=60)
    if probe.returncode == _UNLOADABLE:
        raise BuildError(
            f"what was compiled cannot be loaded (may files in that folder be executed?): {probe.stdout.strip()}"
        )
    return probe.returncode == 0


def level_of_this_machine(on_progress: Callable[[str], None] | None = None, wanted: str | None = None) -> str:
    """`wanted`, or the level named by `TANDEM_CPU_LEVEL`, or the best one that works here. Raises `BuildError`."""
    wanted = wanted or os.environ.get(LEVEL_VARIABLE)
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
