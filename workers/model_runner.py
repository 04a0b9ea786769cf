"""Executes a step: replays the recorded one where the batch is a decode step, else computes it as it comes.

The runner keeps nothing per sequence. All it knows comes with the batch, and all that lasts is in the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.ops import Ops, Sampled, StepLayout, load_ops
from tandem.workers.batch import Batch, Pooled, SampledToken, SampleSpec, Scored, ScoreSpec, StepResult
from tandem.workers.decode_step import DecodeSteps, decode_buckets, is_plain
from tandem.workers.kv_cache import KVCache
from tandem.workers.masks import Mask, MaskMaker
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.decoder import Decoder
from tandem.workers.models.weights import ModelWeights
from tandem.workers.pool_rows import pool
from tandem.workers.rehearsal import dry_batches
from tandem.workers.step_inputs import StepInputs, build, build_sampling, collect, records_of
from tandem.workers.types import TokenLogprobs


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
    """One model, one KV cache, one step at a time.

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
        self.counts = StepCounts()

    @torch.inference_mode()
    def record(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> bool:
        """Record decode steps for all batch sizes. False: the backend does not record, all steps stay eager.

        `on_progress` is called with how many of how many are done.
        """
        decode = DecodeSteps(
            self.ops,
            buckets=decode_buckets(self._max_num_seqs),
            max_blocks=-(-self._max_model_len // self._kv_cache.block_size),
            block_size=self._kv_cache.block_size,
            logits=self._logits,
        )
        if not decode.record(self._logits_of, on_progress):
            return False
        self._decode = decode
        return True

    @torch.inference_mode()
    def rehearse(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Prompts of all sizes, dry, so that nothing is compiled later. The pool's first blocks must be free."""
        pool_tokens = self._kv_cache.num_blocks * self._kv_cache.block_size
        most = min(self._max_num_batched_tokens, self._max_model_len, pool_tokens)
        batches = dry_batches(most, self._kv_cache.block_size, self._config.vocab_size)
        for done, batch in enumerate(batches):
            on_progress(done, len(batches))
            self._compute(batch)

    @property
    def num_ops_per_decode_step(self) -> int:
        """Native ops or kernels of a recorded decode step. Raises `ValueError` if none was recorded."""
        if self._decode is None:
            raise ValueError("no decode step was recorded")
        return self._decode.num_ops

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[StepResult]:
        """Compute the KV of every token of the batch, and sample where asked. Aligned with `batch.items`."""
        if not batch.items:
            return []
        self._check(batch)
        for copy in batch.copies:
            self._kv_cache.copy_block(copy.source, copy.destination)
        if self._decode is not None and self._decode.fits(batch):
            return self._replay(self._decode, batch)
        self.counts.eager += 1
        return self._compute(batch)

    def _replay(self, decode: DecodeSteps, batch: Batch) -> list[StepResult]:
        if is_plain(batch):
            self.counts.replayed += 1
            token_ids = decode.run(batch).token_ids[: len(batch.items)].tolist()
            return [SampledToken(token_id, None) for token_id in token_ids]
        self.counts.replayed_to_logits += 1
        specs = _specs(batch)
        wait_for_masks = self._masks.begin(specs)
        logits = decode.run_to_logits(batch)
        masks = None if wait_for_masks is None else wait_for_masks()
        return collect(batch, self._sample(logits, specs, masks), masks)

    def _compute(self, batch: Batch) -> list[StepResult]:
        specs = _specs(batch)
        wait_for_masks = self._masks.begin(specs, num_others=len(batch.items) - len(specs))
        inputs = build(batch, self._kv_cache.block_size, self._kv_cache.tensor.device)
        if not specs:
            hidden = self.ops.run(lambda: self._forward(inputs.token_ids, inputs.layout))
            results: list[StepResult] = [None] * len(batch.items)
        elif wait_for_masks is None:
            hidden, sampled = self.ops.run(lambda: self._compute_and_sample(inputs, specs))
            results = collect(batch, sampled)
        else:
            hidden, logits = self.ops.run(lambda: self._compute_logits(inputs))
            masks = wait_for_masks()
            results = collect(batch, self._sample(logits, specs, masks), masks)
        return self._with_readings(batch, hidden, results)

    def _with_readings(self, batch: Batch, hidden: Tensor, results: list[StepResult]) -> list[StepResult]:
        """The results with what was to be scored or pooled. hidden [num_tokens, hidden]: what the step computed."""
        start = 0
        for index, item in enumerate(batch.items):
            if item.pool is not None:
                results[index] = pool(hidden[start : start + len(item.token_ids)], item.pool)
            if item.score is not None:
                logprobs = self._score(hidden[start:], item.score)
                token = results[index]
                assert not isinstance(token, Scored | Pooled), "scored twice"
                results[index] = Scored(logprobs, token)
            start += len(item.token_ids)
        return results

    def _score(self, hidden: Tensor, spec: ScoreSpec) -> list[TokenLogprobs]:
        """Few rows at a time: the logits of a whole chunk are large."""
        if not spec.targets:
            return []
        targets = torch.tensor(spec.targets, device=hidden.device)
        logprobs: list[TokenLogprobs] = []
        for few in torch.split(torch.arange(len(spec.targets)), self._max_num_seqs):
            rows = slice(int(few[0]), int(few[-1]) + 1)
            logits = self.decoder.logits(hidden[rows], out=self._logits[: len(few)])
            logprobs += records_of(self.ops.score(logits, targets[rows], spec.num_top))
        return logprobs

    def _compute_and_sample(self, inputs: StepInputs, specs: list[SampleSpec]) -> tuple[Tensor, Sampled]:
        hidden, logits = self._compute_logits(inputs)
        return hidden, self._sample(logits, specs)

    def _sample(self, logits: Tensor, specs: list[SampleSpec], masks: list[Mask] | None = None) -> Sampled:
        return self.ops.sample(logits, build_sampling(specs, logits.device, masks))

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
