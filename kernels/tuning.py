"""The words of the autotuner: what can be chosen, for what, and what was chosen. `autotune.py` measures and re-exports.

    key = TuningKey("linear", "576x960", bucket_of(num_rows), "bfloat16")
    candidate = choices.get(key) or default       # in a backend, when a step is recorded

A candidate may change how fast an op is, never a bit of what it computes: the order of reduction is not for tuning.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from tandem.kernels.ops import PackedLinear


@dataclass(frozen=True, slots=True, order=True)
class TuningKey:
    """One choice to make: an op at one shape, for one bucket of rows (or, where the op says so, of context)."""

    op: str
    shape: str  # all that is fixed by the model, e.g. "576x960"; anything beside the bucket belongs in here
    bucket: int  # a power of two, see `bucket_of`
    dtype: str  # e.g. "bfloat16"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run an op. The name is what the cache file remembers: the same name must always mean the same."""

    name: str
    parameters: Mapping[str, int] = field(hash=False)

    @classmethod
    def of(cls, **parameters: int) -> Candidate:
        """A candidate named after its parameters: `Candidate.of(rows=4, unroll=2).name == "rows=4 unroll=2"`."""
        return cls(" ".join(f"{name}={value}" for name, value in parameters.items()), parameters)

    def __getitem__(self, parameter: str) -> int:
        return self.parameters[parameter]


class CandidateUnavailable(Exception):
    """Raised by `Tunable.prepare`: this candidate does not fit this device (registers, shared memory, ISA)."""


def _nothing_to_release() -> None:
    """For tunables whose operands belong to somebody else."""


@dataclass(frozen=True, slots=True, eq=False)
class Tunable:
    """An op that can be run in several ways, and how to run it once.

    `candidates` are in a fixed order, the first being the default and the winner of every tie: put the simplest first.
    `prepare(candidate)` makes what the op needs and returns a function that runs it once, to the end (a GPU backend
    waits for the device). Operands should be shared by the candidates, and weights come from memory rather than from
    the cache, as in a step. Raises `CandidateUnavailable` where the device cannot run it. Where one run is too short
    to wait for, the function may run the op `ops_per_call` times. `timer` is what calls are timed with: an op that
    runs in the calling thread alone can take `time.thread_time`, which does not count what other processes take.
    `release` is called once when no candidate will be run any more.
    """

    key: TuningKey
    candidates: tuple[Candidate, ...]
    prepare: Callable[[Candidate], Callable[[], None]]
    ops_per_call: int = 1
    timer: Callable[[], float] = time.perf_counter
    release: Callable[[], None] = _nothing_to_release

    def __post_init__(self) -> None:
        names = [candidate.name for candidate in self.candidates]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{self.key}: candidates must be at least one, with distinct names, but are {names}")


class DeviceKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What measured times depend on beside the op. Times of one key say nothing about another."""

    name: str
    """The CPU's model and the instruction set in use, or the GPU's name."""
    num_threads: int
    """Compute threads; 1 for a GPU."""
    versions: dict[str, str]
    """Of all that makes the code: driver, torch, triton, compiler, hash of the kernels' source."""


class Choices:
    """What was chosen, for look-up. Immutable; `Choices({})` leaves every op at its default."""

    def __init__(self, chosen: Mapping[TuningKey, Candidate]) -> None:
        self._chosen = dict(chosen)
        self._buckets: dict[tuple[str, str, str], list[int]] = {}
        for key in sorted(self._chosen):
            self._buckets.setdefault((key.op, key.shape, key.dtype), []).append(key.bucket)

    def get(self, key: TuningKey) -> Candidate | None:
        """The choice for `key`, or for the nearest lower bucket of the same op, shape and dtype; None: the default."""
        exact = self._chosen.get(key)
        if exact is not None:
            return exact
        buckets = self._buckets.get((key.op, key.shape, key.dtype), [])
        place = bisect_right(buckets, key.bucket)
        return self._chosen[TuningKey(key.op, key.shape, buckets[place - 1], key.dtype)] if place else None

    def __len__(self) -> int:
        return len(self._chosen)


def bucket_of(rows: int) -> int:
    """The bucket of a number of rows or of a context length: the largest power of two that is not larger."""
    if rows < 1:
        raise ValueError(f"rows must be at least 1, but is {rows}")
    return 1 << (rows.bit_length() - 1)


def buckets_up_to(most: int, first: int = 1) -> tuple[int, ...]:
    """Buckets of all row counts from `first` to `most`: 1, 2, 4, ..."""
    return tuple(1 << power for power in range(bucket_of(first).bit_length() - 1, bucket_of(most).bit_length()))


@dataclass(frozen=True, slots=True, eq=False)
class TuningWorkload:
    """What a model will ask of a backend: enough to make tunables of its own shapes, with its own packed weights."""

    linears: tuple[PackedLinear, ...]  # all of the model, in the order of a forward pass, the head last
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    windows: frozenset[int | None]  # sliding windows of the layers; None: the whole context
    dtype: str  # of weights, activations and cache, e.g. "bfloat16"
    max_rows: int  # tokens of one step
    max_seqs: int  # sequences of one step
    max_context: int  # tokens of one sequence

    @property
    def row_buckets(self) -> tuple[int, ...]:
        return buckets_up_to(self.max_rows)


@runtime_checkable
class TunableOps(Protocol):
    """What a backend offers beside `Ops` if it has anything to tune."""

    def device_key(self) -> DeviceKey:
        """What its times depend on, as things are now (number of threads included)."""

    def tunables(self, workload: TuningWorkload) -> Sequence[Tunable]:
        """All its tunables for this workload, those that matter most first: at the deadline the rest keep defaults."""

    def use_choices(self, choices: Choices) -> None:
        """From now on run each op as chosen. Called before any step is recorded."""
