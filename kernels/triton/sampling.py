"""Sampling on the device: launches, and where results go. `sampling_kernels.py` has the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.ops import Penalties, Sampled, SamplingInputs
from tandem.kernels.triton.launch import Launch, check_float, check_index
from tandem.kernels.triton.sampling_kernels import logprob_kernel, sample_kernel

_BLOCK = 1024
_NUM_WARPS = 8
"""Neither is for tuning: the order of a draw's sum depends on both."""


def sample(launch: Launch, logits: Tensor, inputs: SamplingInputs, scratch: Tensor, counts: Tensor) -> Sampled:
    """See `ops.Ops.sample`. scratch float32 and counts int32 (all 0) have at least as many elements as logits."""
    num_rows, vocab_size = logits.shape
    check_float("logits", logits)
    if logits.stride(1) != 1:
        raise ValueError(f"each row of logits must be contiguous, but its strides are {logits.stride()}")
    penalties = inputs.penalties
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    arguments = (
        logits,
        scratch,
        counts,
        *(inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed, inputs.choice, inputs.position),
        *_penalty_arguments(penalties, inputs, num_rows),
        token_ids,
        vocab_size,
        logits.stride(0),
        0 if penalties is None else penalties.token_ids.stride(0),
    )
    meta = {"BLOCK": _BLOCK, "num_warps": _NUM_WARPS, "num_stages": 1}
    launch(sample_kernel, (num_rows,), arguments, HAS_PENALTIES=penalties is not None, **meta)
    if inputs.logprob_rows is None:
        return Sampled(token_ids, None, None, None)
    num_wanted = inputs.logprob_rows.shape[0]
    num_top = min(inputs.num_top_logprobs, vocab_size)
    logprobs = torch.empty(num_wanted, dtype=torch.float32, device=logits.device)
    top_ids = torch.empty((num_wanted, num_top), dtype=torch.int64, device=logits.device)
    top_logprobs = torch.empty((num_wanted, num_top), dtype=torch.float32, device=logits.device)
    outputs = (inputs.logprob_rows, token_ids, logprobs, top_ids, top_logprobs)
    launch(logprob_kernel, (num_wanted,), (logits, *outputs, vocab_size, logits.stride(0), num_top), **meta)
    return Sampled(token_ids, logprobs, top_ids, top_logprobs)


def _penalty_arguments(penalties: Penalties | None, inputs: SamplingInputs, num_rows: int) -> tuple[Tensor, ...]:
    """The kernel's pointers to histories and factors; without penalties, any of the right type."""
    if penalties is None:
        whole, real = inputs.top_k, inputs.temperature
        return (whole, whole, whole, real, real, real)
    check_index("penalties.token_ids", penalties.token_ids, (num_rows, penalties.token_ids.shape[1]))
    factors = (penalties.presence, penalties.frequency, penalties.repetition)
    return (penalties.token_ids, penalties.prompt_lens, penalties.lens, *factors)
