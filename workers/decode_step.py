"""Decode steps, recorded once per batch bucket and replayed: one token of each sequence, at fixed addresses.

    fill(batch) ─> buffers ─> replay ─> sampled token ids

A batch is padded to the next bucket. Padding owns no rows: it is sequences without tokens behind the last one, so it
writes no KV and nobody reads what it computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.kernels.capture import Captured
from tandem.kernels.ops import Ops, Sampled, SamplingInputs, StepLayout
from tandem.workers.batch import Batch, BatchItem, SampleSpec
from tandem.workers.step_inputs import has_penalties, used_blocks

Forward = Callable[[Tensor, StepLayout, Tensor], Tensor]
"""(token ids [n], layout, logits buffer [n, vocab]) -> the logits of every row."""


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """Everything that a decode step reads, for the largest batch."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor

    @classmethod
    def allocate(cls, max_seqs: int, max_blocks: int, *, pin: bool) -> _Inputs:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pin)

        def numbers() -> Tensor:
            return zeros(max_seqs, dtype=torch.float32)

        return cls(
            token_ids=zeros(max_seqs),
            positions=zeros(max_seqs),
            slots=zeros(max_seqs),
            query_starts=zeros(max_seqs + 1),
            context_lens=zeros(max_seqs),
            block_tables=zeros(max_seqs, max_blocks),
            temperature=numbers(),
            top_k=zeros(max_seqs),
            top_p=numbers(),
            min_p=numbers(),
            seed=zeros(max_seqs),
            choice=zeros(max_seqs),
        )

    def to(self, device: torch.device) -> _Inputs:
        """Copies on `device`."""
        return _Inputs(**{each.name: getattr(self, each.name).to(device) for each in fields(self)})

    def layout(self, num_seqs: int) -> StepLayout:
        return StepLayout(
            positions=self.positions[:num_seqs],
            slots=self.slots[:num_seqs],
            query_starts=self.query_starts[: num_seqs + 1],
            context_lens=self.context_lens[:num_seqs],
            block_tables=self.block_tables[:num_seqs],
        )

    def sampling(self, num_seqs: int) -> SamplingInputs:
        return SamplingInputs(
            temperature=self.temperature[:num_seqs],
            top_k=self.top_k[:num_seqs],
            top_p=self.top_p[:num_seqs],
            min_p=self.min_p[:num_seqs],
            seed=self.seed[:num_seqs],
            choice=self.choice[:num_seqs],
            position=self.context_lens[:num_seqs],  # a new token's position is the length of what is before it
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """One bucket."""

    forward: Captured[Tensor]  # up to the logits
    whole: Captured[Sampled]  # and a token for each row, without penalties or logprobs


class DecodeSteps:
    """All recorded buckets of one runner. Raises nothing of its own; `fits` says whether a batch is a decode step."""

    def __init__(
        self,
        ops: Ops,
        *,
        buckets: tuple[int, ...],
        max_blocks: int,
        block_size: int,
        logits: Tensor,
    ) -> None:
        """buckets: ascending batch sizes. logits [buckets[-1], vocab]: where they go."""
        self._ops = ops
        self._buckets = buckets
        self._block_size = block_size
        self._logits = logits
        self._host = _Inputs.allocate(buckets[-1], max_blocks, pin=logits.device.type == "cuda")
        self._device = self._host if logits.device.type == "cpu" else self._host.to(logits.device)
        self._arrays: dict[str, npt.NDArray[np.int64]] = {
            each.name: getattr(self._host, each.name).numpy() for each in fields(self._host)
        }
        self._recorded: dict[int, _Recorded] = {}

    @property
    def num_ops(self) -> int:
        """Native ops or kernels of one replay; the same for every bucket. Needs `record`."""
        return self._recorded[self._buckets[0]].whole.num_ops

    def record(self, forward: Forward, on_progress: Callable[[int, int], None]) -> bool:
        """Record every bucket and run each once, dry. False: the backend does not record."""
        # Largest first: a pool of graph memory then serves the smaller ones, too.
        for done, bucket in enumerate(reversed(self._buckets)):
            on_progress(done, len(self._buckets))
            inputs, layout, logits = self._device, self._device.layout(bucket), self._logits[:bucket]

            def logits_of(
                token_ids: Tensor = inputs.token_ids[:bucket], layout: StepLayout = layout, out: Tensor = logits
            ) -> Tensor:
                return forward(token_ids, layout, out)

            def sampled_of(make: Callable[[], Tensor] = logits_of, count: int = bucket) -> Sampled:
                return self._ops.sample(make(), self._device.sampling(count))

            to_logits, whole = self._ops.capture(logits_of), self._ops.capture(sampled_of)
            if to_logits is None or whole is None:
                return False
            self._recorded[bucket] = _Recorded(to_logits, whole)
            whole.replay()  # without any live row
        return True

    def fits(self, batch: Batch) -> bool:
        """Whether this is one sampled token for each sequence, and no more sequences than were recorded."""
        return (
            bool(self._recorded)
            and len(batch.items) <= self._buckets[-1]
            and all(len(item.token_ids) == 1 and item.sample is not None for item in batch.items)
        )

    def run(self, batch: Batch) -> Sampled:
        """One token per item, for a batch that fits and is plain. Valid until the next step."""
        return self._replay_for(batch).whole.result

    def run_to_logits(self, batch: Batch) -> Tensor:
        """[num_items, vocab], for a batch that fits. Valid until the next step."""
        return self._replay_for(batch, whole=False).forward.result[: len(batch.items)]

    def _replay_for(self, batch: Batch, *, whole: bool = True) -> _Recorded:
        count = len(batch.items)
        bucket = self._buckets[bisect_left(self._buckets, count)]
        self._fill(batch, bucket)
        recorded = self._recorded[bucket]
        (recorded.whole if whole else recorded.forward).replay()
        return recorded

    def _fill(self, batch: Batch, bucket: int) -> None:
        arrays, count = self._arrays, len(batch.items)
        starts = np.fromiter((item.start for item in batch.items), np.int64, count)
        arrays["token_ids"][:count] = [item.token_ids[0] for item in batch.items]
        arrays["positions"][:count] = starts
        arrays["context_lens"][:count] = starts + 1
        arrays["query_starts"][: bucket + 1] = np.minimum(np.arange(bucket + 1), count)
        tables = arrays["block_tables"]
        for row, item in enumerate(batch.items):
            blocks = used_blocks(item, self._block_size)
            tables[row, : len(blocks)] = blocks
        last = tables[np.arange(count), starts // self._block_size]
        arrays["slots"][:count] = last * self._block_size + starts % self._block_size
        self._fill_sampling(batch.items)
        if self._device is not self._host:
            self._upload(bucket)

    def _fill_sampling(self, items: tuple[BatchItem, ...]) -> None:
        arrays, count = self._arrays, len(items)
        specs = [item.sample for item in items if item.sample is not None]
        params = [spec.params for spec in specs]
        arrays["temperature"][:count] = [one.temperature for one in params]
        arrays["top_k"][:count] = [one.top_k for one in params]
        arrays["top_p"][:count] = [one.top_p for one in params]
        arrays["min_p"][:count] = [one.min_p for one in params]
        arrays["seed"][:count] = np.array([one.seed & ((1 << 64) - 1) for one in params], np.uint64).view(np.int64)
        arrays["choice"][:count] = [spec.choice for spec in specs]

    def _upload(self, bucket: int) -> None:
        for each in fields(self._host):
            host, device = getattr(self._host, each.name), getattr(self._device, each.name)
            rows = bucket + (each.name == "query_starts")
            device[:rows].copy_(host[:rows], non_blocking=True)


def is_plain(batch: Batch) -> bool:
    """Whether the recorded sampler can serve every item: no penalties, no logprobs, no constraints."""
    return not any(_is_special(item.sample) for item in batch.items if item.sample is not None)


def _is_special(spec: SampleSpec) -> bool:
    return spec.constraint is not None or spec.params.num_logprobs is not None or has_penalties(spec.params)


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to record: 1, 2, 4, 8, then by 8 to the maximum."""
    few = [size for size in (1, 2, 4) if size < max_num_seqs]
    return (*few, *range(8, max_num_seqs, 8), max_num_seqs)
