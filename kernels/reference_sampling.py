"""Sampling of the reference backend. `ops.Ops.sample` says what is computed; here is how.

Every threshold is a *value* (the k-th largest logit, the last one inside top-p), which does not depend on how a sort
orders equals; equals at a threshold are then told apart by token id. Long sums are `cumsum` in float64, which torch
runs sequentially along the row at any batch size and number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.ops import GREEDY_TEMPERATURE, Constraints, Penalties, Sampled, SamplingInputs
from tandem.kernels.philox import uniform

_LOWEST = torch.finfo(torch.float32).min
_ROWS_IN_CACHE = 2
"""Rows that are drawn at once: temporaries over the vocabulary should stay in the cache, and off the page allocator."""


def sample(logits: Tensor, inputs: SamplingInputs) -> Sampled:
    """See `ops.Ops.sample`."""
    raw = _clean(logits)
    biased = raw if inputs.constraints is None else _bias(raw, inputs.constraints)
    penalised = biased if inputs.penalties is None else _penalise(biased, inputs.penalties)
    if inputs.constraints is not None:
        penalised = _mask(penalised, inputs.constraints)
    token_ids = penalised.argmax(-1)
    random_rows = (inputs.temperature >= GREEDY_TEMPERATURE).nonzero().flatten()
    numbers = uniform(inputs.seed, inputs.choice, inputs.position)
    for rows in torch.split(random_rows, _ROWS_IN_CACHE):
        token_ids[rows] = _draw(penalised[rows], _select(inputs, rows), numbers[rows])
    if inputs.constraints is not None:
        _replace_forbidden(token_ids, inputs.constraints, logits.shape[-1])
    if inputs.logprob_rows is None:
        return Sampled(token_ids, None, None, None)
    return Sampled(token_ids, *_logprobs_of_rows(raw, token_ids, inputs.logprob_rows, inputs.num_top_logprobs))


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> Sampled:
    """See `ops.Ops.score`."""
    return Sampled(token_ids, *_logprobs_of_rows(_clean(logits), token_ids, torch.arange(token_ids.shape[0]), num_top))


def _clean(logits: Tensor) -> Tensor:
    """float32 without NaN and infinities: a row that a model spoilt must end in some token, and without an error in a
    step that others share."""
    return torch.nan_to_num(logits.float(), nan=_LOWEST)


def _logprobs_of_rows(raw: Tensor, token_ids: Tensor, rows: Tensor, num_top: int) -> Iterator[Tensor]:
    """What `_logprobs` says of these rows, few at a time."""
    parts = [_logprobs(raw[few], token_ids[few], num_top) for few in torch.split(rows, _ROWS_IN_CACHE)]
    return (torch.cat(columns) for columns in zip(*parts, strict=True))


def _select(inputs: SamplingInputs, rows: Tensor) -> SamplingInputs:
    """The inputs of some rows, as far as drawing needs them."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "position")
    picked = {name: getattr(inputs, name)[rows] for name in names}
    return replace(inputs, **picked, penalties=None, constraints=None, logprob_rows=None)


def _bias(logits: Tensor, constraints: Constraints) -> Tensor:
    """The logits with the biases of those rows that have some. [R, V]"""
    token_ids, lens = constraints.bias_token_ids, constraints.bias_lens
    row, place = (torch.arange(token_ids.shape[1]) < lens[:, None]).nonzero(as_tuple=True)
    if not row.numel():
        return logits
    result = logits.clone()
    result[row, token_ids[row, place]] += constraints.biases[row, place]
    return result.clamp_(_LOWEST, -_LOWEST)


def _mask(logits: Tensor, constraints: Constraints) -> Tensor:
    """The logits with the lowest number at the tokens that may not be chosen. [R, V]"""
    rows = (constraints.mask_rows >= 0).nonzero().flatten()
    if not rows.numel():
        return logits
    result = logits.clone()
    is_allowed = _unpack(constraints.masks[constraints.mask_rows[rows]], logits.shape[-1])
    result[rows] = torch.where(is_allowed, logits[rows], _LOWEST)
    return result


def _replace_forbidden(token_ids: Tensor, constraints: Constraints, vocab_size: int) -> None:
    """Where a token is not allowed: the lowest id that is, or 0. In place. token_ids [R]"""
    rows = (constraints.mask_rows >= 0).nonzero().flatten()
    is_allowed = _unpack(constraints.masks[constraints.mask_rows[rows]], vocab_size)
    chosen = token_ids[rows]
    stays = is_allowed.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    token_ids[rows] = torch.where(stays, chosen, is_allowed.int().argmax(-1))


