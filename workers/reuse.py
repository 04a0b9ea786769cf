"""Blocks and their names: what a newcomer finds of its tokens, and what its own complete blocks are called.

    newcomer ──> whole blocks that hold its first tokens                    shared with their other owners
             └─> the block that begins with most of what follows            its KV is copied into a new block

The last token is never reused: it must be computed for what follows it to be sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.workers.block_key import block_keys
from tandem.workers.block_pool import BlockPool
from tandem.workers.native_keys import chain_of_keys
from tandem.workers.prefix_cache import DEFAULT_RETENTION, PrefixCache
from tandem.workers.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Reuse:
    """`block_ids` to share; `source` (None: nothing) is the block whose first `num_copied` tokens come next."""

    block_ids: list[int]
    source: int | None = None
    num_copied: int = 0

    @property
    def without_copy(self) -> Reuse:
        return Reuse(self.block_ids)


class BlockNames:
    """Reads and extends the prefix cache on behalf of sequences. Owners are the pool's business."""

    def __init__(self, cluster_key: bytes, pool: BlockPool, cache: PrefixCache) -> None:
        self.cluster_key = cluster_key
        self.pool = pool
        self.cache = cache
        self.block_size = cache.block_size
        chain_of_keys()  # compiled now, not when the first prompt comes

    def num_matchable(self, sequence: Sequence) -> int:
        """How many whole blocks it could reuse."""
        return (len(sequence.token_ids) - 1) // self.block_size

    def find(self, sequence: Sequence) -> Reuse:
        """The most that can be reused now. Changes nothing but the sequence's keys."""
        if sequence.reads_anew:
            return Reuse([])
        cached = self._find_cached(sequence)
        forked = self._find_leader(sequence)
        return cached if forked is None or self._num_tokens(cached) > self._num_tokens(forked) else forked

    def extend_keys(self, sequence: Sequence, num_blocks: int) -> None:
        """Have the keys of its first `num_blocks` blocks."""
        keys, size = sequence.block_keys, self.block_size
        if len(keys) < num_blocks:
            rest = sequence.token_ids[len(keys) * size : num_blocks * size]
            keys += block_keys(self.cluster_key, keys[-1] if keys else sequence.root, rest, size)

    def register(self, sequence: Sequence) -> None:
        """Name its complete blocks. Where the content is cached already (two sequences computed the same), own the
        cached copy instead: so an owner of a block owns all blocks before it, which eviction relies on."""
        num_full = sequence.num_computed // self.block_size
        if sequence.num_registered >= num_full or not sequence.can_register:
            return
        self.extend_keys(sequence, num_full)
        for index in range(sequence.num_registered, num_full):
            if not self._try_register(sequence, index):
                sequence.can_register = False  # colliding keys: what follows would hang from other content
                return
            sequence.num_registered = index + 1

    def retain(self, sequence: Sequence) -> None:
        """What it found of its prompt, and owns now, is to be kept as it asks."""
        num_prompt_blocks = sequence.num_prompt_tokens // self.block_size
        found = sequence.block_ids[: sequence.num_registered]
        self.cache.retain(found[:num_prompt_blocks], sequence.retention)
        self.cache.retain(found[num_prompt_blocks:], DEFAULT_RETENTION)

    # Inside

    def _num_tokens(self, reuse: Reuse) -> int:
        return len(reuse.block_ids) * self.block_size + reuse.num_copied

    def _find_cached(self, sequence: Sequence) -> Reuse:
        num_matchable, size = self.num_matchable(sequence), self.block_size
        self.extend_keys(sequence, num_matchable)
        matched = self.cache.match(sequence.block_keys[:num_matchable], sequence.token_ids)
        start = len(matched) * size
        rest = sequence.token_ids[start : min(start + size, len(sequence.token_ids) - 1)]
        inside = self.cache.match_inside(matched[-1] if matched else None, sequence.root, rest)
        return Reuse(matched) if inside is None else Reuse(matched, *inside)

    def _find_leader(self, sequence: Sequence) -> Reuse | None:
        """The prompt that another choice of its request has in its blocks, the last, partly filled one included."""
        leader = sequence.leader
        if leader is None or leader.status not in (Status.RUNNING, Status.HELD) or leader.copy is not None:
            return None
        num_tokens = min(sequence.num_prompt_tokens, len(sequence.token_ids) - 1)
        num_blocks, num_copied = divmod(num_tokens, self.block_size)
        if leader.num_computed < num_tokens or leader.num_registered < num_blocks:
            return None
        source = leader.block_ids[num_blocks] if num_copied else None
        return Reuse(leader.block_ids[:num_blocks], source, num_copied)

    def _try_register(self, sequence: Sequence, index: int) -> bool:
        """False: its key stands for other content."""
        mine = sequence.block_ids[index]
        is_prompt = (index + 1) * self.block_size <= sequence.num_prompt_tokens
        retention = sequence.retention if is_prompt else DEFAULT_RETENTION
        kept = self.cache.add(
            sequence.block_keys[index],
            sequence.block_ids[index - 1] if index else None,
            sequence.token_ids[index * self.block_size : (index + 1) * self.block_size],
            mine,
            root=sequence.root,
            retention=retention,
        )
        if kept is None:
            return False
        if kept != mine:
            self.pool.share([kept])
            sequence.block_ids[index] = kept
            if sequence.in_flight:
                sequence.replaced.append(mine)
            else:
                self.pool.release([mine])
            self.cache.retain([kept], retention)
        return True
