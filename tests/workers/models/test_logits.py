"""Logits against Hugging Face transformers in float32, for every variant, over prompts that cross block borders."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tandem.kernels.ops import load_ops
from tandem.workers.batch import Batch, BatchItem
from tandem.workers.kv_cache import KVCache
from tandem.workers.models.checkpoint import check_model, load_weights
from tandem.workers.models.decoder import Decoder
from tandem.workers.step_inputs import build

BLOCK_SIZE = 32
MAX_LEN = 300
PROMPT_LENGTHS = (1, 2, 31, 32, 33, 64, 129, MAX_LEN)
TOLERANCE = 1e-4
"""Of the span of the logits, max - min."""


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@torch.inference_mode()
def test_logits_equal_the_reference(variant: Any, backend: str) -> None:
    """All prompts run together, each in chunks of its own random sizes, in blocks scattered over the pool."""
    rng = random.Random(7)
    config = check_model(variant.folder)
    ops = load_ops(backend)
    decoder = Decoder(config, load_weights(variant.folder, config, torch.float32), ops, MAX_LEN)
    blocks_each = -(-MAX_LEN // BLOCK_SIZE)
    cache = KVCache(config, blocks_each * len(PROMPT_LENGTHS), BLOCK_SIZE, torch.float32, "cpu")
    pool = rng.sample(range(cache.num_blocks), cache.num_blocks)
    block_ids = [pool[index * blocks_each : (index + 1) * blocks_each] for index in range(len(PROMPT_LENGTHS))]
    prompts = [[rng.randrange(config.vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS]
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]

    while unfinished := [index for index, prompt in enumerate(prompts) if len(rows[index]) < len(prompt)]:
        items = []
        for index in unfinished:
            start = len(rows[index])
            chunk = prompts[index][start : start + rng.choice((1, 7, 32, 50))]
            items.append(BatchItem(token_ids=chunk, start=start, block_ids=block_ids[index], sample=None))
        inputs = build(Batch(items=tuple(items)), BLOCK_SIZE)
        plan = ops.plan_step(inputs.layout, cache.tensor, config.num_heads)
        logits = iter(decoder.logits(decoder.forward(inputs.token_ids, cache.tensor, plan)))
        for index, item in zip(unfinished, items, strict=True):
            rows[index] += [next(logits) for _ in item.token_ids]

    for prompt, ours in zip(prompts, rows, strict=True):
        if config.rope.scaling == "dynamic" and len(prompt) < MAX_LEN > config.max_position_embeddings:
            continue  # the reference's frequencies change with the text; ours are those of a text of MAX_LEN tokens
        theirs = variant.model(torch.tensor([prompt])).logits[0]
        span = theirs.max() - theirs.min()
        difference = (torch.stack(ours) - theirs).abs().max()
        assert difference <= TOLERANCE * span, f"{len(prompt)} tokens: {difference / span:.1e} of the span"


@torch.inference_mode()
def test_the_tolerance_tells_a_wrong_model(make_checkpoint: Any) -> None:
    """A rotary base that is off by 1 % shows clearly, so the comparison above can fail."""
    checkpoint = make_checkpoint("llama")
    prompt = torch.tensor([list(range(90))])
    right = checkpoint.model(prompt).logits
    rotary = checkpoint.model.model.rotary_emb
    rotary.inv_freq *= 1.01
    wrong = checkpoint.model(prompt).logits
    assert (right - wrong).abs().max() > 10 * TOLERANCE * (right.max() - right.min())
