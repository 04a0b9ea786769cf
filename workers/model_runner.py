"""Executes a step: replays the recorded one where the batch is a decode step, else computes it as it comes.

The runner keeps nothing per sequence. All it knows comes with the batch, and all that lasts is in the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from tandem.kernels.ops import Ops, Sampled, StepLayout, load_ops
from tandem.kernels.queue import Queue, queue_of
from tandem.workers.batch import Batch, SampleSpec, ScoreSpec, StepResult
from tandem.workers.decode_step import DecodeSteps, decode_buckets, is_plain
from tandem.workers.errors import DeviceLost
from tandem.workers.kv_cache import KVCache
from tandem.workers.masks import Mask, MaskMaker
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.decoder import Decoder
from tandem.workers.models.weights import ModelWeights
from tandem.workers.pool_rows import pool
from tandem.workers.rehearsal import dry_batches
from tandem.workers.step_inputs import StepInputs, build, build_sampling, moved_by
from tandem.workers.step_results import Launched, results_of

T = TypeVar("T")


@dataclass(slots=True)
class StepCounts:
    """How steps were run so far."""

    replayed: int = 0
    """Recorded decode steps, token and all."""
    replayed_to_logits: int = 0
    """Recorded up to the logits; sampled by itself, for penalties, logprobs, biases or masks."""
    eager: int = 0
    """Computed as they came: prompts, and whatever the recorded steps do not cover."""

    def series(self, role: str) -> dict[str, float]:
        """As counters for /metrics."""
        values = {"replayed": self.replayed, "replayed_to_logits": self.replayed_to_logits, "eager": self.eager}
        return {f'steps_total{{role="{role}",how="{how}"}}': float(value) for how, value in values.items()}


class ModelRunner:
    """One model, one KV cache, one step after the other; the next may be launched while one is computed.

    `weights` are packed and need not be kept by the caller. Raises `ValueError` when a batch exceeds `max_num_seqs` or
    `max_model_len`, or when an item's blocks are too few: all of them bugs of the scheduler.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int = 512,
        ops: Ops | None = None,
        queue: Queue | None = None,
    ) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self.ops = load_ops("reference") if ops is None else ops
        self.decoder = Decoder(config, weights, self.ops, max_model_len)
        self.decoder.reserve(max(max_num_batched_tokens, max_num_seqs))
        self._logits = weights.embedding.new_empty(max_num_seqs, config.vocab_size)
        self._decode: DecodeSteps | None = None
        self._masks = MaskMaker()
        self._queue = queue_of(kv_cache.tensor.device) if queue is None else queue
        self._sampled: Tensor | None = None
        """What the last step sampled, [num_samples] int64, until the next one."""
        self.counts = StepCounts()

    @torch.inference_mode()
    def record(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> bool:
        """Record decode steps for all batch sizes. False: the backend does not record, all steps stay eager.

        `on_progress` is called with how many of how many are done.
        """
        decode = DecodeSteps(
            self.ops,
            self._queue,
            buckets=decode_buckets(self._max_num_seqs),
            max_blocks=-(-self._max_model_len // self._kv_cache.block_size),
            block_size=self._kv_cache.block_size,
            logits=self._logits,
        )
        if not decode.record(self._logits_of, on_progress):
            return False
        self._decode = decode
        return True

    def use_cache(self, kv_cache: KVCache) -> None:
        """Another cache from now on. What was recorded is forgotten: it has the addresses of the old one."""
        self._kv_cache = kv_cache
        self._decode = self._sampled = None

    @torch.inference_mode()
    def rehearse(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Prompts of all sizes, dry, so that later nothing is compiled and no workspace grows. The pool's first blocks
        must be free."""
        pool_tokens = self._kv_cache.num_blocks * self._kv_cache.block_size
        most = min(self._max_num_batched_tokens, self._max_model_len, pool_tokens)
        batches = dry_batches(most, self._max_num_seqs, self._kv_cache.block_size, self._config.vocab_size)
        for done, batch in enumerate(batches):
            on_progress(done, len(batches))
            self._compute(batch, None)

    @property
    def num_ops_per_decode_step(self) -> int:
        """Native ops or kernels of a recorded decode step. Raises `ValueError` if none was recorded."""
        if self._decode is None:
            raise ValueError("no decode step was recorded")
        return self._decode.num_ops

    @property
    def can_overlap(self) -> bool:
        """Whether `launch` returns before the step is computed, so that something can be done meanwhile."""
        return not self._queue.shares_memory

    def execute(self, batch: Batch) -> list[StepResult]:
        """Compute the KV of every token of the batch, and sample where asked. Aligned with `batch.items`."""
        return self.launch(batch)()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Callable[[], list[StepResult]]:
        """Begin a step, behind those that were launched before; call the result to wait for what comes of it. Nothing
        here waits for the device. Both raise `DeviceLost` where no later step could do better."""
        if not batch.items:
            return list
        self._check(batch)
        with self._watched():
            return self._launch(batch)

    def _launch(self, batch: Batch) -> Callable[[], list[StepResult]]:
        followed, self._sampled = self._sampled, None  # of a step that fails there is nothing to follow
        for copy in batch.copies:
            self._queue.submit(partial(self._kv_cache.copy_block, copy.source, copy.destination))
        if self._decode is not None and self._decode.fits(batch):
            launched = self._replay(self._decode, batch, followed)
        else:
            self.counts.eager += 1
            launched = self._compute(batch, followed)
        if self._queue.shares_memory:  # all is done, and the next step may write where this one's tokens are
            results = results_of(batch, launched)
            return lambda: results
        done = self._queue.mark()

        def collect() -> list[StepResult]:
            with self._watched():
                done.wait()
            return results_of(batch, launched)

        return collect

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._queue.is_alive():
                raise
            raise DeviceLost(f"the device has failed: {next(iter(str(error).splitlines()), '')}") from error

    def _replay(self, decode: DecodeSteps, batch: Batch, followed: Tensor | None) -> Launched:
        if is_plain(batch):
            self.counts.replayed += 1
            token_ids = decode.run(batch, followed)
            self._sampled = token_ids
            fetched = token_ids if self._queue.shares_memory else self._queue.fetch(token_ids)
            return Launched(Sampled(fetched, None, None, None))
        self.counts.replayed_to_logits += 1
        wait_for_masks = self._masks.begin(_specs(batch))
        logits = decode.run_to_logits(batch, followed)
        masks = None if wait_for_masks is None else wait_for_masks()
        return Launched(self._fetch(self._queue.run(lambda: self._sample(logits, batch, followed, masks))), masks)

    def _compute(self, batch: Batch, followed: Tensor | None) -> Launched:
        specs = _specs(batch)
        wait_for_masks = self._masks.begin(specs, num_others=len(batch.items) - len(specs))
        send = self._queue.send
        inputs = self._queue.run(lambda: build(batch, self._kv_cache.block_size, send, followed))
        sampled, masks = None, None
        if not specs:
            hidden = self._run(lambda: self._forward(inputs.token_ids, inputs.layout))
        elif wait_for_masks is None:
            hidden, sampled = self._run(lambda: self._compute_and_sample(inputs, batch, followed))
        else:
            hidden, logits = self._run(lambda: self._compute_logits(inputs))
            masks = wait_for_masks()
            sampled = self._queue.run(lambda: self._sample(logits, batch, followed, masks))
        launched = Launched(self._fetch(sampled), masks)
        self._queue.run(lambda: self._read(batch, hidden, launched))
        return launched

    def _run(self, step: Callable[[], T]) -> T:
        return self._queue.run(lambda: self.ops.run(step))

    def _fetch(self, sampled: Sampled | None) -> Sampled | None:
        """Have what was sampled in host memory, once the step is over, and on the device for the next one."""
        if sampled is None:
            return None
        self._sampled = sampled.token_ids
        fetched: Sampled = moved_by(self._queue.fetch, sampled)
        return fetched

    def _read(self, batch: Batch, hidden: Tensor, launched: Launched) -> None:
        """What was to be scored or pooled. hidden [num_tokens, hidden]: what the step computed."""
        start = 0
        for index, item in enumerate(batch.items):
            if item.pool is not None:
                rows = pool(hidden[start : start + len(item.token_ids)], item.pool)
                launched.pooled[index] = self._queue.fetch(rows)
            if item.score is not None:
                launched.scores[index] = self._score(hidden[start:], item.score)
            start += len(item.token_ids)

    def _score(self, hidden: Tensor, spec: ScoreSpec) -> list[Sampled]:
        """Few rows at a time: the logits of a whole chunk are large."""
        if not spec.targets:
            return []
        targets = self._queue.send(torch.tensor(spec.targets))
        scores: list[Sampled] = []
        for first in range(0, len(spec.targets), self._max_num_seqs):
            rows = slice(first, min(first + self._max_num_seqs, len(spec.targets)))
            logits = self.decoder.logits(hidden[rows], out=self._logits[: rows.stop - rows.start])
            scores.append(moved_by(self._queue.fetch, self.ops.score(logits, targets[rows], spec.num_top)))
        return scores

    def _compute_and_sample(self, inputs: StepInputs, batch: Batch, followed: Tensor | None) -> tuple[Tensor, Sampled]:
        hidden, logits = self._compute_logits(inputs)
        return hidden, self._sample(logits, batch, followed)

    def _sample(
        self, logits: Tensor, batch: Batch, followed: Tensor | None, masks: list[Mask] | None = None
    ) -> Sampled:
        follows = [item.follows for item in batch.items if item.sample is not None]
        return self.ops.sample(logits, build_sampling(_specs(batch), self._queue.send, masks, follows, followed))

    def _compute_logits(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Hidden states [num_tokens, hidden], and logits where a token is sampled [num_samples, vocab]; both until the
        next step."""
        hidden = self._forward(inputs.token_ids, inputs.layout)
        sampled_rows = self.ops.embedding(inputs.sample_rows, hidden)
        return hidden, self.decoder.logits(sampled_rows, out=self._logits[: inputs.sample_rows.shape[0]])

    def _logits_of(self, token_ids: Tensor, layout: StepLayout, out: Tensor) -> Tensor:
        return self.decoder.logits(self._forward(token_ids, layout), out=out)

    def _forward(self, token_ids: Tensor, layout: StepLayout) -> Tensor:
        plan = self.ops.plan_step(layout, self._kv_cache.tensor, self._config.num_heads)
        return self.decoder.forward(token_ids, self._kv_cache.tensor, plan)

    def _check(self, batch: Batch) -> None:
        if len(batch.items) > self._max_num_seqs:
            raise ValueError(f"{len(batch.items)} items in a batch, max_num_seqs is {self._max_num_seqs}")
        for item in batch.items:
            end = item.start + len(item.token_ids)
            if not item.token_ids or end > self._max_model_len:
                raise ValueError(f"positions {item.start} to {end}, max_model_len is {self._max_model_len}")
            if len(item.block_ids) * self._kv_cache.block_size < end:
                raise ValueError(f"{len(item.block_ids)} blocks for {end} tokens")


def _specs(batch: Batch) -> list[SampleSpec]:
    return [item.sample for item in batch.items if item.sample is not None]
