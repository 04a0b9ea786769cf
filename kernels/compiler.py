"""The system's C++ compiler, and a cache of what it has made. No torch: whoever has native code can use it.

    build_once(library, sources, flags) ─> the shared library at that path

A library appears by one rename, under a lock that dies with its holder: processes that start together compile once.
It ends with a digest of all that comes before, so that one which a full disk, a crash or a copy has damaged is compiled
anew instead of being loaded. Whoever names a library puts into the name all that its machine code depends on
(`digest_of`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import platformdirs

COMPILER_VARIABLE = "TANDEM_CXX"
_SEAL_BYTES = 16


class BuildError(Exception):
    """Native code cannot be built or run here; the message says what to do."""


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
def compiler_version(compiler: str) -> str:
    """Raises `BuildError`."""
    try:
        told = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{compiler} does not tell its version: {error}") from error
    return next(iter(told.stdout.splitlines()), "")


def cache_folder() -> Path:
    """Where compiled libraries are kept."""
    configured = os.environ.get("TANDEM_CACHE_DIR")
    base = Path(configured).expanduser() if configured else Path(platformdirs.user_cache_dir("tandem"))
    return base / "native"


def digest_of(words: Iterable[str], files: Iterable[Path]) -> str:
    """16 hex digits that change with the compiler, any of the words, and any file's name or content. Raises
    `BuildError`."""
    compiler = find_compiler()
    return fingerprint([compiler, compiler_version(compiler), *words], files)


def fingerprint(words: Iterable[str], files: Iterable[Path]) -> str:
    """16 hex digits that change with any of the words, and any file's name or content."""
    digest = hashlib.blake2b("\0".join(words).encode(), digest_size=8)
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build_once(
    library: Path, sources: Sequence[Path], flags: Sequence[str], on_build: Callable[[], None] = lambda: None
) -> Path:
    """`library`, compiled of `sources` if it is not there, or damaged; `on_build` is called before that. Raises
    `BuildError`."""
    if _is_whole(library):
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with open(library.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(library):
                on_build()
                _compile(library, sources, flags)
    except OSError as error:
        raise BuildError(f"{error.filename or library} cannot be written: {error.strerror or error}") from error
    return library


def _is_whole(library: Path) -> bool:
    """Whether it is there as `_seal` left it. Loaders expect nothing behind a library, and ignore what is."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return content[-_SEAL_BYTES:] == _seal_of(content[:-_SEAL_BYTES])


def _seal(library: str) -> None:
    """Append the digest, and see all of it to the disk."""
    with open(library, "r+b") as file:
        file.write(_seal_of(file.read()))
        file.flush()
        os.fsync(file.fileno())


def _seal_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_SEAL_BYTES).digest()


def _compile(library: Path, sources: Sequence[Path], flags: Sequence[str]) -> None:
    """One compiler process per source file, then the linker; an atomic rename at the end. Needs the library's lock."""
    compiler = find_compiler()
    prefix = f".build-{library.stem}-"
    for leftover in library.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # of a process that was killed: we hold the lock
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=prefix) as folder:
        objects = [str(Path(folder) / f"{path.stem}.o") for path in sources]
        commands = [[compiler, *flags, "-c", str(source), "-o", out] for source, out in zip(sources, objects)]
        running = [
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for command in commands
        ]
        failures = [process.communicate()[1] for process in running]
        if any(process.returncode for process in running):
            raise BuildError(f"{compiler} {_failure(''.join(failures), [process.returncode for process in running])}")
        linked = str(Path(folder) / "linked.so")
        link = subprocess.run(
            [compiler, "-shared", "-pthread", *objects, "-o", linked], capture_output=True, text=True, check=False
        )
        if link.returncode:
            raise BuildError(f"{compiler} {_failure(link.stderr, [link.returncode])}")
        _seal(linked)
        os.replace(linked, library)


def _failure(output: str, exit_codes: Sequence[int]) -> str:
    """What went wrong, as the compiler's processes say: an error before anything else, and the linker's own before
    that of whoever called it."""
    lines = output.splitlines()
    told = [line for line in lines if "failed: " in line] or [line for line in lines if "error" in line] or lines
    if told:
        return f"failed: {told[0]}"
    killed = [signal.Signals(-code).name for code in exit_codes if code < 0]
    return f"was ended by {killed[0]}: is there too little memory?" if killed else "failed: no message"
