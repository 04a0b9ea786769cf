"""Decode steps, recorded once per batch bucket and replayed: one token of each sequence, at fixed addresses.

    fill(batch) ─> host buffers ─> device buffers ─> replay ─> sampled token ids
                                     ▲ tokens that only the device knows: of the step before

There is one set of buffers on the device, written and read in the order of its queue, and two on the host: a step's
inputs are filled in while those of the step before may still be read.

A batch is padded to the next bucket. Padding owns no rows: it is sequences without tokens behind the last one, so it
writes no KV and nobody reads what it computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.kernels.capture import Captured
from tandem.kernels.ops import Ops, Sampled, StepLayout
from tandem.kernels.queue import Mark, Queue
from tandem.workers.batch import Batch, BatchItem, SampleSpec
from tandem.workers.decode_inputs import DecodeInputs
from tandem.workers.step_inputs import has_penalties, seeds_of, used_blocks

_Arrays = dict[str, npt.NDArray[np.int64]]

Forward = Callable[[Tensor, StepLayout, Tensor], Tensor]
"""(token ids [n], layout, logits buffer [n, vocab]) -> the logits of every row."""


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """One bucket."""

    forward: Captured[Tensor]  # up to the logits
    whole: Captured[Sampled]  # and a token for each row, without penalties or logprobs


@dataclass(slots=True, eq=False)
class _HostInputs:
    """`uploaded`: when the device has read them for the last time."""

    inputs: DecodeInputs
    arrays: _Arrays
    uploaded: Mark | None = None

    @classmethod
    def of(cls, inputs: DecodeInputs) -> _HostInputs:
        return cls(inputs, {name: tensor.numpy() for name, tensor in inputs.arrays().items()})


class DecodeSteps:
    """All recorded buckets of one runner. Raises nothing of its own; `fits` says whether a batch is a decode step."""

    def __init__(
        self,
        ops: Ops,
        queue: Queue,
        *,
        buckets: tuple[int, ...],
        max_blocks: int,
        block_size: int,
        logits: Tensor,
    ) -> None:
        """buckets: ascending batch sizes. logits [buckets[-1], vocab]: where they go."""
        self._ops = ops
        self._queue = queue
        self._buckets = buckets
        self._block_size = block_size
        self._logits = logits
        sizes, device = (buckets[-1], max_blocks), logits.device
        self._device = DecodeInputs.allocate(*sizes, device)
        if queue.shares_memory:
            self._hosts = [_HostInputs.of(self._device)]
        else:
            pin = device.type == "cuda"
            cpu = torch.device("cpu")
            self._hosts = [_HostInputs.of(DecodeInputs.allocate(*sizes, cpu, pin=pin)) for _ in range(2)]
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

    def run(self, batch: Batch, sampled: Tensor | None = None) -> Tensor:
        """One token per item, [num_items] int64, for a batch that fits and is plain. Valid until the next step.

        `sampled`: what the step before did, [any number] int64, for items that follow it.
        """
        return self._replay_for(batch, sampled).whole.result.token_ids[: len(batch.items)]

    def run_to_logits(self, batch: Batch, sampled: Tensor | None = None) -> Tensor:
        """[num_items, vocab], for a batch that fits. Valid until the next step."""
        return self._replay_for(batch, sampled, whole=False).forward.result[: len(batch.items)]

    def _replay_for(self, batch: Batch, sampled: Tensor | None, *, whole: bool = True) -> _Recorded:
        count = len(batch.items)
        bucket = self._buckets[bisect_left(self._buckets, count)]
        host = self._next_host()
        self._fill(host.arrays, batch, bucket)
        num_following = self._fill_following(host.arrays, batch)
        if not self._queue.shares_memory:
            self._queue.submit(partial(host.inputs.upload, self._device, bucket))
            host.uploaded = self._queue.mark()
        if num_following:
            assert sampled is not None, "a step that follows none"
            self._queue.submit(partial(self._device.follow, num_following, sampled))
        recorded = self._recorded[bucket]
        self._queue.submit((recorded.whole if whole else recorded.forward).replay)
        return recorded

    def _next_host(self) -> _HostInputs:
        """The buffers that were filled longest ago, when the device has read them: so it has as soon as the step before
        the last one is over, and nobody waits here."""
        host = self._hosts.pop(0)
        self._hosts.append(host)
        if host.uploaded is not None:
            host.uploaded.wait()
        return host

    def _fill_following(self, arrays: _Arrays, batch: Batch) -> int:
        """How many items follow the step before."""
        rows = [row for row, item in enumerate(batch.items) if item.follows is not None]
        if rows:
            arrays["following_rows"][: len(rows)] = rows
            arrays["followed_rows"][: len(rows)] = [item.follows for item in batch.items if item.follows is not None]
        return len(rows)

    def _fill(self, arrays: _Arrays, batch: Batch, bucket: int) -> None:
        count = len(batch.items)
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
        self._fill_sampling(arrays, batch.items)

    def _fill_sampling(self, arrays: _Arrays, items: tuple[BatchItem, ...]) -> None:
        count = len(items)
        specs = [item.sample for item in items if item.sample is not None]
        params = [spec.params for spec in specs]
        arrays["temperature"][:count] = [one.temperature for one in params]
        arrays["top_k"][:count] = [one.top_k for one in params]
        arrays["top_p"][:count] = [one.top_p for one in params]
        arrays["min_p"][:count] = [one.min_p for one in params]
        arrays["seed"][:count] = seeds_of(params)
        arrays["choice"][:count] = [spec.choice for spec in specs]


def is_plain(batch: Batch) -> bool:
    """Whether the recorded sampler can serve every item: no penalties, no logprobs, no constraints."""
    return not any(_is_special(item.sample) for item in batch.items if item.sample is not None)


def _is_special(spec: SampleSpec) -> bool:
    return spec.constraint is not None or spec.params.num_logprobs is not None or has_penalties(spec.params)


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to record: 1, 2, 4, 8, then by 8 to the maximum."""
    few = [size for size in (1, 2, 4) if size < max_num_seqs]
    return (*few, *range(8, max_num_seqs, 8), max_num_seqs)
