"""Dry steps for a worker that starts: what a backend compiles on first use is compiled before a request waits."""

from __future__ import annotations

from tandem.kernels.tuning import buckets_up_to
from tandem.workers.batch import Batch, BatchItem, SampleSpec
from tandem.workers.constraint import Constraint
from tandem.workers.types import SamplingParams

_PLAIN = SamplingParams(max_tokens=1, seed=0)
_PENALTIES = SamplingParams(max_tokens=1, seed=0, presence_penalty=0.5, num_logprobs=1)
_BIASES = SamplingParams(max_tokens=1, seed=0, logit_bias=((0, 1.0),))
_BOTH = SamplingParams(max_tokens=1, seed=0, presence_penalty=0.5, logit_bias=((0, 1.0),))


def dry_batches(max_tokens: int, max_seqs: int, block_size: int, vocab_size: int) -> list[Batch]:
    """Prompts of 1, 2, 4, ... and `max_tokens` tokens, then each form of sampling for `max_seqs` sequences; in the
    pool's first blocks, which sequences share: they write the same."""
    sizes = sorted({max_tokens, *(size for size in buckets_up_to(max_tokens) if size <= max_tokens)})
    prompts = [Batch((_item(size, block_size, vocab_size, _PLAIN),)) for size in sizes]
    forms = [_item(1, block_size, vocab_size, params) for params in (_PENALTIES, _BIASES, _BOTH)]
    return prompts + [Batch((item,) * max_seqs) for item in forms]


def _item(num_tokens: int, block_size: int, vocab_size: int, params: SamplingParams) -> BatchItem:
    prompt = [0] * num_tokens
    constraint = Constraint(params, vocab_size) if params.logit_bias else None
    sample = SampleSpec(params, 0, num_tokens, prompt, num_tokens, constraint)
    return BatchItem(prompt, 0, range(-(-num_tokens // block_size)), sample)
