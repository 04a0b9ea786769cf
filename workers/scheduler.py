"""What the next step computes, and who owns blocks for it: queues and blocks, no tensors, no clocks, no I/O.

First come, first served, where a priority counts as youth. A sequence is admitted when blocks for all its tokens can
be had at once, and one more for each that runs already; later it grows by one block at a time. When a growing sequence
finds no block, the youngest running one is preempted: its blocks stay cached, it keeps its place in the order, and it
computes the rest again. The oldest is never preempted for a younger one, so somebody always gets on.

While a step is in flight (between `schedule` and the last `advance`), no method frees a block of a sequence that is
`in_flight`. The next step may be decided meanwhile, if `can_run_ahead`: with tokens that the step in flight computes or
samples as if they were there. Only `advance` counts and names them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from tandem.workers.admission import Admission
from tandem.workers.batch import BlockCopy
from tandem.workers.beams import Fork
from tandem.workers.block_pool import BlockPool
from tandem.workers.by_age import ByAge
from tandem.workers.config import WorkerConfig
from tandem.workers.fork import fork
from tandem.workers.prefix_cache import PrefixCache
from tandem.workers.reuse import BlockNames
from tandem.workers.sequence import Sequence, Status
from tandem.workers.types import FillSource


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_tokens` tokens of a sequence, from `start`: one when it decodes, more when it reads its prompt."""

    sequence: Sequence
    start: int
    num_tokens: int
    is_sampled: bool
    """Whether the token that follows is sampled."""
    copy: BlockCopy | None = None
    """To be made first."""


def _chunk(sequence: Sequence, num_tokens: int) -> Chunk:
    """Its next tokens that are due. A copy is part of the first step of a sequence that has one."""
    copy = None if sequence.in_flight else sequence.copy
    start = sequence.num_computed + sequence.num_launched
    is_sampled = num_tokens == sequence.num_due and sequence.pooling is None
    return Chunk(sequence, start, num_tokens, is_sampled, copy)


