"""Whole models: beside the reference on the CPU, recorded against eager, and bit for bit in any company."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from report import Context, Row
from torch import Tensor

from tandem.kernels.ops import Ops
from tandem.workers.batch import Batch, BatchItem, SampledToken, SampleSpec
from tandem.workers.kv_cache import KVCache
from tandem.workers.model_runner import ModelRunner
from tandem.workers.models.config import ModelConfig, RopeConfig
from tandem.workers.models.weights import LayerWeights, ModelWeights
from tandem.workers.types import SamplingParams

BLOCK_SIZE = 32
MAX_MODEL_LEN = 1024
NUM_SEQUENCES = 12


def small_config() -> ModelConfig:
    return ModelConfig("llama", 5000, 256, 512, 3, 8, 2, 64, 1e-5, MAX_MODEL_LEN, True, RopeConfig(10000.0))


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str, *, qk_norm: bool
) -> ModelWeights:
    """The same on every device."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype).to(device)

    hidden, inner = config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    qkv_size = query_size + 2 * config.num_kv_heads * config.head_dim
    norm = torch.ones(hidden, dtype=dtype, device=device)
    head_norm = torch.ones(config.head_dim, dtype=dtype, device=device) if qk_norm else None
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


def make_runner(config: ModelConfig, ops: Ops, dtype: torch.dtype, device: torch.device | str) -> ModelRunner:
    blocks = NUM_SEQUENCES * (MAX_MODEL_LEN // BLOCK_SIZE)
    cache = KVCache(config, blocks, BLOCK_SIZE, dtype, device)
    cache.tensor.fill_(float("nan"))
    weights = random_weights(config, dtype, device, qk_norm=True)
    return ModelRunner(*(config, weights, cache), max_num_seqs=NUM_SEQUENCES, max_model_len=MAX_MODEL_LEN, ops=ops)


def prompt_of(index: int, is_tiny: bool) -> list[int]:
    length = 3 + index if is_tiny else 20 + 61 * index
    return [(7 + 31 * place + 97 * index) % 5000 for place in range(length)]


def _item(index: int, tokens: Sequence[int], start: int, end: int, num_prompt: int) -> BatchItem:
    params = SamplingParams(
        max_tokens=99, seed=index, temperature=(0.0, 0.9)[index % 2], top_p=(1.0, 0.8)[index // 2 % 2],
        num_logprobs=(None, 3)[index // 4 % 2],
    )  # fmt: skip
    per_sequence = MAX_MODEL_LEN // BLOCK_SIZE
    blocks = tuple(range(index * per_sequence, (index + 1) * per_sequence))
    return BatchItem(
        tuple(tokens[start:end]), start, blocks, SampleSpec(params, 0, end, tuple(tokens[:end]), num_prompt)
    )


Tokens = dict[int, list[SampledToken]]


def generate(runner: ModelRunner, indices: Sequence[int], chunk: int, num_steps: int, *, is_tiny: bool) -> Tokens:
    """Prompts in chunks, each by itself; then decode steps of all."""
    prompts = {index: prompt_of(index, is_tiny) for index in indices}
    tokens = {index: list(prompt) for index, prompt in prompts.items()}
    sampled: Tokens = {index: [] for index in indices}

    def take(index: int, token: SampledToken | None) -> None:
        assert token is not None
        sampled[index].append(token)
        tokens[index].append(token.token_id)

    for index, prompt in prompts.items():
        result: list[SampledToken | None] = []
        for start in range(0, len(prompt), chunk):
            end = min(start + chunk, len(prompt))
            result = runner.execute(Batch((_item(index, tokens[index], start, end, len(prompt)),)))
        take(index, result[0])
    for _ in range(num_steps):
        items = tuple(
            _item(index, tokens[index], len(tokens[index]) - 1, len(tokens[index]), len(prompts[index]))
            for index in indices
        )
        for index, token in zip(indices, runner.execute(Batch(items)), strict=True):
            take(index, token)
    return sampled


def models(context: Context) -> Iterator[Row]:
    tiny = context.is_tiny
    config = small_config()
    indices, num_steps = (range(2), 1) if tiny else (range(NUM_SEQUENCES), 20)
    yield _beside_reference(context, config, indices, num_steps)
    for dtype in context.dtypes:
        name = str(dtype).removeprefix("torch.")
        runner = make_runner(config, context.ops, dtype, context.device)
        eager = generate(runner, indices, 10_000, num_steps, is_tiny=tiny)
        if not runner.record():
            yield Row("model", f"{name} recorded = eager", "skipped", "this device does not record")
        else:
            replayed = generate(runner, indices, 10_000, num_steps, is_tiny=tiny)
            yield _same("model", f"{name} recorded = eager", replayed, eager)
            counts = f"{runner.counts.replayed} + {runner.counts.replayed_to_logits} steps replayed"
            yield Row("model", f"{name} kernels per step", "measured", f"{runner.num_ops_per_decode_step}, {counts}")
        chunked = generate(runner, list(indices)[1:], 5 if tiny else 50, num_steps, is_tiny=tiny)
        yield _same("model", f"{name} in chunks, other company", chunked, {index: eager[index] for index in chunked})
        alone = generate(runner, [1], 7 if tiny else 33, num_steps, is_tiny=tiny)
        yield _same("model", f"{name} alone", alone, {1: eager[1]})


def _beside_reference(context: Context, config: ModelConfig, indices: Sequence[int], num_steps: int) -> Row:
    """float32, where equal tokens can be asked for: near-ties are rare."""
    runners = (
        make_runner(config, context.ops, torch.float32, context.device),
        make_runner(config, context.reference, torch.float32, "cpu"),
    )
    ours, theirs = (generate(runner, indices, 10_000, num_steps, is_tiny=context.is_tiny) for runner in runners)
    total = sum(len(tokens) for tokens in theirs.values())
    same = sum(a.token_id == b.token_id for i in theirs for a, b in zip(ours[i], theirs[i], strict=True))
    outcome = "ok" if same >= 0.97 * total else "FAILED"
    return Row("model", "float32 beside the reference", outcome, f"{same} of {total} tokens equal")  # type: ignore[arg-type]


def _same(check: str, case: str, actual: Tokens, expected: Tokens) -> Row:
    wrong = sum(actual[index] != expected[index] for index in expected)
    return Row(
        check,
        case,
        "FAILED" if wrong else "ok",
        f"{wrong} of {len(expected)} sequences differ" if wrong else "equal bits",
    )
