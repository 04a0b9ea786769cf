"""Which workers serve a request: a pure function of what is known about them. No clock, no I/O.

`cost` compares predicted seconds (cost_model.py) over pairs of workers:

    first token + EXPECTED_TOKENS * itl(D), + stall(D) where D would read the prompt itself, + stray(P) + stray(D)

Prefix reuse, transfers, peer fetches and reading where one decodes are all terms of this one sum. Equal costs go to
those that were given the fewest requests so far, unless the client's key prefers others (stray). The other rules exist
for comparison: `round-robin` and `least-loaded` know nothing of prefixes, as the field means by these names, and
`prefix` knows of little else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any, Literal

from tandem.router import cost_model
from tandem.router.cost_model import EXPECTED_TOKENS, Reading, RequestView, Source, Speeds, WorkerView
from tandem.router.roster import Floats, Roster, Side

__all__ = [
    "BLIND",
    "POLICIES",
    "PolicyName",
    "RequestView",
    "Route",
    "Source",
    "Speeds",
    "WorkerView",
    "pick_prefill",
    "route",
]

PolicyName = Literal["cost", "round-robin", "least-loaded", "prefix"]

BLIND: frozenset[PolicyName] = frozenset({"round-robin", "least-loaded"})
"""For these the index is not asked, and nothing is fetched from a worker that it names."""
NUM_CANDIDATES = 8
"""Pairs are formed of so many workers of each kind that are best on their own."""
MISSED_SLO_S = 1000.0
"""A predicted miss of a configured limit costs more than any detour."""


@dataclass(frozen=True, slots=True)
class Route:
    """`prefill` is None when the decode worker reads the prompt itself. `source`: whence the reader may fetch its
    beginning. The rest is prediction: how many tokens the reader will compute, and seconds."""

    prefill: str | None
    decode: str
    source: Source | None = None
    num_tokens: int = field(default=0, compare=False)
    ttft_s: float = field(default=0.0, compare=False)
    queue_s: float = field(default=0.0, compare=False)
    """The part of `ttft_s` that waits for others."""
    itl_s: float = field(default=0.0, compare=False)


def route(
    request: RequestView,
    workers: Roster | Iterable[WorkerView],
    avoid: AbstractSet[str] = frozenset(),
    policy: PolicyName = "cost",
) -> Route | None:
    """The workers to serve it, or None when nobody can decode. `avoid`: have already failed it."""
    roster = workers if isinstance(workers, Roster) else Roster(workers)
    return POLICIES[policy](request, roster.without(avoid) if avoid else roster)


def pick_prefill(
    request: RequestView,
    workers: Iterable[WorkerView],
    decode: WorkerView,
    avoid: AbstractSet[str] = frozenset(),
) -> Route:
    """The prefill worker that will be done first, among those that `decode` can take KV from; none if there is none."""
    rest = [worker for worker in workers if worker.worker_id not in avoid]
    sources = cost_model.find_sources(request, rest)
    prefills = [worker for worker in rest if worker.role == "prefill"]
    options = [
        _remote(request, prefill, decode, cost_model.read(request, prefill, sources))
        for prefill in prefills
        if prefill.worker_id not in decode.unpaired
    ]
    return min(options, key=_Option.rank).route if options else _local(request, decode, sources).route


@dataclass(frozen=True, slots=True)
class _Option:
    cost_s: float
    num_routed: int
    route: Route

    def rank(self) -> tuple[float, int, str, str]:
        return self.cost_s, self.num_routed, self.route.decode, self.route.prefill or ""


def _remote(request: RequestView, prefill: WorkerView, decode: WorkerView, reading: Reading) -> _Option:
    queue_s = prefill.queue_s + cost_model.room_s(request, decode)
    chosen = Route(
        prefill=prefill.worker_id,
        decode=decode.worker_id,
        source=reading.source,
        num_tokens=reading.num_tokens,
        queue_s=queue_s,
        ttft_s=queue_s + reading.read_s + cost_model.pull_s(request, prefill, decode, reading),
        itl_s=cost_model.itl_s(request, decode),
    )
    stray_s = cost_model.stray_s(request, prefill) + cost_model.stray_s(request, decode)
    return _Option(_cost_s(request, chosen) + stray_s, prefill.num_routed + decode.num_routed, chosen)


def _local(request: RequestView, decode: WorkerView, sources: Sequence[WorkerView]) -> _Option:
    reading = cost_model.read(request, decode, sources)
    queue_s = decode.queue_s + cost_model.room_s(request, decode)
    chosen = Route(
        prefill=None,
        decode=decode.worker_id,
        source=reading.source,
        num_tokens=reading.num_tokens,
        queue_s=queue_s,
        ttft_s=queue_s + reading.read_s,
        itl_s=cost_model.itl_s(request, decode),
    )
    cost_s = _cost_s(request, chosen) + cost_model.stall_s(decode, reading) + cost_model.stray_s(request, decode)
    if decode.num_sequences and request.slo_itl_s is not None:
        longest_s = cost_model.itl_while_reading_s(request, decode, reading)
        cost_s += MISSED_SLO_S * (longest_s > request.slo_itl_s)
    return _Option(cost_s, decode.num_routed, chosen)


def _cost_s(request: RequestView, chosen: Route) -> float:
    cost_s = chosen.ttft_s + EXPECTED_TOKENS * chosen.itl_s
    if request.slo_ttft_s is not None and chosen.ttft_s > request.slo_ttft_s:
        cost_s += MISSED_SLO_S
    if request.slo_itl_s is not None and chosen.itl_s > request.slo_itl_s:
        cost_s += MISSED_SLO_S
    return cost_s


# The rules


def _by_cost(request: RequestView, workers: Roster) -> Route | None:
    sources = cost_model.find_sources(request, workers.holders(request))
    decodes = _best_decodes(request, workers.decodes)
    if not decodes:
        return None
    prefills = workers.prefills
    costs_s = prefills.prefill_costs_s(request, sources)
    readings = [
        (worker, cost_model.read(request, worker, sources)) for worker in prefills.best(costs_s, NUM_CANDIDATES)
    ]
    options: list[_Option] = []
    for decode in decodes:
        options.append(_local(request, decode, sources))
        if decode.role == "aggregated" or _reads_itself(request, decode):
            continue
        paired = (
            [pair for pair in readings if pair[0].worker_id not in decode.unpaired] if decode.unpaired else readings
        )
        if not paired:  # rare: look at all
            others = [worker for worker in prefills.views if worker.worker_id not in decode.unpaired]
            paired = [(worker, cost_model.read(request, worker, sources)) for worker in others]
        if paired:
            options.append(_best_pair(request, decode, paired))
    best = min(options, key=_Option.rank)
    return _with_a_faster_path(request, best, decodes, prefills, costs_s, sources).route


def _with_a_faster_path(
    request: RequestView,
    best: _Option,
    decodes: Sequence[WorkerView],
    prefills: Side,
    costs_s: Floats,
    sources: Sequence[WorkerView],
) -> _Option:
    """Where the transfer is not hidden behind computing, a prefill worker nearer to this decode worker may be better,
    though not among the first: look at all of them, for this one."""
    if best.route.prefill is None or len(prefills) <= NUM_CANDIDATES:
        return best
    (decode,) = (worker for worker in decodes if worker.worker_id == best.route.decode)
    prefill = prefills.get(best.route.prefill)
    assert prefill is not None, "chosen among these"
    num_bytes = _num_pulled_bytes(request, decode)
    transfer_s = num_bytes / cost_model.bytes_per_s(decode, prefill)
    if transfer_s <= cost_model.read(request, prefill, sources).compute_s:
        return best
    pairs_s = costs_s + num_bytes / prefills.bytes_per_s(decode.bytes_per_s)
    nearer = [
        (worker, cost_model.read(request, worker, sources))
        for worker in prefills.best(pairs_s, NUM_CANDIDATES)
        if worker.worker_id not in decode.unpaired
    ]
    return min(best, _best_pair(request, decode, nearer), key=_Option.rank) if nearer else best


def _num_pulled_bytes(request: RequestView, decode: WorkerView) -> int:
    return -(-request.num_missing_tokens(decode.worker_id) // request.block_size) * request.block_bytes


def _best_pair(request: RequestView, decode: WorkerView, prefills: Sequence[tuple[WorkerView, Reading]]) -> _Option:
    """The prefill worker with which this decode worker is first to have the first token."""
    num_bytes, paths = _num_pulled_bytes(request, decode), decode.bytes_per_s
    best, best_rank = prefills[0], (math.inf, 0, "")
    for pair in prefills:
        prefill, reading = pair
        pull_s = num_bytes / paths.get(prefill.worker_id, cost_model.START_BYTES_PER_S) - reading.compute_s
        first_s = prefill.queue_s + reading.read_s + (pull_s if pull_s > 0.0 else 0.0)
        first_s += cost_model.stray_s(request, prefill)
        if first_s <= best_rank[0]:
            rank = first_s, prefill.num_routed, prefill.worker_id
            if rank < best_rank:
                best, best_rank = pair, rank
    return _remote(request, best[0], decode, best[1])


def _best_decodes(request: RequestView, decodes: Side) -> list[WorkerView]:
    """Those that would decode it fastest, and those that hold most of it."""
    if len(decodes) <= NUM_CANDIDATES:
        return decodes.views
    costs_s = decodes.decode_costs_s(request)
    best = decodes.best(costs_s, NUM_CANDIDATES)
    overlap = request.overlap
    # the cost only decides among those that hold equally much
    holders = [
        (-num_blocks, costs_s[row], worker_id)
        for worker_id, num_blocks in overlap.items()
        if (row := decodes.row(worker_id)) is not None
    ]
    known = {worker.worker_id for worker in best}
    most = (decodes.get(worker_id) for *_, worker_id in nsmallest(NUM_CANDIDATES // 2, holders))
    return best + [worker for worker in most if worker is not None and worker.worker_id not in known]


def _in_turn(request: RequestView, workers: Roster) -> Route | None:
    return _by_key(request, workers, lambda worker: 0, lambda worker: 0)


def _by_load(request: RequestView, workers: Roster) -> Route | None:
    return _by_key(request, workers, _load, _load)


def _by_prefix(request: RequestView, workers: Roster) -> Route | None:
    def key(worker: WorkerView) -> tuple[int, int]:
        return request.num_missing_tokens(worker.worker_id), _load(worker)

    return _by_key(request, workers, key, key)


def _load(worker: WorkerView) -> int:
    return worker.num_waiting_tokens if worker.role == "prefill" else worker.num_sequences


def _by_key(
    request: RequestView,
    workers: Roster,
    decode_key: Callable[[WorkerView], Any],
    prefill_key: Callable[[WorkerView], Any],
) -> Route | None:
    """The worker of each kind that is first by its key; those given fewer requests first among equals."""
    decode = _first(workers.decodes.views, decode_key)
    if decode is None:
        return None
    prefill = None
    if decode.role == "decode" and not _reads_itself(request, decode):
        paired = (worker for worker in workers.prefills.views if worker.worker_id not in decode.unpaired)
        prefill = _first(paired, prefill_key)
    if prefill is None:
        return _local(request, decode, ()).route
    return _remote(request, prefill, decode, cost_model.read(request, prefill, ())).route


def _first(workers: Iterable[WorkerView], key: Callable[[WorkerView], Any]) -> WorkerView | None:
    return min(workers, key=lambda worker: (key(worker), worker.num_routed, worker.worker_id), default=None)


def _reads_itself(request: RequestView, decode: WorkerView) -> bool:
    return request.num_missing_tokens(decode.worker_id) <= request.local_prefill_tokens


POLICIES: Mapping[PolicyName, Callable[[RequestView, Roster], Route | None]] = {
    "cost": _by_cost,
    "round-robin": _in_turn,
    "least-loaded": _by_load,
    "prefix": _by_prefix,
}
