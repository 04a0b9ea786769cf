"""A batch's lists become tensors here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.kernels.ops import Constraints, Penalties, SamplingInputs, StepLayout
from tandem.workers.batch import Batch, BatchItem, SampleSpec
from tandem.workers.masks import Mask
from tandem.workers.types import SamplingParams

_UINT64 = (1 << 64) - 1

Send = Callable[[Tensor], Tensor]
"""Brings a tensor to where the step is computed."""


def _here(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """A batch as tensors, all on one device."""

    token_ids: Tensor  # [num_tokens] int64
    layout: StepLayout
    sample_rows: Tensor  # [num_samples] int64: rows of the step whose next token is sampled


def build(batch: Batch, block_size: int, send: Send = _here, sampled: Tensor | None = None) -> StepInputs:
    """Tensors of the shapes that the batch has. `sampled`: what the step before did, for items that follow it."""
    items = batch.items
    lengths = np.fromiter((len(item.token_ids) for item in items), np.int64, len(items))
    starts = np.fromiter((item.start for item in items), np.int64, len(items))
    query_starts = np.concatenate((np.zeros(1, np.int64), lengths.cumsum()))
    block_tables = _padded([used_blocks(item, block_size) for item in items])
    seq = np.repeat(np.arange(len(items)), lengths)
    positions = np.arange(query_starts[-1]) - query_starts[seq] + starts[seq]
    slots = block_tables[seq, positions // block_size] * block_size + positions % block_size
    token_ids = np.fromiter((token for item in items for token in item.token_ids), np.int64, int(query_starts[-1]))

    def on_device(array: npt.NDArray[np.int64]) -> Tensor:
        return send(torch.from_numpy(array))

    layout = StepLayout(
        positions=on_device(positions),
        slots=on_device(slots),
        query_starts=on_device(query_starts),
        context_lens=on_device(starts + lengths),
        block_tables=on_device(block_tables),
    )
    sampling = np.array([index for index, item in enumerate(items) if item.sample is not None], np.int64)
    inputs = StepInputs(on_device(token_ids), layout, on_device(query_starts[sampling + 1] - 1))
    follows = [(int(start), item.follows) for start, item in zip(query_starts, items) if item.follows is not None]
    _follow(inputs.token_ids, follows, send, sampled)
    return inputs


def _follow(token_ids: Tensor, follows: Sequence[tuple[int, int]], send: Send, sampled: Tensor | None) -> None:
    """Tokens that only the device knows: (place, row) takes `sampled[row]`."""
    if follows:
        assert sampled is not None, "a step that follows none"
        places, rows = (send(torch.tensor(column)) for column in zip(*follows))
        token_ids.index_copy_(0, places, sampled.index_select(0, rows))


def used_blocks(item: BatchItem, block_size: int) -> Sequence[int]:
    """The blocks that hold tokens once the item is computed."""
    return item.block_ids[: -(-(item.start + len(item.token_ids)) // block_size)]


def _padded(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """[num_rows, length of the longest], padded with 0."""
    table = np.zeros((len(rows), max(len(row) for row in rows)), np.int64)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table


def build_sampling(
    specs: Sequence[SampleSpec],
    send: Send = _here,
    masks: Sequence[Mask] | None = None,
    follows: Sequence[int | None] = (),
    sampled: Tensor | None = None,
) -> SamplingInputs:
    """One row per sample. `masks`: one per sample, where any has a constraint. `follows`, as in the items, if any is
    not None, and `sampled`: what the step before did."""
    follows = follows or [None] * len(specs)
    params = [spec.params for spec in specs]
    logprob_rows = [row for row, one in enumerate(params) if one.num_logprobs is not None]
    inputs = SamplingInputs(
        temperature=torch.tensor([one.temperature for one in params], dtype=torch.float32),
        top_k=torch.tensor([one.top_k for one in params]),
        top_p=torch.tensor([one.top_p for one in params], dtype=torch.float32),
        min_p=torch.tensor([one.min_p for one in params], dtype=torch.float32),
        seed=torch.from_numpy(seeds_of(params)),
        choice=torch.tensor([spec.choice for spec in specs]),
        position=torch.tensor([spec.position for spec in specs]),
        penalties=_build_penalties(specs, follows),
        constraints=None if masks is None else _build_constraints(specs, masks),
        logprob_rows=torch.tensor(logprob_rows) if logprob_rows else None,
        num_top_logprobs=max((one.num_logprobs or 0 for one in params), default=0),
    )
    moved: SamplingInputs = moved_by(send, inputs)
    if moved.penalties is not None:
        width = moved.penalties.token_ids.shape[1]
        places = [
            (row * width + len(spec.token_ids), follow)
            for row, (spec, follow) in enumerate(zip(specs, follows, strict=True))
            if follow is not None and has_penalties(spec.params)
        ]
        _follow(moved.penalties.token_ids.view(-1), places, send, sampled)
    return moved


def moved_by(send: Send, record: Any) -> Any:
    """The record with its tensors, and those of the records in it, somewhere else."""
    values: dict[str, Any] = {each.name: getattr(record, each.name) for each in fields(record)}
    changed: dict[str, Any] = {name: send(value) for name, value in values.items() if isinstance(value, Tensor)}
    changed |= {name: moved_by(send, value) for name, value in values.items() if is_dataclass(value)}
    return replace(record, **changed)


def _build_constraints(specs: Sequence[SampleSpec], masks: Sequence[Mask]) -> Constraints | None:
    held = [mask if isinstance(mask, np.ndarray) else None for mask in masks]
    words = [mask for mask in held if mask is not None]
    num_biases = [0 if spec.constraint is None else len(spec.constraint.biases) for spec in specs]
    if not words and not any(num_biases):
        return None
    bias_token_ids = np.zeros((len(specs), max(num_biases)), np.int64)
    biases = np.zeros(bias_token_ids.shape, np.float32)
    for row, spec in enumerate(specs):
        if spec.constraint is not None:
            bias_token_ids[row, : num_biases[row]] = spec.constraint.bias_token_ids
            biases[row, : num_biases[row]] = spec.constraint.biases
    if not words:  # as wide as if there were some: a backend checks shapes, not rows
        vocab_size = next(spec.constraint.vocab_size for spec in specs if spec.constraint is not None)
        words = [np.zeros(-(-vocab_size // 32), np.int32)]
    places = iter(range(len(words)))
    return Constraints(
        bias_token_ids=torch.from_numpy(bias_token_ids),
        biases=torch.from_numpy(biases),
        bias_lens=torch.tensor(num_biases),
        mask_rows=torch.tensor([-1 if mask is None else next(places) for mask in held]),
        masks=torch.from_numpy(np.stack(words)),
    )


def _build_penalties(specs: Sequence[SampleSpec], follows: Sequence[int | None]) -> Penalties | None:
    params = [spec.params for spec in specs]
    if not any(has_penalties(one) for one in params):
        return None
    histories = [_history(spec, follow) for spec, follow in zip(specs, follows, strict=True)]
    return Penalties(
        token_ids=torch.from_numpy(_padded(histories)),
        prompt_lens=torch.tensor([spec.num_prompt_tokens for spec in specs]),
        lens=torch.tensor([len(history) for history in histories]),
        presence=torch.tensor([one.presence_penalty for one in params], dtype=torch.float32),
        frequency=torch.tensor([one.frequency_penalty for one in params], dtype=torch.float32),
        repetition=torch.tensor([one.repetition_penalty for one in params], dtype=torch.float32),
    )


def _history(spec: SampleSpec, follows: int | None) -> Sequence[int]:
    """With room for a token that only the device knows."""
    if not has_penalties(spec.params):
        return ()
    return spec.token_ids if follows is None else [*spec.token_ids, 0]


def seeds_of(params: Sequence[SamplingParams]) -> npt.NDArray[np.int64]:
    """int64 [num_params]: the 64 bits of each seed, whatever its sign."""
    return np.array([one.seed & _UINT64 for one in params], np.uint64).view(np.int64)


def has_penalties(params: SamplingParams) -> bool:
    """Whether a token depends on those before it otherwise than through the model."""
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
