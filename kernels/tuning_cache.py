"""The file that remembers what was tuned: one JSON file, a section per device, an entry per (op, shape, bucket, dtype).

It is replaced by one rename of a finished, flushed sibling under a lock that dies with its holder: whoever is killed in
mid-write leaves the old file, and of two processes that write, the second adds to what the first wrote. A file that is
broken, foreign or of another version is ignored with one line that says so, and replaced at the next write.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec

from tandem.kernels.tuning import DeviceKey, TuningKey

logger = logging.getLogger(__name__)

TUNING_FILE = "tuning.json"
"""Its name in Tandem's cache folder."""
MAX_FILE_BYTES = 16 << 20
"""Larger files are not ours: a section is some 30 KiB."""
MAX_DEVICES = 32
"""Sections of a file; the one that was written to longest ago goes first. Every new version makes a new section."""
_LOCK_POLL_S = 0.05

NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class TuningCacheError(Exception):
    """A file that cannot be imported or exported; the message is one line that names it."""


class Remembered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One measurement. Names are candidates' names."""

    choice: str
    seconds: dict[str, NotNegative]
    """Of one run, by candidate."""
    unavailable: tuple[str, ...] = ()
    """Candidates that this device cannot run."""
    noise: NotNegative
    num_rounds: Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    op: str
    shape: str
    bucket: Annotated[int, msgspec.Meta(ge=1)]
    dtype: str
    result: Remembered

    @property
    def key(self) -> TuningKey:
        return TuningKey(self.op, self.shape, self.bucket, self.dtype)


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: DeviceKey
    entries: list[_Entry]

    def results(self) -> dict[TuningKey, Remembered]:
        return {entry.key: entry.result for entry in self.entries}


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: Literal["tandem-tuning"] = "tandem-tuning"
    version: Literal[1] = 1
    devices: list[_Section]
    """The one written to last comes last."""

    def results_of(self, device: DeviceKey) -> dict[TuningKey, Remembered]:
        return {key: result for one in self.devices if one.device == device for key, result in one.results().items()}


def read_results(path: Path, device: DeviceKey) -> dict[TuningKey, Remembered]:
    """What the file knows of `device`; nothing if there is no file or none that can be used."""
    return _read_or_empty(path).results_of(device)


def merge_results(path: Path, device: DeviceKey, results: Mapping[TuningKey, Remembered]) -> None:
    """Add `results` to the file; they win over what it says of the same keys. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(path.name + ".lock")):
        for leftover in path.parent.glob(f"{_temporary_prefix(path)}*"):
            leftover.unlink(missing_ok=True)  # of a process that was killed: we hold the lock
        old = _read_or_empty(path)
        others = [section for section in old.devices if section.device != device]
        section = _section(device, {**old.results_of(device), **results})
        _replace(path, _File(devices=[*others[-(MAX_DEVICES - 1) :], section]))


def export_results(path: Path, device: DeviceKey, target: Path) -> int:
    """Write what the file knows of `device` into `target`; returns how many entries. Raises `TuningCacheError`."""
    results = read_results(path, device)
    if not results:
        raise TuningCacheError(f"nothing was tuned on this device yet ({device.name}, {device.num_threads} threads)")
    try:
        _replace(target, _File(devices=[_section(device, results)]))
    except OSError as error:
        raise TuningCacheError(f"{target} cannot be written: {error.strerror}") from error
    return len(results)


def import_results(path: Path, device: DeviceKey, source: Path, *, force: bool = False) -> int:
    """Add the entries of an exported file to the cache file; returns how many.

    Raises `TuningCacheError` if it is not such a file, or holds another device's results. `force` takes those for this
    device's own: candidates that it does not offer are ignored later.
    """
    try:
        file = _read(source)
    except OSError as error:
        raise TuningCacheError(f"{source} cannot be read: {error.strerror}") from error
    except _Unusable as error:
        raise TuningCacheError(f"{source} is not a file of tuning results: {error}") from error
    results = file.results_of(device)
    if not results and file.devices:
        if not force:
            raise TuningCacheError(f"{source} is of another device: {_difference(file.devices[-1].device, device)}")
        results = file.devices[-1].results()
    if not results:
        raise TuningCacheError(f"{source} holds no results")
    try:
        merge_results(path, device, results)
    except OSError as error:
        raise TuningCacheError(f"{path} cannot be written: {error.strerror}") from error
    return len(results)


def _difference(theirs: DeviceKey, ours: DeviceKey) -> str:
    """The first thing in which two devices differ, as "versions of torch: 2.12 there, 2.13 here"."""
    pairs = [("name", theirs.name, ours.name), ("threads", str(theirs.num_threads), str(ours.num_threads))]
    for name in sorted({*theirs.versions, *ours.versions}):
        pairs.append((name, theirs.versions.get(name, "none"), ours.versions.get(name, "none")))
    return next(f"{name} is {there!r} there, {here!r} here" for name, there, here in pairs if there != here)


class TuningLock:
    """Held while candidates are timed: two processes that measure at once would measure each other.

    A context manager that gives the lock back at its end, if it was taken. It dies with its holder. Raises `OSError`
    where no lock can be made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.with_name(path.name + ".tuning").open("ab")

    def __enter__(self) -> TuningLock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def try_acquire(self, *, is_too_late: Callable[[], bool], on_wait: Callable[[], None]) -> bool:
        """Wait for whoever holds it; False: it was too late before it was ours."""
        if _try_lock(self._file):
            return True
        on_wait()
        while not is_too_late():
            if _try_lock(self._file):
                return True
            time.sleep(_LOCK_POLL_S)
        return False


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Unusable(Exception):
    """Why the content of a file cannot be used."""


def _read(path: Path) -> _File:
    """Raises `OSError` or `_Unusable`."""
    with path.open("rb") as opened:
        content = opened.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise _Unusable(f"larger than {MAX_FILE_BYTES} bytes")
    try:
        return msgspec.json.decode(content, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Unusable(str(error)) from error


def _read_or_empty(path: Path) -> _File:
    try:
        return _read(path)
    except FileNotFoundError:
        pass  # the usual first start
    except OSError as error:
        logger.warning("tuning results in %s are ignored: %s", path, error.strerror)
    except _Unusable as error:
        logger.warning("tuning results in %s are ignored: %s", path, error)
    return _File(devices=[])


def _section(device: DeviceKey, results: Mapping[TuningKey, Remembered]) -> _Section:
    entries = [
        _Entry(op=key.op, shape=key.shape, bucket=key.bucket, dtype=key.dtype, result=results[key])
        for key in sorted(results)
    ]
    return _Section(device, entries)


def _replace(path: Path, content: _File) -> None:
    """Write a sibling, flush it, rename it. With the mode of any new file: it is made to be shipped."""
    temporary = path.with_name(f"{_temporary_prefix(path)}{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content), indent=1))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _temporary_prefix(path: Path) -> str:
    return f".{path.name}.tmp-"
