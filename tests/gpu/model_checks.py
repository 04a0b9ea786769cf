"""Whole models: beside the reference on the CPU, recorded against eager, and bit for bit in any company."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from report import Context, short
from rows import Row
from torch import Tensor

from tandem.kernels.ops import Ops
from tandem.workers.batch import Batch, BatchItem, SampledToken, SampleSpec, StepResult
from tandem.workers.kv_cache import KVCache
from tandem.workers.model_runner import ModelRunner
from tandem.workers.models.config import ModelConfig, RopeConfig
from tandem.workers.models.weights import LayerWeights, ModelWeights
from tandem.workers.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Scale:
    """A random model, and how much of everything."""

    config: ModelConfig
    num_seqs: int
    block_size: int
    shortest_prompt: int
    longer_by: int
    """Each prompt than the one before."""
    num_steps: int

    @classmethod
    def of(cls, context: Context) -> Scale:
        rope = RopeConfig(10000.0)
        if context.is_tiny:
            config = ModelConfig("llama", 300, 64, 96, 1, 4, 2, 32, 1e-5, 64, True, rope)
            return cls(config, 2, 16, 3, 1, 2)
        config = ModelConfig("llama", 5000, 256, 512, 3, 8, 2, 64, 1e-5, 1024, True, rope)
        return cls(config, 12, 32, 20, 61, 20)

    @property
    def max_model_len(self) -> int:
        return self.config.max_position_embeddings

    @property
    def blocks_per_seq(self) -> int:
        return self.max_model_len // self.block_size

    def prompt_of(self, index: int) -> list[int]:
        length = self.shortest_prompt + self.longer_by * (index % 12)
        return [(7 + 31 * place + 97 * index) % self.config.vocab_size for place in range(length)]


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> ModelWeights:
    """The same on every device."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype).to(device)

    hidden, inner = config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    qkv_size = query_size + 2 * config.num_kv_heads * config.head_dim
    norm = torch.ones(hidden, dtype=dtype, device=device)
    head_norm = torch.ones(config.head_dim, dtype=dtype, device=device)
    layers = tuple(
        LayerWeights(
            input_norm=norm,
            qkv=random(qkv_size, hidden),
            qkv_bias=random(qkv_size),
            q_norm=head_norm,
            k_norm=head_norm,
            output=random(hidden, query_size),
            output_bias=None,
            post_norm=norm,
            gate_up=random(2 * inner, hidden),
            gate_up_bias=None,
            down=random(hidden, inner),
            down_bias=None,
        )
        for _ in range(config.num_layers)
    )
    embedding = random(config.vocab_size, hidden) * 2
    return ModelWeights(embedding, layers, norm, embedding)


def make_runner(scale: Scale, ops: Ops, dtype: torch.dtype, device: torch.device | str) -> ModelRunner:
    cache = KVCache(scale.config, scale.num_seqs * scale.blocks_per_seq, scale.block_size, dtype, device)
    cache.tensor.fill_(float("nan"))
    weights = random_weights(scale.config, dtype, device)
    return ModelRunner(
        *(scale.config, weights, cache),
        max_num_seqs=scale.num_seqs,
        max_model_len=scale.max_model_len,
        max_num_batched_tokens=scale.max_model_len,  # prompts as a whole, too
        ops=ops,
    )


def _is_plain(index: int) -> bool:
    """Whether the recorded step samples this sequence's tokens, too."""
    return index % 3 != 1


