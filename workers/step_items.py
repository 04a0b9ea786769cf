"""What the scheduler decided, as the runner takes it: chunks of sequences become a batch."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from types import MappingProxyType

from tandem.workers.batch import Batch, BatchItem, PoolSpec, SampleSpec, ScoreSpec
from tandem.workers.scheduler import Chunk
from tandem.workers.sequence import Sequence

NO_ROWS: Mapping[Sequence, int] = MappingProxyType({})
"""Of no step."""


def build_batch(chunks: SequenceOf[Chunk], block_size: int, rows: Mapping[Sequence, int] = NO_ROWS) -> Batch:
    """Lists in it are the sequences' own where they are long. `rows`: where the step in flight samples whose token."""
    copies = tuple(chunk.copy for chunk in chunks if chunk.copy is not None)
    return Batch(tuple(_item(chunk, block_size, rows) for chunk in chunks), copies)


def sampled_rows(chunks: SequenceOf[Chunk]) -> dict[Sequence, int]:
    """The row in which each sequence's token is sampled."""
    sampled = (chunk.sequence for chunk in chunks if chunk.is_sampled)
    return {sequence: row for row, sequence in enumerate(sampled)}


def host_need(chunks: SequenceOf[Chunk]) -> str | None:
    """Why what follows these cannot be decided before their results are known; None: it can, whatever they are."""
    needs = (_host_need(chunk) for chunk in chunks)
    return next((need for need in needs if need is not None), None)


def _host_need(chunk: Chunk) -> str | None:
    sequence = chunk.sequence
    if sequence.beams is not None:
        return "beams"
    if sequence.needs_scores:
        return "prompt_logprobs"
    if chunk.is_sampled and sequence.constraint is not None and sequence.constraint.reads_tokens:
        return "constraints"
    return None


def _item(chunk: Chunk, block_size: int, rows: Mapping[Sequence, int]) -> BatchItem:
    sequence, start = chunk.sequence, chunk.start
    end = start + chunk.num_tokens
    sample = None
    if chunk.is_sampled:
        sample = SampleSpec(
            *(sequence.params, sequence.choice, end, sequence.token_ids, sequence.num_prompt_tokens),
            sequence.constraint,
        )
    if start >= len(sequence.token_ids):
        return BatchItem((0,), start, sequence.block_ids, sample, follows=rows[sequence])
    score = None if sequence.params.num_prompt_logprobs is None else _score(sequence, end)
    pool = None if sequence.pooling is None else _pool(sequence, start, end, block_size)
    return BatchItem(sequence.token_ids[start:end], start, sequence.block_ids, sample, score, pool)


def _score(sequence: Sequence, end: int) -> ScoreSpec | None:
    """Of the prompt's tokens that follow those computed now."""
    num_top = sequence.params.num_prompt_logprobs
    if num_top is None or not sequence.needs_scores:
        return None
    assert len(sequence.prompt_logprobs) == sequence.num_computed, "tokens that nobody scored"
    last = min(end + 1, sequence.num_prompt_tokens)
    return ScoreSpec(sequence.token_ids[sequence.num_computed + 1 : last], num_top)


def _pool(sequence: Sequence, start: int, end: int, block_size: int) -> PoolSpec | None:
    """Of a mean, all chunks have a part."""
    mode = sequence.pooling
    if mode == "mean":
        assert start % block_size == 0, "sums of whole blocks do not depend on chunks"
        return PoolSpec(mode, block_size)
    is_theirs = (mode == "first" and start == 0) or (mode == "last" and end == len(sequence.token_ids))
    return PoolSpec(mode, block_size) if mode is not None and is_theirs else None
