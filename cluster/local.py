"""Tandem without a server: one engine in this process. The same engine, kernels and sampling as everywhere else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.cluster.logs import say
from tandem.cluster.model_cache import Progress, cache_folder
from tandem.cluster.model_source import DtypeChoice, ResolvedModel, resolve_model
from tandem.kernels.tuning_cache import TUNING_FILE
from tandem.router.detokenizer import Detokenizer
from tandem.router.tokenizer import Tokenizer
from tandem.workers.config import WorkerConfig
from tandem.workers.engine import Engine
from tandem.workers.errors import RequestError, UserError
from tandem.workers.kv_cache import num_blocks_for
from tandem.workers.load import identity_of, load_runner
from tandem.workers.types import Request, SamplingParams

MAX_CONTEXT = 8192
BLOCK_SIZE = 32
KV_MEMORY_BYTES = 1 << 30


def generate(
    model: str,
    prompts: Sequence[str],
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    dtype: DtypeChoice = "auto",
) -> list[str]:
    """Continue each prompt; all of them in one batch. Returns the new text, in order. What takes time at a first start
    is told on standard error.

    Raises `UserError` for a model that cannot be served, or a prompt that does not fit.
    """
    progress = _teller()
    resolved = resolve_model(model, dtype=dtype, progress=progress)
    tokenizer = Tokenizer(resolved.folder)
    progress("loading weights", None, None)
    engine = _load(resolved)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        stop_token_ids=resolved.config.eos_token_ids,
    )
    detokenizers: dict[str, Detokenizer] = {}
    for index, prompt in enumerate(prompts):
        token_ids = tuple(tokenizer.encode(prompt, add_special_tokens=True))
        request = Request(request_id=str(index), prompt_token_ids=token_ids, sampling=sampling)
        try:
            engine.add(request)
        except RequestError as error:
            raise UserError(f"prompt {index + 1}: {error}") from error
        detokenizers[request.request_id] = tokenizer.detokenizer(token_ids)
    answers = dict.fromkeys(detokenizers, "")
    while not engine.is_idle:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.token is not None:
                request_id = output.sequence.request_id
                answers[request_id] += detokenizers[request_id].push(output.token.token_id)
    return [text + detokenizers[request_id].finish() for request_id, text in answers.items()]


def _teller() -> Progress:
    """Each message once, however often it comes."""
    told: set[str] = set()

    def tell(message: str, done: int | None = None, total: int | None = None) -> None:
        if message not in told:
            told.add(message)
            say(message)

    return tell


def _load(resolved: ResolvedModel) -> Engine:
    """An engine of its own, as a worker loads it."""
    blocks = num_blocks_for(KV_MEMORY_BYTES, resolved.config, BLOCK_SIZE, getattr(torch, resolved.dtype))
    config = WorkerConfig(
        model_path=resolved.folder,
        model_name=resolved.name,
        role="aggregated",
        worker_id="local",
        dtype=resolved.dtype,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=KV_MEMORY_BYTES,
        max_model_len=min(MAX_CONTEXT, resolved.config.max_position_embeddings, blocks * BLOCK_SIZE),
        num_threads=torch.get_num_threads(),
        tuning_file=cache_folder() / TUNING_FILE,
    )
    model_config, kv_cache, runner = load_runner(config)
    identity = identity_of(config, runner.ops, kv_cache)
    vocab_size, overlaps = model_config.vocab_size, runner.can_overlap
    return Engine(runner, config, kv_cache.num_blocks, identity, vocab_size=vocab_size, overlaps=overlaps)