def _item(scale: Scale, index: int, tokens: Sequence[int], start: int, end: int, num_prompt: int) -> BatchItem:
    params = SamplingParams(
        max_tokens=99, seed=index, temperature=(0.0, 0.9)[index % 2], top_p=(1.0, 0.8)[index // 2 % 2],
        num_logprobs=None if _is_plain(index) else 3,
    )  # fmt: skip
    blocks = tuple(range(index * scale.blocks_per_seq, (index + 1) * scale.blocks_per_seq))
    return BatchItem(
        tuple(tokens[start:end]), start, blocks, SampleSpec(params, 0, end, tuple(tokens[:end]), num_prompt)
    )


Tokens = dict[int, list[SampledToken]]


def generate(scale: Scale, runner: ModelRunner, indices: Sequence[int], chunk: int) -> Tokens:
    """Prompts in chunks, each by itself; then decode steps of all."""
    prompts = {index: scale.prompt_of(index) for index in indices}
    tokens = {index: list(prompt) for index, prompt in prompts.items()}
    sampled: Tokens = {index: [] for index in indices}

    def take(index: int, token: StepResult) -> None:
        assert isinstance(token, SampledToken)
        sampled[index].append(token)
        tokens[index].append(token.token_id)

    for index, prompt in prompts.items():
        result: list[StepResult] = []
        for start in range(0, len(prompt), chunk):
            end = min(start + chunk, len(prompt))
            result = runner.execute(Batch((_item(scale, index, tokens[index], start, end, len(prompt)),)))
        take(index, result[0])
    for _ in range(scale.num_steps):
        items = tuple(
            _item(scale, index, tokens[index], len(tokens[index]) - 1, len(tokens[index]), len(prompts[index]))
            for index in indices
        )
        for index, token in zip(indices, runner.execute(Batch(items)), strict=True):
            take(index, token)
    return sampled


def models(context: Context) -> Iterator[Row]:
    scale = Scale.of(context)
    everybody = range(scale.num_seqs)
    plain = [index for index in everybody if _is_plain(index)]
    yield _beside_reference(context, scale)
    for dtype in context.dtypes:
        name = short(dtype)
        runner = make_runner(scale, context.ops, dtype, context.device)
        eager = generate(scale, runner, everybody, 10_000)
        runner.record()
        replayed = generate(scale, runner, everybody, 10_000)
        yield _same(f"{name} recorded = eager", replayed, eager)
        yield _same(f"{name} recorded, token and all", generate(scale, runner, plain, 10_000), eager)
        counts = runner.counts
        detail = f"{counts.replayed} + {counts.replayed_to_logits} steps replayed, {counts.eager} eager"
        yield Row("model", f"{name} steps", "ok" if counts.replayed and counts.replayed_to_logits else "FAILED", detail)
        yield Row("model", f"{name} kernels per step", "measured", f"{runner.num_ops_per_decode_step}")
        some = list(everybody)[1:]
        chunked = generate(scale, runner, some, 5 if context.is_tiny else 50)
        yield _same(f"{name} in chunks, other company", chunked, eager)
        yield _same(f"{name} alone", generate(scale, runner, [1], 2 if context.is_tiny else 33), eager)
        runner.record()  # as a worker does when it knows how much KV there is room for
        yield _same(f"{name} recorded anew", generate(scale, runner, plain, 10_000), eager)
        runner.rehearse()


def _beside_reference(context: Context, scale: Scale) -> Row:
    """float32, where equal tokens can be asked for: near-ties are rare."""
    runners = (
        make_runner(scale, context.ops, torch.float32, context.device),
        make_runner(scale, context.reference, torch.float32, "cpu"),
    )
    ours, theirs = (generate(scale, runner, range(scale.num_seqs), 10_000) for runner in runners)
    total = sum(len(tokens) for tokens in theirs.values())
    same = sum(a.token_id == b.token_id for i in theirs for a, b in zip(ours[i], theirs[i], strict=True))
    detail = f"{same} of {total} tokens equal"
    return Row("model", "float32 beside the reference", "ok" if same >= 0.97 * total else "FAILED", detail)


def _same(case: str, actual: Tokens, expected: Tokens) -> Row:
    """Of those that are in `actual`."""
    wrong = sum(tokens != expected[index] for index, tokens in actual.items())
    detail = f"{wrong} of {len(actual)} sequences differ" if wrong else "equal bits"
    return Row("model", case, "FAILED" if wrong else "ok", detail)
