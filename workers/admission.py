"""What a newcomer gets: blocks for all its tokens, cached ones first, and whether the rest is brought or computed.

    what can be reused ──> does it fit beside those that run? ──> its blocks ──> does a fill pay? ─┬─> INCOMING
                                                                                                  └─> RUNNING

Blocks and statuses only; which sequence stands in which queue is the scheduler's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from tandem.workers.batch import BlockCopy
from tandem.workers.block_pool import BlockPool
from tandem.workers.config import WorkerConfig
from tandem.workers.reuse import BlockNames, Reuse
from tandem.workers.sequence import Sequence, Status
from tandem.workers.types import CachedTokens


class LowerTiers(Protocol):
    """Where evicted blocks go: what can be had back from there."""

    def num_held(self, keys: SequenceOf[bytes]) -> int:
        """How many of these keys, from the first on, lower tiers hold without a gap."""


class _NoTiers:
    def num_held(self, keys: SequenceOf[bytes]) -> int:
        return 0


class Admission:
    """Takes the blocks of newcomers from the pool."""

    def __init__(self, config: WorkerConfig, pool: BlockPool, names: BlockNames) -> None:
        self.tiers: LowerTiers = _NoTiers()
        self.is_fill_faster: Callable[[Sequence], bool] = lambda sequence: True
        """Whether to fetch what tiers or a peer hold beyond the pool, or to compute it. Reads the sequence's
        `num_pool_blocks`, `num_tier_blocks` and `num_source_blocks`; asked only when there is something to fetch."""
        self._local_prefill_tokens = config.local_prefill_tokens
        self._block_size = config.block_size
        self._pool = pool
        self._names = names

    def find_room(self, sequence: Sequence, headroom: int) -> Reuse | None:
        """What it would reuse, if blocks can be had for the rest and `headroom` more are left. None: they cannot."""
        reuse = self._names.find(sequence)
        if self._fits(sequence, reuse, headroom):
            return reuse
        reuse = reuse.without_copy  # its source may be the block that is missing
        return reuse if self._fits(sequence, reuse, headroom) else None

    def try_admit(self, sequence: Sequence, headroom: int) -> bool:
        """Own blocks for all its tokens: it is RUNNING, or INCOMING where somebody else is to fill some of them. At
        least one token is left to compute. False: there are not enough, and nothing has changed."""
        reuse = self.find_room(sequence, headroom)
        if reuse is None:
            return False
        self._take(sequence, reuse)
        if sequence.reads_anew:
            sequence.forget_readings()
            sequence.num_source_blocks = 0
        found = sequence.num_pool_blocks = sequence.num_registered
        keys = sequence.block_keys[found : self._names.num_matchable(sequence)]
        sequence.num_tier_blocks = 0 if sequence.reads_anew else self.tiers.num_held(keys)
        if self._is_filled(sequence):
            self._expect_fill(sequence)
        else:
            sequence.status = Status.RUNNING
        self._count_cached(sequence)
        return True

    def end_copy(self, sequence: Sequence) -> None:
        """The source of its copy, if it has one, is needed no more: the copy was made, or will not be."""
        if sequence.copy is not None:
            self._pool.release([sequence.copy.source])
            sequence.copy = None

    # Inside

    def _fits(self, sequence: Sequence, reuse: Reuse, headroom: int) -> bool:
        num_new = self._num_blocks(sequence) - len(reuse.block_ids)
        shared = reuse.block_ids if reuse.source is None else [*reuse.block_ids, reuse.source]
        return num_new + headroom <= self._pool.num_available - self._pool.count_idle(shared)

    def _take(self, sequence: Sequence, reuse: Reuse) -> None:
        """Own what is reused, and new blocks for the rest."""
        num_shared = len(reuse.block_ids)
        self._pool.share(reuse.block_ids)
        if reuse.source is not None:
            self._pool.share([reuse.source])
        sequence.block_ids = reuse.block_ids + self._pool.allocate(self._num_blocks(sequence) - num_shared)
        if reuse.source is not None:
            sequence.copy = BlockCopy(reuse.source, sequence.block_ids[num_shared], reuse.num_copied)
        sequence.num_computed = num_shared * self._block_size + reuse.num_copied
        sequence.num_registered = num_shared
        self._names.retain(sequence)

    def _num_blocks(self, sequence: Sequence) -> int:
        return -(-len(sequence.token_ids) // self._block_size)

    def _is_filled(self, sequence: Sequence) -> bool:
        """Whether somebody else brings some of its blocks: tiers or a peer, or (`wants_remote`) a handover, which is
        not worth it for the little that may be missing."""
        is_fetched = self._is_fetched(sequence)
        num_missing = sequence.num_uncomputed
        if is_fetched:
            num_here = sequence.num_pool_blocks + sequence.num_tier_blocks
            num_missing = len(sequence.token_ids) - num_here * self._block_size
        if num_missing <= self._local_prefill_tokens:
            sequence.wants_remote = False
        return is_fetched or sequence.wants_remote

    def _is_fetched(self, sequence: Sequence) -> bool:
        """Whether tiers or a peer hold blocks beyond those found here, and it pays to fetch them."""
        sequence.num_source_blocks = min(sequence.num_source_blocks, self._names.num_matchable(sequence))
        if sequence.num_tier_blocks == 0 and sequence.num_source_blocks <= sequence.num_pool_blocks:
            return False
        return self.is_fill_faster(sequence)

    def _expect_fill(self, sequence: Sequence) -> None:
        if sequence.copy is not None:  # no use: a fill brings whole blocks
            sequence.num_computed -= sequence.copy.num_tokens
            self.end_copy(sequence)
        self._pool.expect(sequence.block_ids[sequence.num_computed // self._block_size :])
        sequence.status = Status.INCOMING

    def _count_cached(self, sequence: Sequence) -> None:
        """When it comes back, it finds what it computed itself, too: no more than the first time is from elsewhere."""
        sequence.num_admissions += 1
        num_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        if sequence.num_admissions == 1:
            sequence.cached = CachedTokens(pool=num_tokens)
        elif sequence.first_token_at is None:  # nobody was told yet
            sequence.cached = sequence.cached.at_most(num_tokens)
