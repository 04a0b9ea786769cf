"""The folder under the user's cache in which downloaded and converted models live, and how it is filled.

    <cache>/downloads/<name>          one file each, checked by SHA-256
    <cache>/converted/<key>/          folders in Hugging Face format

An entry appears by one rename of a finished, flushed temporary sibling, under a lock that dies with its holder: an
entry that exists is whole, and of several processes that start together one does the work while the others wait.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from tandem.workers.errors import ModelError

CACHE_VARIABLE = "TANDEM_CACHE_DIR"

Progress = Callable[[str, int | None, int | None], None]
"""Called with a message, and how much of how much is done where that is known."""


def ignore_progress(message: str, done: int | None = None, total: int | None = None) -> None:
    """A `Progress` for callers that show nothing."""


def cache_folder() -> Path:
    """`TANDEM_CACHE_DIR`, or the platform's cache folder for `tandem`."""
    configured = os.environ.get(CACHE_VARIABLE)
    return Path(configured).expanduser() if configured else Path(platformdirs.user_cache_dir("tandem"))


def cached(entry: Path, make: Callable[[Path], None], *, progress: Progress) -> Path:
    """`entry` of the cache, made by `make(temporary path)` if it is not there yet. `make` creates a file or a folder.

    Raises what `make` raises; an `OSError` (disk full, no permission) becomes a `ModelError`. Nothing half-made stays.
    """
    if entry.exists():
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.with_name(entry.name + ".lock"), entry.name, progress):
            if not entry.exists():
                _make(entry, make)
    except OSError as error:
        reason = f"{error.filename or entry} cannot be written: {error.strerror or error}"
        raise ModelError(f"{reason}; {CACHE_VARIABLE} may name another folder for models and kernels") from error
    return entry


def _make(entry: Path, make: Callable[[Path], None]) -> None:
    prefix = f".{entry.name}.tmp-"
    for leftover in entry.parent.glob(f"{prefix}*"):  # of a process that was killed: we hold the lock, so it is dead
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=entry.parent, ignore_cleanup_errors=True) as folder:
        temporary = Path(folder) / entry.name
        make(temporary)
        _flush(temporary)
        temporary.rename(entry)


def _flush(path: Path) -> None:
    """Bring a file, or the files of a folder, to the disk, so that no rename can outlive its content."""
    for file in path.iterdir() if path.is_dir() else (path,):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


@contextmanager
def _locked(path: Path, name: str, progress: Progress) -> Iterator[None]:
    """Hold the advisory lock on `path`. The system drops it when its holder ends, however it ends."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {name}", None, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