class Scheduler:
    """Owns the queues. It, and what it is made of (admission.py, fork.py, reuse.py), take blocks and give them back."""

    def __init__(self, config: WorkerConfig, pool: BlockPool, cache: PrefixCache) -> None:
        self.config = config
        self.pool = pool
        self.cache = cache
        self.names = BlockNames(config.cluster_key, pool, cache)
        self.admission = Admission(config, pool, self.names)
        self.block_size = config.block_size
        # Even when every other one decodes, a sequence that reads its prompt gets a whole block into the step.
        self.max_running = min(config.max_num_seqs, config.max_num_batched_tokens - config.block_size + 1)
        self.waiting = ByAge()
        self.running = ByAge()
        self.incoming: dict[int, Sequence] = {}
        """By order. Also those that were cancelled and whose blocks may still be written."""
        self.num_preemptions = 0

    @property
    def num_admitted(self) -> int:
        """Sequences that own blocks to go on with: RUNNING and INCOMING ones."""
        return len(self.running) + len(self.incoming)

    # The step

    def can_run_ahead(self) -> bool:
        """Whether all that run can grow without preemption, which the blocks of a step in flight do not allow."""
        return sum(map(self._needs_block, self._due())) <= self.pool.num_available

    def schedule(self, on_incoming: Callable[[Sequence], None], *, is_ahead: bool = False) -> list[Chunk]:
        """Decodes first, then prompts that are being read, then newcomers, until the budget is spent.

        `on_incoming` gets each sequence whose KV somebody else is to compute. It must not call back. `is_ahead`:
        another step is in flight, and it `can_run_ahead`.
        """
        budget = self.config.max_num_batched_tokens
        chunks = [_chunk(sequence, 1) for sequence in self._decodes()]
        budget -= len(chunks)
        for sequence in self.running:
            if sequence.num_due > 1:
                budget -= self._cut(sequence, budget, chunks)
        if not chunks and not is_ahead:
            self._make_way()
        while self._can_admit(budget):
            sequence = self.waiting.oldest
            if not self._try_admit(sequence):
                break
            if sequence.status is Status.INCOMING:
                on_incoming(sequence)
            else:
                budget -= self._cut(sequence, budget, chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.in_flight += 1
            sequence.num_launched += chunk.num_tokens
            sequence.num_pending += chunk.is_sampled
        return chunks

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of `num_tokens` more tokens is complete: name the blocks that are full now."""
        sequence.num_computed += num_tokens
        self.names.register(sequence)
        if sequence.siblings and sequence.is_prompt_computed:
            self._unblock_siblings(sequence)

    def fork(self, sequences: SequenceOf[Sequence], forks: SequenceOf[Fork]) -> None:
        """The beams of a request go on from each other, see fork.py."""
        room = self.max_running - self.num_admitted
        room += sum(sequence.status is Status.RUNNING for sequence in sequences)
        for sequence in sequences:
            if sequence.status is Status.RUNNING:
                self.running.remove(sequence)
            elif sequence.status is Status.WAITING:
                self.waiting.remove(sequence)
            sequence.status = Status.BLOCKED
        fork(self.pool, self.block_size, sequences, forks, room)
        for sequence in sequences[: len(forks)]:
            sequence.status = Status.RUNNING if sequence.block_ids else Status.WAITING
            (self.running if sequence.block_ids else self.waiting).add(sequence)

    # Queues

    def add(self, sequence: Sequence) -> None:
        """WAITING, or BLOCKED until its leader lets it go."""
        if sequence.status is Status.WAITING:
            self.waiting.add(sequence)

    def remove(self, sequence: Sequence, status: Status) -> None:
        """Take a sequence out of its queue: FINISHED gives its blocks back, HELD keeps them.

        Blocks of a step in flight are given back in `settle`, those of a handover in `end_incoming`.
        """
        previous, sequence.status = sequence.status, status
        if previous is Status.WAITING:
            self.waiting.remove(sequence)
        elif previous is Status.RUNNING:
            self.running.remove(sequence)
        self._unblock_siblings(sequence)
        if status is Status.FINISHED and previous is not Status.INCOMING and not sequence.in_flight:
            self._release(sequence)

    def settle(self, chunk: Chunk) -> None:
        """The oldest step that its sequence is part of has ended. Frees its blocks if that has ended before, by cancel
        or by a token that came while a later step was under way, and no step uses them any more."""
        sequence = chunk.sequence
        sequence.in_flight -= 1
        sequence.num_launched -= chunk.num_tokens
        sequence.num_pending -= chunk.is_sampled
        if chunk.copy is not None:
            self.admission.end_copy(sequence)
        if sequence.replaced:  # by the step before: the next one, if it is in flight, was told of the new ones
            self.pool.release(sequence.replaced)
            sequence.replaced = []
        if sequence.is_finished and not sequence.in_flight:
            self._release(sequence)

    # Fills

    def blocks_arrived(self, sequence: Sequence, num_tokens: int, source: FillSource) -> None:
        """The first `num_tokens` (whole blocks) of an INCOMING sequence have KV: anybody may share these blocks."""
        first, end = self._first_incoming(sequence), num_tokens // self.block_size
        assert num_tokens == end * self.block_size, f"{num_tokens} tokens are not whole blocks"
        assert end <= len(sequence.block_ids), f"{num_tokens} tokens for {len(sequence.block_ids)} blocks"
        if end <= first:
            return
        num_countable = min(num_tokens, sequence.num_prompt_tokens) - sequence.num_computed
        if sequence.num_admissions == 1 and num_countable > 0:
            sequence.cached = sequence.cached.plus(source, num_countable)
        self.pool.arrived(sequence.block_ids[first:end])
        self.advance(sequence, num_tokens - sequence.num_computed)

    def hold_cached(self, sequence: Sequence, max_blocks: int) -> int:
        """Give a sequence that is in no queue what is cached of its first full blocks; returns how many these are."""
        num_matchable = min(max_blocks, len(sequence.token_ids) // self.block_size)
        self.names.extend_keys(sequence, num_matchable)
        sequence.block_ids = self.cache.match(sequence.block_keys, sequence.token_ids)
        self.pool.share(sequence.block_ids)
        sequence.num_registered = len(sequence.block_ids)
        sequence.num_computed = sequence.num_registered * self.block_size
        return sequence.num_registered

    def expect_held(self, sequence: Sequence, num_blocks: int) -> None:
        """So many blocks more, for lower tiers to fill (INCOMING), as far as running ones do not need them to grow."""
        num_blocks = min(num_blocks, self.pool.num_available - self.num_admitted)
        if num_blocks > 0:
            fresh = self.pool.allocate(num_blocks)
            self.pool.expect(fresh)
            sequence.block_ids = sequence.block_ids + fresh
            sequence.num_tier_blocks = num_blocks
            sequence.status = Status.INCOMING
            self.incoming[sequence.order] = sequence

    def hold_arrived(self, sequence: Sequence) -> None:
        """The fill of blocks that are held for somebody else has ended: what has not arrived is given back."""
        num_arrived = self._first_incoming(sequence)
        sequence.block_ids, missing = sequence.block_ids[:num_arrived], sequence.block_ids[num_arrived:]
        self.pool.release(missing)
        del self.incoming[sequence.order]
        sequence.status = Status.HELD

    def fill_ended(self, sequence: Sequence, num_valid_tokens: int) -> None:
        """The fill has ended: the first `num_valid_tokens` have KV. The sequence joins the batch."""
        self.pool.arrived(sequence.block_ids[self._first_incoming(sequence) :])
        del self.incoming[sequence.order]
        sequence.wants_remote = False
        sequence.status = Status.RUNNING
        self.running.add(sequence)
        self.advance(sequence, max(0, num_valid_tokens - sequence.num_computed))

    def end_incoming(self, sequence: Sequence) -> None:
        """Give back the blocks of a cancelled sequence that was INCOMING: nobody writes into them any more."""
        del self.incoming[sequence.order]
        self._release(sequence)

    def quarantine(self, sequence: Sequence, block_ids: list[int]) -> bool:
        """Set blocks of an INCOMING sequence aside and give it fresh ones in their place.

        False when there were none: the sequence was sent back to the queue, to compute everything here. A cancelled
        one needs no fresh blocks and just loses these (True).
        """
        assert set(block_ids) <= set(sequence.block_ids[self._first_incoming(sequence) :]), "not its incoming blocks"
        aside = set(block_ids)
        self.pool.quarantine(block_ids)
        if sequence.is_finished or len(block_ids) > self.pool.num_available:
            sequence.block_ids = [block_id for block_id in sequence.block_ids if block_id not in aside]
            if not sequence.is_finished:
                del self.incoming[sequence.order]
                self._requeue(sequence)
            return sequence.is_finished
        fresh = self.pool.allocate(len(block_ids))
        self.pool.expect(fresh)
        replacement = dict(zip(block_ids, fresh))
        sequence.block_ids = [replacement.get(block_id, block_id) for block_id in sequence.block_ids]
        return True

    # Admission, growth, preemption

    def _decodes(self) -> list[Sequence]:
        """Running sequences with one token to compute, each with a block to write it into."""
        decodes: list[Sequence] = []
        for sequence in self._due():
            if sequence.status is Status.RUNNING and self._try_grow(sequence):  # unless it was preempted for another
                decodes.append(sequence)
        return decodes

    def _due(self) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.num_due == 1 and self._goes_on(sequence)]

    def _goes_on(self, sequence: Sequence) -> bool:
        """Not, if the token that is being sampled is its last one whatever it is."""
        if not sequence.num_pending:
            return True
        num_tokens = len(sequence.token_ids) + sequence.num_pending
        if sequence.hold or num_tokens >= self.config.max_model_len:
            return False
        return num_tokens - sequence.num_prompt_tokens < sequence.params.max_tokens

    def _needs_block(self, sequence: Sequence) -> bool:
        return len(sequence.block_ids) * self.block_size < len(sequence.token_ids) + sequence.num_pending

    def _try_grow(self, sequence: Sequence) -> bool:
        """Have a block for its last token, from the youngest if need be. False: it was the youngest itself."""
        if not self._needs_block(sequence):
            return True
        while self.pool.num_available == 0:
            victim = next(candidate for candidate in reversed(self.running) if not candidate.hold)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_ids += self.pool.allocate(1)
        return True

    def _make_way(self) -> None:
        """Nothing that runs has anything to compute: beams that wait for others of theirs. If the oldest in the queue
        cannot be admitted beside them, the younger ones give way: two searches would else wait for each other."""
        parked = [sequence for sequence in reversed(self.running) if sequence.num_uncomputed == 0 and sequence.beams]
        for victim in parked:
            if not self.waiting or victim.rank < self.waiting.oldest.rank or self._could_admit_oldest():
                return
            self._preempt(victim)

    def _could_admit_oldest(self) -> bool:
        if self.num_admitted >= self.max_running:
            return False
        oldest = self.waiting.oldest
        return self.admission.find_room(oldest, self._headroom(oldest)) is not None

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue. Never one in HELD or with `hold`: blocks that were promised to others stay."""
        assert not sequence.in_flight, "a step uses its blocks"
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.num_computed = 0
        sequence.wants_remote = False
        sequence.num_source_blocks = 0  # as the handover: who failed once is not asked again
        sequence.status = Status.WAITING
        self.waiting.add(sequence)

    def _can_admit(self, budget: int) -> bool:
        """A newcomer that reads its own prompt needs budget for a block: admitted later, it may find more cached."""
        if not self.waiting or self.num_admitted >= self.max_running:
            return False
        oldest = self.waiting.oldest
        return budget >= self.block_size or oldest.wants_remote or oldest.num_source_blocks > 0

    def _try_admit(self, sequence: Sequence) -> bool:
        if not self.admission.try_admit(sequence, self._headroom(sequence)):
            return False
        self.waiting.remove(sequence)
        if sequence.status is Status.INCOMING:
            self.incoming[sequence.order] = sequence
        else:
            self.running.add(sequence)
        return True

    def _headroom(self, newcomer: Sequence) -> int:
        """Blocks to leave free: one for each that may grow. Without it, an overloaded worker admits and preempts in
        turn, and computes 13 % of its tokens twice (README.md). Sequences with `hold` or `pooling` do not grow."""
        return 0 if newcomer.hold or newcomer.pooling is not None else self.num_admitted

    def _cut(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Append the largest chunk that fits: the rest, or up to a block border."""
        num_tokens = sequence.num_due
        if num_tokens > budget:
            num_tokens = budget - (sequence.num_computed + sequence.num_launched + budget) % self.block_size
        if num_tokens > 0:
            chunks.append(_chunk(sequence, num_tokens))
        return max(0, num_tokens)

    # Blocks

    def _first_incoming(self, sequence: Sequence) -> int:
        """Index of the first block of an INCOMING sequence that is still being filled."""
        return sequence.num_computed // self.block_size

    def _release(self, sequence: Sequence) -> None:
        self.admission.end_copy(sequence)
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_registered = 0

    def _unblock_siblings(self, leader: Sequence) -> None:
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            if sibling.status is Status.BLOCKED:
                sibling.leader = leader
                sibling.block_keys = leader.block_keys[: leader.num_prompt_tokens // self.block_size]
                sibling.status = Status.WAITING
                self.waiting.add(sibling)
