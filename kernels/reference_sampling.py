"""Sampling of the reference backend. `ops.Ops.sample` says what is computed; here is how, without sorting everything.

Every threshold is a *value* (the k-th largest logit, the last one inside top-p), which does not depend on how a partial
sort orders equals; equals at a threshold are then told apart by token id. Long sums are `cumsum` in float64, which
torch runs sequentially along the row at any batch size and number of threads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tandem.kernels.ops import GREEDY_TEMPERATURE, Penalties, Sampled, SamplingInputs
from tandem.kernels.philox import uniform

_CANDIDATES = 1024
"""Tokens that are looked at in descending order; a row that needs more of them is sorted as a whole."""


def sample(logits: Tensor, inputs: SamplingInputs) -> Sampled:
    """See `ops.Ops.sample`."""
    raw = logits.float()
    penalised = raw if inputs.penalties is None else _penalise(raw, inputs.penalties)
    token_ids = penalised.argmax(-1)
    random_rows = (inputs.temperature >= GREEDY_TEMPERATURE).nonzero().flatten()
    if random_rows.numel():
        token_ids[random_rows] = _draw(penalised[random_rows], _select(inputs, random_rows))
    if inputs.logprob_rows is None:
        return Sampled(token_ids, None, None, None)
    return Sampled(token_ids, *_logprobs(raw, token_ids, inputs.logprob_rows, inputs.num_top_logprobs))


def _select(inputs: SamplingInputs, rows: Tensor) -> SamplingInputs:
    """The inputs of some rows, as far as drawing needs them."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "position")
    return replace(inputs, **{name: getattr(inputs, name)[rows] for name in names}, penalties=None, logprob_rows=None)


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


def _draw(logits: Tensor, inputs: SamplingInputs) -> Tensor:
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
    target = uniform(inputs.seed, inputs.choice, inputs.position).unsqueeze(-1) * whole
    target = torch.minimum(target, torch.nextafter(whole, torch.zeros_like(whole)))  # the product may round up
    return torch.searchsorted(running, target, right=True).squeeze(-1).clamp_(max=vocab_size - 1)


def _filter(logits: Tensor, weights: Tensor, inputs: SamplingInputs) -> Tensor:
    """The weights with 0 for the tokens that min-p, top-k and top-p remove. All [R, V]; weights = exp(logits - max)."""
    num_candidates = min(_CANDIDATES, logits.shape[-1])
    values = logits.topk(num_candidates, sorted=True).values
    kept, is_settled = _filter_by(values, logits, weights, inputs)
    rest = (~is_settled).nonzero().flatten()
    if rest.numel():
        values = logits[rest].sort(descending=True).values
        kept[rest], _ = _filter_by(values, logits[rest], weights[rest], _select(inputs, rest))
    return kept


def _filter_by(values: Tensor, logits: Tensor, weights: Tensor, inputs: SamplingInputs) -> tuple[Tensor, Tensor]:
    """`_filter`, given the largest logits in descending order; and per row whether they were enough to tell."""
    num_values, vocab_size = values.shape[-1], logits.shape[-1]
    top_k = torch.where((inputs.top_k > 0) & (inputs.top_k < vocab_size), inputs.top_k, vocab_size)
    kth = values.gather(-1, (top_k - 1).clamp(max=num_values - 1).unsqueeze(-1))
    kth = torch.where((top_k < vocab_size).unsqueeze(-1), kth, float("-inf"))
    is_settled = (top_k <= num_values) | (top_k == vocab_size)

    min_p = inputs.min_p.unsqueeze(-1)
    weights = torch.where((weights >= min_p) & (logits >= kth), weights, 0.0)
    limit = inputs.top_p.double().unsqueeze(-1) * weights.cumsum(-1, dtype=torch.float64)[:, -1:]

    descending = (values - values[:, :1]).exp_()
    descending = torch.where((descending >= min_p) & (values >= kth), descending, 0.0).double()
    before = descending.cumsum(-1) - descending
    num_kept = (before < limit).sum(-1).clamp(min=1)
    is_unlimited = inputs.top_p >= 1
    is_settled &= is_unlimited | (num_kept < num_values) | (num_values == vocab_size)
    return torch.where(is_unlimited[:, None] | _is_among_largest(logits, values, num_kept), weights, 0.0), is_settled


def _is_among_largest(logits: Tensor, values: Tensor, count: Tensor) -> Tensor:
    """Whether each logit is one of its row's `count` largest; lower ids first among equals. bool [R, V]

    values [R, n]: the row's n largest logits in descending order, n >= count.
    """
    last = values.gather(-1, (count - 1).unsqueeze(-1))
    num_larger = (values > last).sum(-1, keepdim=True)
    is_equal = logits == last
    return (logits > last) | (is_equal & (is_equal.cumsum(-1) <= count.unsqueeze(-1) - num_larger))


def _logprobs(logits: Tensor, token_ids: Tensor, rows: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs of the chosen tokens of `rows`, and ids and logprobs of the most likely ones, lower ids first."""
    logprobs = torch.log_softmax(logits[rows], dim=-1)
    chosen = logprobs.gather(-1, token_ids[rows].unsqueeze(-1)).squeeze(-1)
    num_top = min(num_top, logits.shape[-1])
    if num_top == 0:
        empty = logprobs[:, :0]
        return chosen, empty.to(torch.int64), empty
    values = logprobs.topk(num_top, sorted=True).values
    is_top = _is_among_largest(logprobs, values, torch.full((rows.numel(),), num_top))
    ids = is_top.nonzero()[:, 1].view(-1, num_top)  # ascending in each row
    order = logprobs.gather(-1, ids).argsort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    return chosen, ids, logprobs.gather(-1, ids)
