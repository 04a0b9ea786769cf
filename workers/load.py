"""Everything that takes memory or time before a worker, or a program without a server, can compute.

check the model ──> kernels ──> weights, KV cache ──> tune ──> record steps ──> (GPU) dry prompts, the cache's size
"""

from __future__ import annotations

import logging

import torch

from tandem.kernels.ops import Ops
from tandem.workers.backend import create_ops
from tandem.workers.config import WorkerConfig
from tandem.workers.errors import UserError
from tandem.workers.identity import numerics_of
from tandem.workers.kv_cache import LAYOUT_VERSION, KVCache
from tandem.workers.kv_sizing import first_num_blocks, full_cache
from tandem.workers.model_runner import ModelRunner
from tandem.workers.models.checkpoint import check_model, load_weights, revision_of
from tandem.workers.models.config import ModelConfig
from tandem.workers.protocol import PROTOCOL_VERSION
from tandem.workers.types import ModelIdentity
from tandem.workers.warm_up import WarmUp, tuning_workload

logger = logging.getLogger(__name__)


def load_runner(config: WorkerConfig, warm_up: WarmUp | None = None) -> tuple[ModelConfig, KVCache, ModelRunner]:
    """A model that is ready to run, with the memory for its KV. Blocking. Raises `UserError`."""
    try:
        return _load(config, warm_up or WarmUp(logger.debug))
    except torch.OutOfMemoryError as error:
        raise UserError(f"the GPU's memory does not hold this: {next(iter(str(error).splitlines()), '')}") from error


def _load(config: WorkerConfig, warm_up: WarmUp) -> tuple[ModelConfig, KVCache, ModelRunner]:
    model = check_model(config.model_path)
    num_blocks, dtype = first_num_blocks(config, model), getattr(torch, config.dtype)
    with warm_up.phase("preparing kernels"):
        ops = create_ops(config.device, warm_up.tell, config.cpu_level)
    with warm_up.phase("loading weights"), torch.inference_mode():
        weights = load_weights(config.model_path, model, dtype).to(config.device)
        kv_cache = KVCache(model, num_blocks, config.block_size, dtype, config.device)
        runner = ModelRunner(
            model,
            weights,
            kv_cache,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            ops=ops,
        )
        del weights
    _tune(config, model, runner, warm_up)
    with warm_up.phase("recording steps"):
        runner.record(warm_up.advance)
    if config.device != "cpu":  # whose kernels are compiled by now
        with warm_up.phase("dry prompts"):
            runner.rehearse(warm_up.advance)
    if config.kv_cache_memory_bytes is None:
        with warm_up.phase("sizing the KV cache"):
            kv_cache = full_cache(config, model, kv_cache)
            runner.use_cache(kv_cache)
            runner.record(warm_up.advance)
    logger.info("warm-up: %s", warm_up.summary())
    return model, kv_cache, runner


def _tune(config: WorkerConfig, model: ModelConfig, runner: ModelRunner, warm_up: WarmUp) -> None:
    workload = tuning_workload(
        model,
        runner.decoder.linears,
        dtype=config.dtype,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
    )
    with torch.inference_mode():
        warm_up.tune(runner.ops, workload, config.tuning_file, deadline_s=config.tuning_deadline_s)


def identity_of(config: WorkerConfig, ops: Ops, kv_cache: KVCache) -> ModelIdentity:
    """What others must have in common with this worker before KV may travel."""
    return ModelIdentity(
        protocol_version=PROTOCOL_VERSION,
        model=config.model_name,
        revision=revision_of(config.model_path),
        dtype=config.dtype,
        numerics=numerics_of(ops.numerics()),
        layout_version=LAYOUT_VERSION,
        block_size=config.block_size,
        block_bytes=kv_cache.block_bytes,
        max_model_len=config.max_model_len,
    )
