"""What a step sampled, as tensors in host memory, becomes records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tandem.kernels.ops import Sampled
from tandem.workers.batch import Batch, Later, Pooled, Refusal, SampledToken, Scored, StepResult
from tandem.workers.masks import Mask
from tandem.workers.types import TokenLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """What comes of a step, in host memory: to be read when the step is over."""

    sampled: Sampled | None
    """A row per item that samples; None: there is no such item."""
    masks: Sequence[Mask] | None = None
    """One per row."""
    scores: dict[int, list[Sampled]] = field(default_factory=dict)
    """By item, those of its `score`, in order."""
    pooled: dict[int, Tensor] = field(default_factory=dict)
    """By item, the rows of its `pool`, [num_rows, hidden] float32."""


def results_of(batch: Batch, launched: Launched) -> list[StepResult]:
    """As records, aligned with the batch's items. A row whose mask is none has that instead of a token."""
    results: list[StepResult] = [None] * len(batch.items)
    if launched.sampled is not None:
        results = _tokens(batch, launched.sampled)
    if launched.masks is not None:
        rows = [index for index, item in enumerate(batch.items) if item.sample is not None]
        for index, mask in zip(rows, launched.masks, strict=True):
            if isinstance(mask, Refusal | Later):
                results[index] = mask
    for index, rows_of_item in launched.pooled.items():
        results[index] = Pooled(rows_of_item.numpy())
    for index, scores in launched.scores.items():
        token = results[index]
        assert not isinstance(token, Scored | Pooled), "scored twice"
        results[index] = Scored([record for few in scores for record in records_of(few)], token)
    return results


def _tokens(batch: Batch, sampled: Sampled) -> list[StepResult]:
    token_ids = iter(sampled.token_ids.tolist())
    logprobs = iter(records_of(sampled))
    results: list[StepResult] = []
    for item in batch.items:
        if item.sample is None:
            results.append(None)
            continue
        wanted = item.sample.params.num_logprobs
        results.append(SampledToken(next(token_ids), None if wanted is None else _cut(next(logprobs), wanted)))
    return results


def records_of(sampled: Sampled) -> list[TokenLogprobs]:
    """The logprobs as records, one per row that has some."""
    if sampled.logprobs is None or sampled.top_token_ids is None or sampled.top_logprobs is None:
        return []
    columns = (sampled.logprobs.tolist(), sampled.top_token_ids.tolist(), sampled.top_logprobs.tolist())
    return [
        TokenLogprobs(logprob=logprob, top_token_ids=tuple(ids), top_logprobs=tuple(top))
        for logprob, ids, top in zip(*columns, strict=True)
    ]


def _cut(row: TokenLogprobs, num_top: int) -> TokenLogprobs:
    """The first `num_top` alternatives: another row of the batch may have asked for more."""
    return TokenLogprobs(
        logprob=row.logprob, top_token_ids=row.top_token_ids[:num_top], top_logprobs=row.top_logprobs[:num_top]
    )
