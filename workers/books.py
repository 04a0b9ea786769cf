"""The books of the pool against those of the sequences."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.workers.block_pool import BlockPool
from tandem.workers.sequence import Sequence


def check_owners(pool: BlockPool, sequences: Iterable[Sequence]) -> None:
    """Raises AssertionError unless each block has as many owners as there are sequences, of all that may own some,
    that say so."""
    owners = [0] * pool.num_blocks
    for sequence in sequences:
        for block_id in (*sequence.block_ids, *sequence.replaced):
            owners[block_id] += 1
        if sequence.copy is not None:
            owners[sequence.copy.source] += 1
    for block_id, num in enumerate(owners):
        assert num == pool.num_owners(block_id), f"block {block_id}: {num} sequences own it"
