"""Which workers serve a request: a pure function of what is known about them. No clock, no I/O.

Costs are in prompt tokens, so that load and prefix overlap can be weighed against each other: a worker that already
holds part of the prompt saves the tokens that it need not compute or pull; a worker with sequences in its batch makes
everybody's next token later. Equal costs go to the worker that was given the fewest requests so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from tandem.workers.types import Role

TOKENS_PER_SEQUENCE = 256
"""One more sequence in a decode batch weighs as much as this many prompt tokens to be fetched."""
LOCAL_SHARE = 1 / 8
"""A decode worker that misses at most this share of a prompt holds most of it ..."""
LOCAL_SHARE_FACTOR = 4
"""... and reads the rest itself, as long as that is at most this many times `local_prefill_tokens`."""


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


@dataclass(frozen=True, slots=True)
class RequestView:
    """What the policy knows of one request. `overlap`: blocks of its prompt that each worker is said to hold."""

    num_prompt_tokens: int
    num_choices: int = 1
    block_size: int = 32
    local_prefill_tokens: int = 64
    overlap: Mapping[str, int] = field(default_factory=dict)

    def num_missing_tokens(self, worker_id: str) -> int:
        """Prompt tokens that this worker would have to compute or fetch. The last token is always computed."""
        held = self.overlap.get(worker_id, 0) * self.block_size
        return max(1, self.num_prompt_tokens - held)


@dataclass(frozen=True, slots=True)
class Route:
    """`prefill` is None when the decode worker reads the prompt itself."""

    prefill: str | None
    decode: str


def route(request: RequestView, workers: Sequence[WorkerView], avoid: AbstractSet[str] = frozenset()) -> Route | None:
    """The pair of workers with the least cost, or None when nobody can decode. `avoid`: have already failed it."""
    candidates = [w for w in workers if w.role != "prefill" and w.worker_id not in avoid]
    if not candidates:
        return None
    decode = min(candidates, key=lambda worker: (_decode_cost(request, worker), worker.num_routed, worker.worker_id))
    if decode.role == "aggregated" or _prefills_itself(request, decode):
        return Route(prefill=None, decode=decode.worker_id)
    return Route(prefill=pick_prefill(request, workers, decode, avoid), decode=decode.worker_id)


def pick_prefill(
    request: RequestView, workers: Sequence[WorkerView], decode: WorkerView, avoid: AbstractSet[str] = frozenset()
) -> str | None:
    """The prefill worker that will be done first, among those that `decode` can take KV from."""
    candidates = [
        worker
        for worker in workers
        if worker.role == "prefill" and worker.worker_id not in avoid and worker.worker_id not in decode.unpaired
    ]
    if not candidates:
        return None
    best = min(candidates, key=lambda worker: (_prefill_cost(request, worker), worker.num_routed, worker.worker_id))
    return best.worker_id


def _prefills_itself(request: RequestView, decode: WorkerView) -> bool:
    missing = request.num_missing_tokens(decode.worker_id)
    holds_most = missing <= request.num_prompt_tokens * LOCAL_SHARE
    return missing <= request.local_prefill_tokens or (
        holds_most and missing <= request.local_prefill_tokens * LOCAL_SHARE_FACTOR
    )


def _decode_cost(request: RequestView, worker: WorkerView) -> int:
    missing = request.num_missing_tokens(worker.worker_id)
    needed_blocks = -(-missing // request.block_size) * request.num_choices
    # a worker without room would first have to preempt somebody: only when all are full
    lacking_tokens = max(0, needed_blocks - worker.num_available_blocks) * request.block_size
    waiting = worker.num_waiting_tokens if worker.role == "aggregated" else 0
    return worker.num_sequences * TOKENS_PER_SEQUENCE + missing + waiting + 4 * lacking_tokens


def _prefill_cost(request: RequestView, worker: WorkerView) -> int:
    return worker.num_waiting_tokens + request.num_missing_tokens(worker.worker_id)
