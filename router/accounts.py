"""What the gateway knows of each worker, kept ready for the policy: its latest snapshot, what this gateway has given it
since, and speeds that can be compared. No I/O: `workers.py` feeds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from tandem.router.cost_model import Speeds, WorkerView
from tandem.workers.types import WorkerAddress, WorkerSnapshot, WorkerSpeeds

ALIKE = 1.5
"""Speeds that differ from the middle one by less than this factor are taken to be it: measurements are noisy, workers
on shared cores slow each other down, and of two equal ones the luckier would be given everything."""
SMOOTHING = 0.1
NUM_STALE_NOTES = 30
"""Snapshots, one a second, without a new measurement, after which what a worker measured before counts no more. One
that was slow once, under somebody else's load, would otherwise never be asked again while others are idle."""


class FleetSpeeds:
    """All workers' speeds together. A worker that has not measured something yet is taken to be like the others."""

    def __init__(self) -> None:
        self._told: dict[str, WorkerSpeeds] = {}
        self._num_unchanged: dict[str, int] = {}
        """By worker: snapshots in a row that told the same."""
        self._middle = Speeds()
        self._num_notes = 0
        self._handover_s: float | None = None
        self._num_notes_since_handover = 0

    def note(self, worker_id: str, speeds: WorkerSpeeds) -> None:
        """A worker's snapshot has come. The middle is taken anew once per round of heartbeats."""
        is_unchanged = self._told.get(worker_id) == speeds
        self._num_unchanged[worker_id] = self._num_unchanged.get(worker_id, 0) + 1 if is_unchanged else 0
        self._told[worker_id] = speeds
        self._num_notes_since_handover += 1
        if self._num_notes_since_handover > NUM_STALE_NOTES * len(self._told):
            self._handover_s = None  # some slow ones must not keep everything where it is decoded for ever
        self._num_notes += 1
        if self._num_notes >= len(self._told):
            self._num_notes = 0
            self._middle = self._take_middle()

    def forget(self, worker_id: str) -> None:
        self._told.pop(worker_id, None)
        self._num_unchanged.pop(worker_id, None)

    def note_handover(self, seconds: float) -> None:
        self._num_notes_since_handover = 0
        if self._handover_s is None:
            self._handover_s = seconds
        self._handover_s += SMOOTHING * (min(seconds, 4 * self._handover_s) - self._handover_s)

    def of(self, worker_id: str) -> Speeds:
        told = WorkerSpeeds() if self._is_stale(worker_id) else self._told.get(worker_id, WorkerSpeeds())
        middle = self._middle
        return Speeds(
            prefill_token_s=_unless_alike(told.prefill_token_s, middle.prefill_token_s),
            prefill_attended_s=_unless_alike(told.prefill_attended_s, middle.prefill_attended_s),
            decode_step_s=_unless_alike(told.decode_step_s, middle.decode_step_s),
            decode_sequence_s=_unless_alike(told.decode_sequence_s, middle.decode_sequence_s),
            handover_s=middle.handover_s if self._handover_s is None else self._handover_s,
        )

    def _is_stale(self, worker_id: str) -> bool:
        return self._num_unchanged.get(worker_id, 0) >= NUM_STALE_NOTES

    def _take_middle(self) -> Speeds:
        measured: dict[str, float] = {}
        fresh = [speeds for worker_id, speeds in self._told.items() if not self._is_stale(worker_id)]
        for field in WorkerSpeeds.__struct_fields__:
            values = [value for speeds in fresh or self._told.values() if (value := getattr(speeds, field)) is not None]
            if values:
                measured[field] = median(values)
        return Speeds(**measured)


def _unless_alike(told: float | None, middle: float) -> float:
    return middle if told is None or middle / ALIKE <= told <= middle * ALIKE else told


@dataclass(frozen=True, slots=True)
class Charge:
    """Something that this gateway has put on a worker's account."""

    num_sequences: int
    num_tokens: int
    round: int
    """Of the account: which snapshot was the latest."""


class WorkerAccount:
    """One incarnation of one worker. `view` is made when it is asked for and something has changed."""

    def __init__(
        self,
        address: WorkerAddress,
        fleet: FleetSpeeds,
        on_change: Callable[[WorkerAccount], None] = lambda account: None,
    ) -> None:
        self.address = address
        self.num_routed = 0
        self.num_sequences = 0
        """Sequences of this gateway that the worker decodes now."""
        self.num_prefill_tokens = 0
        """Prompt tokens that this gateway wants it to compute and that are not yet decoding."""
        self._fleet = fleet
        self._on_change = on_change
        """Called when the latest view is no longer what is known, once per view."""
        self._snapshot: WorkerSnapshot | None = None
        self._round = 0
        self._num_new_sequences = 0
        self._num_new_tokens = 0
        """Of these, what came after the snapshot."""
        self._unpaired: frozenset[str] = frozenset()
        self._bytes_per_s: dict[str, float] = {}
        self._view: WorkerView | None = None

    def take_snapshot(self, snapshot: WorkerSnapshot) -> None:
        self._fleet.note(self.address.worker_id, snapshot.speeds)
        self._snapshot = snapshot
        self._round += 1
        self._num_new_sequences = self._num_new_tokens = 0
        self._change()

    def take_pairs(self, unpaired: frozenset[str], bytes_per_s: dict[str, float]) -> None:
        """Who it must not take KV from, and how fast KV comes from the others."""
        self._unpaired, self._bytes_per_s = unpaired, bytes_per_s
        self._change()

    def charge(self, *, num_sequences: int = 0, num_tokens: int = 0) -> Charge:
        """Something is given to it. `num_routed` is the caller's to count."""
        charge = Charge(num_sequences, num_tokens, self._round)
        self._add(charge, 1)
        return charge

    def release(self, charge: Charge) -> None:
        self._add(charge, -1)

    def _add(self, charge: Charge, sign: int) -> None:
        self.num_sequences += sign * charge.num_sequences
        self.num_prefill_tokens += sign * charge.num_tokens
        if charge.round == self._round:
            self._num_new_sequences += sign * charge.num_sequences
            self._num_new_tokens += sign * charge.num_tokens
        self._change()

    def _change(self) -> None:
        if self._view is not None:
            self._view = None
            self._on_change(self)

    def view(self) -> WorkerView:
        """The snapshot may be a second old, and knows other gateways' requests; our own counts are exact."""
        if self._view is None:
            self._view = self._make_view()
        return self._view

    def _make_view(self) -> WorkerView:
        snapshot = self._snapshot
        assert snapshot is not None, "only ready workers are viewed"
        known_sequences = snapshot.num_running + snapshot.num_waiting + self._num_new_sequences
        return WorkerView(
            worker_id=self.address.worker_id,
            role=self.address.role,
            num_sequences=max(self.num_sequences, known_sequences),
            num_waiting_tokens=max(self.num_prefill_tokens, snapshot.num_waiting_tokens + self._num_new_tokens),
            num_available_blocks=snapshot.blocks.free + snapshot.blocks.cached,
            num_routed=self.num_routed,
            unpaired=self._unpaired,
            speeds=self._fleet.of(self.address.worker_id),
            chunk_tokens=snapshot.max_num_batched_tokens,
            max_num_seqs=snapshot.max_num_seqs,
            bytes_per_s=self._bytes_per_s,
        )
