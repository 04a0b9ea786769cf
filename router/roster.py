"""All workers in columns: one array per quantity that the policy compares over all of them, one row per worker.

    Roster ── prefills: Side ──┐
           └─ decodes:  Side ──┴─> held_tokens, prefill_costs_s, decode_costs_s [num_workers], best

A decision over a thousand workers is mostly these comparisons. A loop over records takes milliseconds; over arrays that
are kept up to date row by row, a hundredth of that. The formulas are cost_model.py's, and a test holds them to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt

from tandem.router.cost_model import EXPECTED_TOKENS, START_BYTES_PER_S, STRAY_SHARE, RequestView, WorkerView
from tandem.router.rendezvous import NUM_PREFERRED, Hashes, first_rows, hash_of

Floats = npt.NDArray[np.float64]
"""[num_workers]. Counts are floats, too: exact up to 2^53."""
_NUM_COLUMNS = 10


class Side:
    """Workers of one kind, by id. `views` and the columns change in place."""

    def __init__(self, views: Iterable[WorkerView]) -> None:
        self.views = sorted(views, key=lambda view: view.worker_id)
        self._rows = {view.worker_id: row for row, view in enumerate(self.views)}
        self._hashes: Hashes = np.array([hash_of(view.worker_id) for view in self.views], np.uint64)
        self._columns: Floats = np.empty((_NUM_COLUMNS, len(self.views)))  # [quantity, worker]
        for view in self.views:
            self.put(view)
        (
            self.num_sequences,
            self.num_waiting_tokens,
            self.num_available_blocks,
            self.num_routed,
            self.max_num_seqs,
            self.prefill_token_s,
            self.prefill_attended_s,
            self.decode_step_s,
            self.decode_sequence_s,
            self.handover_s,
        ) = self._columns

    def put(self, view: WorkerView) -> None:
        """What is known of this worker now; it has a row already."""
        row, speeds = self._rows[view.worker_id], view.speeds
        self.views[row] = view
        self._columns[:, row] = (
            view.num_sequences,
            view.num_waiting_tokens,
            view.num_available_blocks,
            view.num_routed,
            np.inf if view.max_num_seqs is None else view.max_num_seqs,
            speeds.prefill_token_s,
            speeds.prefill_attended_s,
            speeds.decode_step_s,
            speeds.decode_sequence_s,
            speeds.handover_s,
        )

    def __len__(self) -> int:
        return len(self.views)

    def get(self, worker_id: str) -> WorkerView | None:
        row = self._rows.get(worker_id)
        return None if row is None else self.views[row]

    def row(self, worker_id: str) -> int | None:
        return self._rows.get(worker_id)

    def best(self, costs_s: Floats, count: int) -> list[WorkerView]:
        """The `count` cheapest, those that were given fewer requests first among equals."""
        if len(self.views) <= count:
            return list(self.views)
        limit_s = np.partition(costs_s, count - 1)[count - 1]
        near = np.flatnonzero(costs_s <= limit_s)
        order = np.lexsort((self.num_routed[near], costs_s[near]))  # stable: by id at last
        return [self.views[row] for row in near[order[:count]]]

    def held_tokens(self, request: RequestView) -> Floats:
        """`num_held_tokens` of each worker."""
        held = np.zeros(len(self.views))
        for worker_id in request.overlap:
            row = self._rows.get(worker_id)
            if row is not None:
                held[row] = request.num_held_tokens(worker_id)
        return held

    def bytes_per_s(self, measured: Mapping[str, float]) -> Floats | float:
        """Bandwidth to each of them, as one worker measured it."""
        if not measured:
            return START_BYTES_PER_S
        return np.array([measured.get(worker_id, START_BYTES_PER_S) for worker_id in self._rows])

    def prefill_costs_s(self, request: RequestView, sources: Sequence[WorkerView]) -> Floats:
        """queue(w) + read(w) + stray(w) of each; a fetch is taken to come from the best source."""
        held = self.held_tokens(request)
        read_s = self._compute_s(request, held)
        if sources:
            num_blocks = request.num_held_tokens(sources[0].worker_id) // request.block_size
            num_fetched = num_blocks - np.floor(held / request.block_size)
            fetch_s = self.handover_s + num_fetched * request.block_bytes / self.bytes_per_s(sources[0].bytes_per_s)
            fetch_s += self._compute_s(request, num_blocks * request.block_size)
            read_s = np.where(num_fetched > 0, np.minimum(read_s, fetch_s), read_s)
        costs_s: Floats = self.num_waiting_tokens * self.prefill_token_s + read_s
        if request.preferred:
            costs_s += self._strangeness(request) * request.block_size * self.prefill_token_s
        return costs_s

    def _compute_s(self, request: RequestView, held: Floats | int) -> Floats:
        num_tokens = request.num_prompt_tokens
        mean_attended = (num_tokens + held) * 0.5
        compute_s: Floats = (num_tokens - held) * (self.prefill_token_s + self.prefill_attended_s * mean_attended)
        return compute_s

    def decode_costs_s(self, request: RequestView) -> Floats:
        """EXPECTED_TOKENS * itl(w) + room(w) + stray(w) of each."""
        joined = self.num_sequences + request.num_choices
        answer_s = EXPECTED_TOKENS * (self.decode_step_s + self.decode_sequence_s * joined)
        missing = request.num_prompt_tokens - self.held_tokens(request)
        num_needed = np.ceil(missing / request.block_size) + request.num_choices - 1
        is_full = num_needed > self.num_available_blocks
        share_ahead = np.maximum(joined / self.max_num_seqs - 1.0, 0.0)  # infinitely many places: none
        costs_s: Floats = answer_s * (1.0 + is_full + share_ahead)
        if request.preferred:
            costs_s += self._strangeness(request) * EXPECTED_TOKENS * self.decode_sequence_s
        return costs_s

    def _strangeness(self, request: RequestView) -> Floats:
        """`stray_s` of each worker, in units of the least load."""
        preferred = np.zeros(len(self.views))
        for worker_id, preference in request.preferred.items():
            row = self._rows.get(worker_id)
            if row is not None:
                preferred[row] = preference
        return STRAY_SHARE * (1.0 - preferred)

    def preferred(self, key: int) -> dict[str, float]:
        """What `RequestView.preferred` says of them to a request with this key."""
        rows = first_rows(key, self._hashes)
        return {self.views[row].worker_id: 1.0 - place / NUM_PREFERRED for place, row in enumerate(rows)}


class Roster:
    """All workers that are there. Who comes or goes makes a new one; who changes is `put`."""

    def __init__(self, views: Iterable[WorkerView]) -> None:
        views = list(views)
        self.prefills = Side(view for view in views if view.role == "prefill")
        self.decodes = Side(view for view in views if view.role != "prefill")
        """Aggregated workers among them."""

    def __iter__(self) -> Iterator[WorkerView]:
        yield from self.prefills.views
        yield from self.decodes.views

    def put(self, view: WorkerView) -> None:
        (self.prefills if view.role == "prefill" else self.decodes).put(view)

    def get(self, worker_id: str) -> WorkerView | None:
        return self.prefills.get(worker_id) or self.decodes.get(worker_id)

    def without(self, avoid: AbstractSet[str]) -> Roster:
        return Roster(view for view in self if view.worker_id not in avoid)

    def preferred(self, key: int) -> dict[str, float]:
        """`RequestView.preferred` of a request with this key."""
        return self.prefills.preferred(key) | self.decodes.preferred(key)

    def holders(self, request: RequestView) -> list[WorkerView]:
        """Workers that are said to hold some of the prompt."""
        found = (self.get(worker_id) for worker_id in request.overlap)
        return [view for view in found if view is not None]
