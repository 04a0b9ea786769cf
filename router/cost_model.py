"""What it would cost to serve a request here or there, in predicted seconds. Pure arithmetic over plain records.

With n tokens in the prompt, h of them held, S sequences on the worker and c choices asked for:

    compute(w, h)  = (n - h) * (prefill_token_s + prefill_attended_s * (n + h) / 2)
    fetch(w, x)    = handover_s + bytes(blocks of x beyond those of w) / bandwidth
    read(w)        = compute(w, h_w), or fetch(w, x) + compute(w, h_x) when a peer x holds more and that is faster
    queue(w)       = tokens waiting ahead * prefill_token_s
    itl(D)         = decode_step_s + decode_sequence_s * (S + c)
    room(D)        = the time until others have finished, when D has no block or no place left
    pull(P, D)     = handover_s + what is left of bytes(blocks that D lacks) / bandwidth once P has computed

    first token through P   queue(P) + read(P) + pull(P, D) + room(D)
    first token on D alone  queue(D) + read(D) + room(D)
    stall(D)                compute(D) for each of its S streams; for one that may come, where there is none
    stray(P), stray(D)      with a `prompt_cache_key`, of workers that it does not prefer: less than any load is worth
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest

from tandem.workers.types import Role

EXPECTED_TOKENS = 64
"""Of an answer. So many milliseconds of a first token are worth one millisecond between tokens."""
START_BYTES_PER_S = 1e9
"""Between two workers that have not measured their path."""
STRAY_SHARE = 0.5
"""Not to be with the worker that a request's key prefers costs so much of the least load there is."""
NUM_SOURCES = 4
"""A source is looked for among so many that hold most of the prompt."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one worker, in seconds; see `WorkerSpeeds`. The defaults stand for a worker of which nothing is known while
    nobody else was measured either: a small model on one core. Proportions matter more than the values."""

    prefill_token_s: float = 0.0004
    prefill_attended_s: float = 0.0
    decode_step_s: float = 0.02
    decode_sequence_s: float = 0.0005
    handover_s: float = 0.01
    """From the end of prefill to the sequence joining the batch. A fetch from a peer, which is a handover of what is
    there already, takes as long besides its bytes."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What the policy knows of one live worker."""

    worker_id: str
    role: Role
    num_sequences: int = 0
    """Running and waiting."""
    num_waiting_tokens: int = 0
    """Prompt tokens that are promised to it and not yet computed."""
    num_available_blocks: int = 1 << 30
    """Free blocks and cached ones, which can be evicted."""
    num_routed: int = 0
    """Requests ever given to it by this gateway: breaks ties."""
    unpaired: frozenset[str] = frozenset()
    """Prefill workers from which this decode worker must not take KV."""
    speeds: Speeds = Speeds()
    chunk_tokens: int = 512
    """Most prompt tokens in one of its steps."""
    max_num_seqs: int | None = None
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Of a decode worker: bandwidth from each prefill worker that it is paired with."""

    @property
    def queue_s(self) -> float:
        return self.num_waiting_tokens * self.speeds.prefill_token_s


@dataclass(frozen=True, slots=True)
class RequestView:
    """What the policy knows of one request. `overlap`: blocks of its prompt that each worker is said to hold."""

    num_prompt_tokens: int
    num_choices: int = 1
    block_size: int = 32
    block_bytes: int = 0
    local_prefill_tokens: int = 64
    """A decode worker that misses no more reads it itself, whatever it is told."""
    overlap: Mapping[str, int] = field(default_factory=dict)
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    preferred: Mapping[str, float] = field(default_factory=dict)
    """By the client's `prompt_cache_key`: 1 for the worker of each kind that it prefers, less for the next ones, 0 for
    all that are not named. Empty without a key."""

    def num_held_tokens(self, worker_id: str) -> int:
        """Prompt tokens that this worker need not compute or fetch. The last token is always computed."""
        return min(self.overlap.get(worker_id, 0) * self.block_size, self.num_prompt_tokens - 1)

    def num_missing_tokens(self, worker_id: str) -> int:
        return self.num_prompt_tokens - self.num_held_tokens(worker_id)


@dataclass(frozen=True, slots=True)
class Source:
    """A worker from which the first `num_blocks` blocks of the prompt can be fetched."""

    worker_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Reading:
    """How one worker would read a prompt."""

    read_s: float
    compute_s: float
    """The part of it that computes."""
    num_tokens: int
    """That are computed."""
    source: Source | None = None
    """Whence more than the worker holds may be fetched, whether or not that is predicted to be faster."""


def find_sources(request: RequestView, workers: Iterable[WorkerView]) -> list[WorkerView]:
    """The workers that hold most of the prompt, the most first, of whatever role."""
    overlap = request.overlap
    if not overlap:
        return []
    holders = [
        (-overlap[worker.worker_id], worker.num_routed, worker.worker_id, worker)
        for worker in workers
        if worker.worker_id in overlap
    ]
    return [worker for *_, worker in nsmallest(NUM_SOURCES, holders)]


def read(request: RequestView, worker: WorkerView, sources: Sequence[WorkerView]) -> Reading:
    """The faster of computing what the worker does not hold, and of fetching more from the best source first. A source
    that holds more is named either way: the worker knows better what it holds, and what the path to there is like."""
    num_held = request.num_held_tokens(worker.worker_id)
    compute_s = _compute_s(request, worker, num_held)
    alone = Reading(compute_s, compute_s, request.num_prompt_tokens - num_held)
    source = _best_source(worker, sources)
    if source is None:
        return alone
    num_blocks = request.num_held_tokens(source.worker_id) // request.block_size
    num_fetched = num_blocks - num_held // request.block_size
    if num_fetched <= 0:
        return alone
    named = Source(source.worker_id, num_blocks)
    num_then_held = num_blocks * request.block_size
    fetch_s = worker.speeds.handover_s + num_fetched * request.block_bytes / bytes_per_s(worker, source)
    compute_s = _compute_s(request, worker, num_then_held)
    if fetch_s + compute_s >= alone.read_s:
        return replace(alone, source=named)
    num_tokens = request.num_prompt_tokens - num_then_held
    return Reading(fetch_s + compute_s, compute_s, num_tokens, named)


def _compute_s(request: RequestView, worker: WorkerView, num_held: int) -> float:
    num_tokens, speeds = request.num_prompt_tokens, worker.speeds
    mean_attended = (num_tokens + num_held) * 0.5
    return (num_tokens - num_held) * (speeds.prefill_token_s + speeds.prefill_attended_s * mean_attended)


def _best_source(worker: WorkerView, sources: Sequence[WorkerView]) -> WorkerView | None:
    for source in sources:
        if source is not worker and can_exchange(worker, source):
            return source
    return None


def can_exchange(one: WorkerView, other: WorkerView) -> bool:
    return other.worker_id not in one.unpaired and one.worker_id not in other.unpaired


def bytes_per_s(one: WorkerView, other: WorkerView) -> float:
    """Measured when a decode worker is paired with a prefill worker; taken to be the same both ways."""
    measured = one.bytes_per_s.get(other.worker_id) or other.bytes_per_s.get(one.worker_id)
    return measured or START_BYTES_PER_S


def itl_s(request: RequestView, decode: WorkerView) -> float:
    """Between two tokens on this worker once the request has joined."""
    speeds = decode.speeds
    return speeds.decode_step_s + speeds.decode_sequence_s * (decode.num_sequences + request.num_choices)


def room_s(request: RequestView, decode: WorkerView) -> float:
    """How long until the worker has blocks and places for the request: an answer takes `EXPECTED_TOKENS` steps."""
    wait_s = 0.0
    num_needed = -(-request.num_missing_tokens(decode.worker_id) // request.block_size) + request.num_choices - 1
    if num_needed > decode.num_available_blocks:
        wait_s = EXPECTED_TOKENS * itl_s(request, decode)
    if decode.max_num_seqs is not None:
        num_ahead = decode.num_sequences + request.num_choices - decode.max_num_seqs
        if num_ahead > 0:
            wait_s += EXPECTED_TOKENS * itl_s(request, decode) * num_ahead / decode.max_num_seqs
    return wait_s


def transfer_s(request: RequestView, prefill: WorkerView, decode: WorkerView) -> float:
    num_blocks = -(-request.num_missing_tokens(decode.worker_id) // request.block_size)
    return num_blocks * request.block_bytes / bytes_per_s(decode, prefill)


def pull_s(request: RequestView, prefill: WorkerView, decode: WorkerView, reading: Reading) -> float:
    """From the end of prefill to the first token: decode pulls while prefill computes, and waits for what is left."""
    return decode.speeds.handover_s + max(0.0, transfer_s(request, prefill, decode) - reading.compute_s)


def stall_s(decode: WorkerView, reading: Reading) -> float:
    """What others lose when a decode worker reads a prompt itself, added up. An idle one is not free either: whoever
    comes meanwhile waits."""
    return reading.compute_s * max(1, decode.num_sequences)


def stray_s(request: RequestView, worker: WorkerView) -> float:
    """For being away from the worker that the request's key prefers. It decides between equals: one sequence more where
    it would be decoded, or one block of tokens more to be read, costs more than that."""
    if not request.preferred:
        return 0.0
    if worker.role == "prefill":
        least_load_s = request.block_size * worker.speeds.prefill_token_s
    else:
        least_load_s = EXPECTED_TOKENS * worker.speeds.decode_sequence_s
    return STRAY_SHARE * least_load_s * (1.0 - request.preferred.get(worker.worker_id, 0.0))


def itl_while_reading_s(request: RequestView, decode: WorkerView, reading: Reading) -> float:
    """The longest step that the streams of a decode worker see while it reads a prompt itself."""
    num_tokens = min(reading.num_tokens, decode.chunk_tokens)
    return itl_s(request, decode) + reading.compute_s * num_tokens / reading.num_tokens
