"""Sampling on the device: launches, and where results go. `sampling_kernels.py` has the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.ops import Constraints, Penalties, Sampled, SamplingInputs
from tandem.kernels.triton.launch import Launch, check_float, check_index
from tandem.kernels.triton.sampling_kernels import logprob_kernel, sample_kernel

_BLOCK = 1024
_NUM_WARPS = 8
"""Neither is for tuning: the order of a draw's sum depends on both."""
_META = {"BLOCK": _BLOCK, "num_warps": _NUM_WARPS, "num_stages": 1}


def sample(launch: Launch, logits: Tensor, inputs: SamplingInputs, scratch: Tensor, counts: Tensor) -> Sampled:
    """See `ops.Ops.sample`. scratch float32 and counts int32 (all 0) have at least as many elements as logits."""
    num_rows, vocab_size = logits.shape
    check_float("logits", logits)
    if logits.stride(1) != 1:
        raise ValueError(f"each row of logits must be contiguous, but its strides are {logits.stride()}")
    penalties, constraints = inputs.penalties, inputs.constraints
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    arguments = (
        logits,
        scratch,
        counts,
        *(inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed, inputs.choice, inputs.position),
        *_penalty_arguments(penalties, inputs, num_rows),
        *_constraint_arguments(constraints, inputs, num_rows, vocab_size),
        token_ids,
        vocab_size,
        logits.stride(0),
        0 if penalties is None else penalties.token_ids.stride(0),
        0 if constraints is None else constraints.bias_token_ids.stride(0),
        0 if constraints is None else constraints.masks.stride(0),
    )
    has = {"HAS_PENALTIES": penalties is not None, "HAS_CONSTRAINTS": constraints is not None}
    launch(sample_kernel, (num_rows,), arguments, **has, **_META)
    if inputs.logprob_rows is None:
        return Sampled(token_ids, None, None, None)
    return _logprobs(launch, logits, inputs.logprob_rows, token_ids, inputs.num_top_logprobs)


def score(launch: Launch, logits: Tensor, token_ids: Tensor, num_top: int) -> Sampled:
    """See `ops.Ops.score`."""
    check_float("logits", logits)
    check_index("token_ids", token_ids, (logits.shape[0],))
    every_row = torch.arange(logits.shape[0], device=logits.device)
    return _logprobs(launch, logits, every_row, token_ids, num_top)


def _logprobs(launch: Launch, logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int) -> Sampled:
    """Of these rows' tokens. rows [n], token_ids [R]"""
    num_wanted, vocab_size = rows.shape[0], logits.shape[1]
    num_top = min(num_top, vocab_size)
    logprobs = torch.empty(num_wanted, dtype=torch.float32, device=logits.device)
    top_ids = torch.empty((num_wanted, num_top), dtype=torch.int64, device=logits.device)
    top_logprobs = torch.empty((num_wanted, num_top), dtype=torch.float32, device=logits.device)
    outputs = (rows, token_ids, logprobs, top_ids, top_logprobs)
    launch(logprob_kernel, (num_wanted,), (logits, *outputs, vocab_size, logits.stride(0), num_top), **_META)
    return Sampled(token_ids, logprobs, top_ids, top_logprobs)


def _penalty_arguments(penalties: Penalties | None, inputs: SamplingInputs, num_rows: int) -> tuple[Tensor, ...]:
    """The kernel's pointers to histories and factors; without penalties, any of the right type."""
    if penalties is None:
        whole, real = inputs.top_k, inputs.temperature
        return (whole, whole, whole, real, real, real)
    check_index("penalties.token_ids", penalties.token_ids, (num_rows, penalties.token_ids.shape[1]))
    factors = (penalties.presence, penalties.frequency, penalties.repetition)
    return (penalties.token_ids, penalties.prompt_lens, penalties.lens, *factors)


def _constraint_arguments(
    constraints: Constraints | None, inputs: SamplingInputs, num_rows: int, vocab_size: int
) -> tuple[Tensor, ...]:
    """The kernel's pointers to biases and masks; without constraints, any of the right type."""
    if constraints is None:
        whole, real = inputs.top_k, inputs.temperature
        return (whole, real, whole, whole, whole)
    biases, masks = constraints.bias_token_ids, constraints.masks
    check_index("constraints.bias_token_ids", biases, (num_rows, biases.shape[1]))
    check_index("constraints.mask_rows", constraints.mask_rows, (num_rows,))
    if masks.dtype != torch.int32 or masks.shape[1] != -(-vocab_size // 32):
        raise ValueError(f"constraints.masks must be torch.int32 with a bit per token, but is {list(masks.shape)}")
    return (biases, constraints.biases, constraints.bias_lens, constraints.mask_rows, masks)
