"""What the scheduler decided, as the runner takes it: chunks of sequences become a batch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from tandem.workers.batch import Batch, BatchItem, PoolSpec, SampleSpec, ScoreSpec
from tandem.workers.scheduler import Chunk
from tandem.workers.sequence import Sequence


def num_attended(item: BatchItem) -> int:
    """Each token attends to all before it and to itself."""
    num_tokens = len(item.token_ids)
    return num_tokens * item.start + num_tokens * (num_tokens + 1) // 2


def build_batch(chunks: SequenceOf[Chunk], block_size: int) -> Batch:
    """Lists in it are the sequences' own where they are long."""
    copies = tuple(chunk.sequence.copy for chunk in chunks if chunk.sequence.copy is not None)
    return Batch(tuple(_item(chunk, block_size) for chunk in chunks), copies)


def _item(chunk: Chunk, block_size: int) -> BatchItem:
    sequence = chunk.sequence
    end = sequence.num_computed + chunk.num_tokens
    sample = None
    if end == len(sequence.token_ids) and sequence.pooling is None:
        sample = SampleSpec(
            *(sequence.params, sequence.choice, end, sequence.token_ids, sequence.num_prompt_tokens),
            sequence.constraint,
        )
    return BatchItem(
        *(sequence.token_ids[sequence.num_computed : end], sequence.num_computed, sequence.block_ids, sample),
        *(_score(sequence, end), _pool(sequence, end, block_size)),
    )


def _score(sequence: Sequence, end: int) -> ScoreSpec | None:
    """Of the prompt's tokens that follow those computed now."""
    num_top = sequence.params.num_prompt_logprobs
    if num_top is None or not sequence.needs_scores:
        return None
    assert len(sequence.prompt_logprobs) == sequence.num_computed, "tokens that nobody scored"
    last = min(end + 1, sequence.num_prompt_tokens)
    return ScoreSpec(sequence.token_ids[sequence.num_computed + 1 : last], num_top)


def _pool(sequence: Sequence, end: int, block_size: int) -> PoolSpec | None:
    """Of a mean, all chunks have a part."""
    mode, start = sequence.pooling, sequence.num_computed
    if mode == "mean":
        assert start % block_size == 0, "sums of whole blocks do not depend on chunks"
        return PoolSpec(mode, block_size)
    is_theirs = (mode == "first" and start == 0) or (mode == "last" and end == len(sequence.token_ids))
    return PoolSpec(mode, block_size) if mode is not None and is_theirs else None
