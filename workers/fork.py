"""Beams go on from each other: the blocks of a parent pass to its first child, the others share them and copy the last.

All that is full is shared, also if nobody named it; the partly filled last block is written by every child, so each
but the first gets a copy, made with its next chunk. A child for which there is no block or no room waits in the queue
and computes what it does not find in the cache, as a preempted sequence does.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from tandem.workers.batch import BlockCopy
from tandem.workers.beams import Fork
from tandem.workers.block_pool import BlockPool
from tandem.workers.sequence import Sequence


@dataclass(slots=True)
class _Beam:
    """What a sequence is to become. `block_ids` is None for one that has to wait."""

    token_ids: list[int]
    block_keys: list[bytes]
    block_ids: list[int] | None = None
    num_registered: int = 0
    num_computed: int = 0
    can_register: bool = True
    copy: BlockCopy | None = None


def fork(pool: BlockPool, block_size: int, sequences: SequenceOf[Sequence], forks: SequenceOf[Fork], room: int) -> None:
    """Sequence i becomes forks[i]'s child; those behind the last fork lose their blocks. None may be in flight, and a
    parent's tokens are all computed, or it owns no blocks. At most `room` get blocks. Statuses are the caller's."""
    heirs: set[int] = set()
    beams: list[_Beam] = []
    parents = {one.parent for one in forks}
    for index, sequence in enumerate(sequences):
        if index not in parents:
            pool.release(sequence.block_ids)
    for one in forks:
        parent = sequences[one.parent]
        beam = _Beam([*parent.token_ids, one.token_id], list(parent.block_keys))
        has_blocks = room > 0 and _try_own(pool, block_size, beam, parent, is_heir=one.parent not in heirs)
        if has_blocks:
            heirs.add(one.parent)
            room -= 1
        beams.append(beam)
    for index, sequence in enumerate(sequences):
        assert sequence.copy is None, "a copy that was not made"
        if index in parents - heirs:
            pool.release(sequence.block_ids)
    for sequence, beam in zip(sequences, beams):
        sequence.token_ids, sequence.block_keys = beam.token_ids, beam.block_keys
        sequence.block_ids, sequence.copy = beam.block_ids or [], beam.copy
        sequence.num_registered, sequence.num_computed = beam.num_registered, beam.num_computed
        sequence.can_register = beam.can_register
    for sequence in sequences[len(beams) :]:
        sequence.block_ids, sequence.num_registered, sequence.num_computed = [], 0, 0


def _try_own(pool: BlockPool, block_size: int, beam: _Beam, parent: Sequence, *, is_heir: bool) -> bool:
    """False: the parent has no blocks, or there is none for the copy."""
    if not parent.block_ids:
        return False
    num_full, num_in_last = divmod(parent.num_computed, block_size)
    if is_heir:
        beam.block_ids = parent.block_ids
    else:
        if num_in_last and pool.num_available == 0:
            return False
        shared = parent.block_ids[:num_full]
        pool.share(shared)
        beam.block_ids = list(shared)
        if num_in_last:
            source = parent.block_ids[num_full]
            pool.share([source])
            beam.block_ids += pool.allocate(1)
            beam.copy = BlockCopy(source, beam.block_ids[-1], num_in_last)
    beam.num_registered, beam.num_computed = parent.num_registered, parent.num_computed
    beam.can_register = parent.can_register
    return True
