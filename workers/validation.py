"""What a worker can serve at all. Everything refused here would otherwise fail, or wait for ever, later."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tandem.workers.beams import num_candidates
from tandem.workers.constraint import needs_constraint
from tandem.workers.errors import RequestError
from tandem.workers.types import MAX_PRIORITY, Choice, Request, Retention, SamplingParams

MAX_BEAM_WIDTH = 64
MAX_CANDIDATES = 4096
"""That one beam may be asked for."""
MAX_LOGPROBS_AT_ONCE = 1_000_000
"""Of a prompt, or of all answers of a beam search, alternatives included: one frame carries them, at 14 bytes each."""

_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("max_tokens", lambda value: value >= 1, "must be at least 1"),
    ("temperature", lambda value: 0 <= value < math.inf, "must be finite and not negative"),
    ("top_p", lambda value: 0 < value <= 1, "must be above 0 and at most 1"),
    ("top_k", lambda value: value >= 0, "must not be negative"),
    ("min_p", lambda value: 0 <= value <= 1, "must be from 0 to 1"),
    ("presence_penalty", math.isfinite, "must be finite"),
    ("frequency_penalty", math.isfinite, "must be finite"),
    ("repetition_penalty", lambda value: 0 < value < math.inf, "must be finite and above 0"),
    ("num_logprobs", lambda value: value is None or value >= 0, "must not be negative"),
    ("beam_width", lambda value: value is None or 1 <= value <= MAX_BEAM_WIDTH, f"must be from 1 to {MAX_BEAM_WIDTH}"),
    ("length_penalty", lambda value: -16 <= value <= 16, "must be from -16 to 16"),
    ("num_prompt_logprobs", lambda value: value is None or value >= 0, "must not be negative"),
)
"""Field, test, rule. A NaN fails every comparison."""


def validate_sampling(params: SamplingParams) -> None:
    """Raises `RequestError` naming the field that is out of range."""
    for name, is_valid, rule in _RANGES:
        value = getattr(params, name)
        if not is_valid(value):
            raise RequestError(f"{name} {rule}, but is {value}", param=name)


def validate_request(
    request: Request,
    *,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
    max_running: int,
    vocab_size: int,
    hold: bool,
) -> None:
    """Raises `RequestError` for a request that a worker with this pool, which runs `max_running` sequences at a time,
    could never finish."""
    validate_sampling(request.sampling)
    _validate_retention(request.retention)
    if not 0 <= request.priority <= MAX_PRIORITY:
        raise RequestError(f"a priority must be from 0 to {MAX_PRIORITY}, but is {request.priority}", param="priority")
    indices = [choice.index for choice in request.choices]
    if not indices or len(set(indices)) != len(indices):
        raise RequestError("a request needs at least one choice, each with its own index", param="n")
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if num_prompt == 0:
        raise RequestError("the prompt has no tokens", param="prompt")
    if num_prompt + max_tokens > max_model_len:
        raise _too_long(f"prompt ({num_prompt} tokens) and max_tokens ({max_tokens})", max_model_len, "the model")
    if request.sampling.beam_width is not None:
        _validate_beams(request, request.sampling.beam_width, num_blocks, block_size, max_running)
    num_top = request.sampling.num_prompt_logprobs
    if num_top is not None and num_prompt * (num_top + 1) > MAX_LOGPROBS_AT_ONCE:
        raise RequestError(
            f"a prompt of {num_prompt} tokens is too long for {num_top} logprobs of each", param="prompt_logprobs"
        )
    for choice in request.choices:
        _validate_choice(choice, max_tokens)
        # The last token's KV is never needed, and a prefill worker (`hold`) adds no more than one token.
        num_known = num_prompt + len(choice.emitted_token_ids)
        num_tokens = num_known if hold else num_prompt + max_tokens - 1
        if num_tokens > num_blocks * block_size:
            raise _too_long(f"{num_tokens} tokens", num_blocks * block_size, "this worker's KV cache")
    for ids in (request.prompt_token_ids, *(choice.emitted_token_ids for choice in request.choices)):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise RequestError(f"token ids must be from 0 to {vocab_size - 1}", param="prompt")


def validate_input(token_ids: Sequence[int], *, max_tokens: int, vocab_size: int) -> None:
    """Raises `RequestError` for tokens that a worker could never give an embedding of."""
    if not token_ids:
        raise RequestError("the input has no tokens", param="input")
    if len(token_ids) > max_tokens:
        message = f"an input of {len(token_ids)} tokens exceeds the {max_tokens} that this worker can hold"
        raise RequestError(message, param="input", code="context_length_exceeded")
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise RequestError(f"token ids must be from 0 to {vocab_size - 1}", param="input")


def _validate_beams(request: Request, width: int, num_blocks: int, block_size: int, max_running: int) -> None:
    """All beams wait for the last one, so there must be room for all of them at once."""
    params = request.sampling
    if width > max_running:
        raise RequestError(f"a worker computes {max_running} beams at once, not {width}", param="beam_width")
    if len(request.choices) > width:
        raise RequestError(f"{width} beams cannot give {len(request.choices)} answers", param="beam_width")
    if any(choice.emitted_token_ids for choice in request.choices):
        raise RequestError("a beam search begins with the prompt", param="beam_width")
    if needs_constraint(params) or any((params.presence_penalty, params.frequency_penalty)):
        raise RequestError("a beam search follows the model's own probabilities alone", param="beam_width")
    if params.repetition_penalty != 1:
        raise RequestError("a beam search follows the model's own probabilities alone", param="repetition_penalty")
    if num_candidates(params, width) > MAX_CANDIDATES:
        raise RequestError("too many beams for so many stop tokens", param="beam_width")
    num_told = len(request.choices) * params.max_tokens * ((params.num_logprobs or 0) + 1)
    if params.num_logprobs is not None and num_told > MAX_LOGPROBS_AT_ONCE:
        raise RequestError("a beam search tells all at once: too many answers, tokens and logprobs", param="logprobs")
    num_tokens = len(request.prompt_token_ids) + params.max_tokens
    if width * -(-num_tokens // block_size) > num_blocks // 2:  # the other half: a beam that comes back wants some free
        limit = num_blocks // 2 * block_size
        what = f"{width} beams of {num_tokens} tokens each, in whole blocks of {block_size},"
        raise _too_long(what, limit, "half of this worker's KV cache")


def _validate_retention(retention: Retention) -> None:
    if not 0 <= retention.priority <= 100:
        raise RequestError(f"a priority must be from 0 to 100, but is {retention.priority}", param="kv_retention")
    if retention.duration_s is not None and not 0 < retention.duration_s < math.inf:
        raise RequestError(
            f"a duration must be finite and above 0, but is {retention.duration_s}", param="kv_retention"
        )


def _validate_choice(choice: Choice, max_tokens: int) -> None:
    if choice.index < 0:
        raise RequestError(f"the index of a choice must not be negative, but is {choice.index}", param="n")
    if len(choice.emitted_token_ids) >= max_tokens:
        raise RequestError(f"choice {choice.index} has all its {max_tokens} tokens already", param="max_tokens")


def _too_long(what: str, limit: int, whose: str) -> RequestError:
    message = f"{what} exceed the {limit} tokens that {whose} can hold"
    return RequestError(message, param="max_tokens", code="context_length_exceeded")
