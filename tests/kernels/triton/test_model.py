"""A whole model on the GPU backend: the reference's tokens, and its own bits however steps are cut and shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.kernels.ops import Ops, Sampled, SamplingInputs, StepLayout
from tandem.kernels.triton.backend import TritonOps
from tandem.kernels.triton.graph import count_ops
from tandem.workers.batch import Batch, BatchItem, SampledToken, SampleSpec
from tandem.workers.kv_cache import KVCache
from tandem.workers.model_runner import ModelRunner
from tandem.workers.models.config import ModelConfig, RopeConfig
from tandem.workers.models.decoder import Decoder
from tandem.workers.models.weights import LayerWeights, ModelWeights
from tandem.workers.types import SamplingParams

CONFIG = ModelConfig("llama", 131, 64, 96, 2, 6, 2, 32, 1e-5, 512, True, RopeConfig(10000.0))
BLOCK_SIZE = 8
BLOCKS_PER_SEQUENCE = 4
PROMPTS = [[5, 17, 99, 3, 64, 120, 7, 7, 30], [1, 2], [88, 41, 12, 100, 9]]


def random_weights(dtype: torch.dtype, num_layers: int = CONFIG.num_layers) -> ModelWeights:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    norm = torch.ones(64, dtype=dtype)
    layers = tuple(
        LayerWeights(
            input_norm=norm,
            qkv=random(10 * 32, 64),
            qkv_bias=random(10 * 32),
            q_norm=torch.ones(32, dtype=dtype),
            k_norm=torch.ones(32, dtype=dtype),
            output=random(64, 6 * 32),
            output_bias=None,
            post_norm=norm,
            gate_up=random(192, 64),
            gate_up_bias=None,
            down=random(64, 96),
            down_bias=None,
        )
        for _ in range(num_layers)
    )
    embedding = random(131, 64) * 2
    return ModelWeights(embedding, layers, norm, embedding)


def make_runner(ops: Ops, dtype: torch.dtype, num_layers: int = CONFIG.num_layers) -> ModelRunner:
    config = replace(CONFIG, num_layers=num_layers)
    cache = KVCache(config, len(PROMPTS) * BLOCKS_PER_SEQUENCE, BLOCK_SIZE, dtype, "cpu")
    cache.tensor.fill_(float("nan"))
    weights = random_weights(dtype, num_layers)
    return ModelRunner(config, weights, cache, max_num_seqs=4, max_model_len=32, ops=ops)


def item(index: int, tokens: list[int], start: int, end: int) -> BatchItem:
    """Tokens start to end of sequence `index`; the next one is sampled."""
    params = SamplingParams(max_tokens=9, seed=index, temperature=(0.0, 1.0, 0.8)[index], top_p=0.9, num_logprobs=2)
    sample = SampleSpec(params, 0, end, tuple(tokens[:end]), len(PROMPTS[index]))
    blocks = tuple(range(index * BLOCKS_PER_SEQUENCE, (index + 1) * BLOCKS_PER_SEQUENCE))
    return BatchItem(tuple(tokens[start:end]), start, blocks, sample)


def generate(runner: ModelRunner, indices: list[int], chunk: int, num_steps: int = 2) -> dict[int, list[SampledToken]]:
    """Prompts in chunks, each by itself; then decode steps of all."""
    tokens = {index: list(PROMPTS[index]) for index in indices}
    sampled: dict[int, list[SampledToken]] = {index: [] for index in indices}

    def take(index: int, token: SampledToken | None) -> None:
        assert token is not None
        sampled[index].append(token)
        tokens[index].append(token.token_id)

    for index in indices:
        prompt = PROMPTS[index]
        for start in range(0, len(prompt), chunk):
            end = min(start + chunk, len(prompt))
            (token,) = runner.execute(Batch((item(index, tokens[index], start, end),)))
        take(index, token)
    for _ in range(num_steps):
        items = tuple(item(index, tokens[index], len(tokens[index]) - 1, len(tokens[index])) for index in indices)
        for index, token in zip(indices, runner.execute(Batch(items)), strict=True):
            take(index, token)
    return sampled


def test_tokens_and_logprobs_are_those_of_the_reference(ops: Ops, reference: Ops) -> None:
    ours, theirs = (generate(make_runner(each, torch.float32), [0, 1, 2], 16) for each in (ops, reference))
    for index in theirs:
        assert [one.token_id for one in ours[index]] == [one.token_id for one in theirs[index]]
        for mine, expected in zip(ours[index], theirs[index], strict=True):
            assert mine.logprobs is not None
            assert expected.logprobs is not None
            assert mine.logprobs.logprob == pytest.approx(expected.logprobs.logprob, abs=1e-4)


def test_bits_do_not_depend_on_chunks_or_company(ops: Ops) -> None:
    together = generate(make_runner(ops, torch.float16, 1), [0, 1, 2], 16)
    chunked = generate(make_runner(ops, torch.float16, 1), [2, 0], 4)
    assert chunked == {index: together[index] for index in (2, 0)}


class Counted:
    """Starts nothing and counts."""

    num_launches = 0

    def __call__(self, kernel: object, grid: tuple[int, ...], arguments: tuple[object, ...], **meta: int) -> None:
        self.num_launches += 1


def test_a_decode_step_is_eight_kernels_per_layer_and_six_around_them(make_layout: Callable[..., StepLayout]) -> None:
    """As many layers as Qwen2.5-1.5B has; from token ids to sampled token ids."""
    config = replace(CONFIG, num_layers=28)
    launch = Counted()
    ops = TritonOps(launch)
    decoder = Decoder(config, random_weights(torch.float32, 28), ops, 32)
    decoder.reserve(2)
    cache = torch.zeros(4, 2, 28, 2, BLOCK_SIZE, 32)
    layout, token_ids, logits = make_layout([(1, 3), (1, 9)], BLOCK_SIZE), torch.tensor([1, 2]), torch.zeros(2, 131)
    rows, real = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    inputs = SamplingInputs(real, rows, real + 1, real, rows, rows, rows)

    def step() -> Sampled:
        plan = ops.plan_step(layout, cache, config.num_heads)
        return ops.sample(decoder.logits(decoder.forward(token_ids, cache, plan), out=logits), inputs)

    step()  # allocates what steps share
    _, num_ops = count_ops(step, launch)
    assert num_ops == 8 * 28 + 6


def test_a_rehearsal_runs_every_form_of_sampling(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(replace(CONFIG, num_layers=1), 4, BLOCK_SIZE, torch.float16, "cpu")
    sizes = {"max_num_seqs": 1, "max_model_len": 32, "max_num_batched_tokens": 2}
    runner = ModelRunner(replace(CONFIG, num_layers=1), random_weights(torch.float16, 1), cache, ops=ops, **sizes)
    forms: set[tuple[bool, bool]] = set()
    sample = ops.sample

    def watched(logits: Tensor, inputs: SamplingInputs) -> Sampled:
        forms.add((inputs.penalties is not None, inputs.constraints is not None))
        return sample(logits, inputs)

    monkeypatch.setattr(ops, "sample", watched)
    runner.rehearse()
    assert len(forms) == 4