def _unpack(masks: Tensor, vocab_size: int) -> Tensor:
    """int32 [n, ceil(vocab / 32)] -> bool [n, vocab]"""
    bits = masks.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32) & 1
    return bits.bool().flatten(1)[:, :vocab_size]


def _penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    """The logits with the penalties of those rows that have a history. [R, V]"""
    rows = (penalties.lens > 0).nonzero().flatten()
    if not rows.numel():
        return logits
    token_ids = penalties.token_ids[rows]
    place = torch.arange(token_ids.shape[1])
    known = place < penalties.lens[rows, None]
    generated = known & (place >= penalties.prompt_lens[rows, None])
    picked = logits[rows]
    seen = torch.zeros_like(picked).scatter_add_(1, token_ids, known.float()) > 0
    count = torch.zeros_like(picked).scatter_add_(1, token_ids, generated.float())
    repetition = penalties.repetition[rows, None]
    repeated = torch.where(picked > 0, picked / repetition, picked * repetition)
    picked = torch.where(seen, repeated, picked)
    picked = picked - penalties.frequency[rows, None] * count
    picked = picked - penalties.presence[rows, None] * (count > 0)
    result = logits.clone()
    result[rows] = picked
    return result


def _draw(logits: Tensor, inputs: SamplingInputs, numbers: Tensor) -> Tensor:
    """One token id per row, by the inverse of the cumulative distribution in the order of ids. logits [R, V]"""
    scaled = logits / inputs.temperature.unsqueeze(-1)
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp_()
    vocab_size = logits.shape[-1]
    filtered = (inputs.min_p > 0) | (inputs.top_p < 1) | ((inputs.top_k > 0) & (inputs.top_k < vocab_size))
    rows = filtered.nonzero().flatten()
    if rows.numel():
        weights[rows] = _filter(scaled[rows], weights[rows], _select(inputs, rows))
    running = weights.cumsum(-1, dtype=torch.float64)
    whole = running[:, -1:]
    target = numbers.unsqueeze(-1) * whole
    target = torch.minimum(target, torch.nextafter(whole, torch.zeros_like(whole)))  # the product may round up
    return torch.searchsorted(running, target, right=True).squeeze(-1).clamp_(max=vocab_size - 1)


def _filter(logits: Tensor, weights: Tensor, inputs: SamplingInputs) -> Tensor:
    """The weights with 0 for the tokens that min-p, top-k and top-p remove. All [R, V]; weights = exp(logits - max)."""
    vocab_size = logits.shape[-1]
    values = _descending(logits)
    has_top_k = ((inputs.top_k > 0) & (inputs.top_k < vocab_size)).unsqueeze(-1)
    kth = values.gather(-1, (inputs.top_k - 1).clamp(0, vocab_size - 1).unsqueeze(-1))
    kth = torch.where(has_top_k, kth, float("-inf"))
    min_p, top_p = inputs.min_p.unsqueeze(-1), inputs.top_p.double().unsqueeze(-1)
    weights = weights * ((weights >= min_p) & (logits >= kth))
    if bool((top_p >= 1).all()):
        return weights
    descending = (values - values[:, :1]).exp_()
    descending = (descending * ((descending >= min_p) & (values >= kth))).double()
    running = descending.cumsum(-1)
    num_kept = (running - descending < top_p * running[:, -1:]).sum(-1).clamp_(min=1)
    return weights * ((top_p >= 1) | _is_among_largest(logits, values, num_kept))


def _descending(logits: Tensor) -> Tensor:
    """Each row's values from the largest down. [R, V]. numpy sorts values alone, 30 times faster than torch."""
    return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)


def _is_among_largest(logits: Tensor, values: Tensor, count: Tensor) -> Tensor:
    """Whether each logit is one of its row's `count` largest; lower ids first among equals. bool [R, V]

    values [R, n]: the row's n largest logits in descending order, n >= count.
    """
    last = values.gather(-1, (count - 1).unsqueeze(-1))
    num_larger = (values > last).sum(-1, keepdim=True)
    is_equal = logits == last
    return (logits > last) | (is_equal & (is_equal.cumsum(-1) <= count.unsqueeze(-1) - num_larger))


def _logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per row: the chosen token's logprob, then ids and logprobs of the most likely ones, lower ids first."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    num_top = min(num_top, logits.shape[-1])
    if num_top == 0:
        empty = logprobs[:, :0]
        return chosen, empty.to(torch.int64), empty
    values = logprobs.topk(num_top, sorted=True).values
    is_top = _is_among_largest(logprobs, values, torch.full_like(token_ids, num_top))
    ids = is_top.nonzero()[:, 1].view(-1, num_top)  # ascending in each row
    order = logprobs.gather(-1, ids).argsort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    return chosen, ids, logprobs.gather(-1, ids)
