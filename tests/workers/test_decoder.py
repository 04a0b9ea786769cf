"""The decoder against Hugging Face transformers: tiny random models of every architecture and variant, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM as AutoModel
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from tandem.kernels.ops import load_ops
from tandem.workers.batch import Batch, BatchItem
from tandem.workers.kv_cache import KVCache
from tandem.workers.models.config import ModelConfig, RopeConfig
from tandem.workers.models.decoder import Decoder
from tandem.workers.models.rope import build_rope_table, rope_frequencies
from tandem.workers.models.weights import LayerWeights, ModelWeights
from tandem.workers.step_inputs import build

BLOCK_SIZE = 16
MAX_MODEL_LEN = 320
SIZES: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **values}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
WINDOWS = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, rope("default")),
    "llama-tied-biased": (LlamaConfig, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-mha": (LlamaConfig, {"num_key_value_heads": 6}),
    "llama-mqa-wide-head": (LlamaConfig, {"num_key_value_heads": 1, "head_dim": 32}),
    "llama-linear": (LlamaConfig, rope("linear", factor=4.0)),
    "llama-dynamic": (LlamaConfig, rope("dynamic", factor=4.0)),
    "llama-llama3": (LlamaConfig, rope("llama3", **LLAMA3)),
    "llama-yarn": (LlamaConfig, rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "llama-yarn-mscale": (
        LlamaConfig,
        rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=64,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=0.7,
            mscale_all_dim=1.2,
            truncate=False,
        ),
    ),
    "llama-yarn-factor": (
        LlamaConfig,
        rope("yarn", factor=2.0, original_max_position_embeddings=256, attention_factor=1.3),
    ),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral-window": (MistralConfig, {"sliding_window": 33}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-windows": (Qwen2Config, WINDOWS),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True}),
    "qwen3-windows-biased": (Qwen3Config, WINDOWS | {"attention_bias": True}),
}


def make_reference(case: str) -> Any:
    """A random model, with norms and biases away from their neutral start."""
    kind, changes = CASES[case]
    config = kind(**(SIZES | changes), attn_implementation="eager")
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += torch.randn_like(parameter) * 0.2
    return model


def make_config(hf: Any) -> ModelConfig:
    parameters = dict(hf.rope_parameters)
    scaling, theta = parameters.pop("rope_type"), parameters.pop("rope_theta")
    layer_types = getattr(hf, "layer_types", None) or ["full_attention"] * hf.num_hidden_layers
    if hf.model_type == "mistral" and hf.sliding_window:
        layer_types = ["sliding_attention"] * hf.num_hidden_layers
    return ModelConfig(
        architecture=hf.model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        rms_norm_eps=hf.rms_norm_eps,
        max_position_embeddings=hf.max_position_embeddings,
        tie_word_embeddings=hf.tie_word_embeddings,
        rope=RopeConfig(theta=theta, scaling=scaling, **parameters),
        qk_norm=hf.model_type == "qwen3",
        sliding_window=tuple(hf.sliding_window if kind == "sliding_attention" else None for kind in layer_types),
    )


def make_weights(state: dict[str, Tensor], num_layers: int, dtype: torch.dtype = torch.float32) -> ModelWeights:
    state = {name: tensor.to(dtype) for name, tensor in state.items()}

    def stacked(prefix: str, names: tuple[str, ...], suffix: str) -> Tensor | None:
        found = [state[key] for name in names if (key := f"{prefix}.{name}.{suffix}") in state]
        return torch.cat(found) if found else None

    layers = []
    for index in range(num_layers):
        prefix = f"model.layers.{index}"
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        gate_up = ("mlp.gate_proj", "mlp.up_proj")
        qkv_weight, gate_up_weight = stacked(prefix, qkv, "weight"), stacked(prefix, gate_up, "weight")
        assert qkv_weight is not None
        assert gate_up_weight is not None
        layers.append(
            LayerWeights(
                input_norm=state[f"{prefix}.input_layernorm.weight"],
                qkv=qkv_weight,
                qkv_bias=stacked(prefix, qkv, "bias"),
                q_norm=state.get(f"{prefix}.self_attn.q_norm.weight"),
                k_norm=state.get(f"{prefix}.self_attn.k_norm.weight"),
                output=state[f"{prefix}.self_attn.o_proj.weight"],
                output_bias=state.get(f"{prefix}.self_attn.o_proj.bias"),
                post_norm=state[f"{prefix}.post_attention_layernorm.weight"],
                gate_up=gate_up_weight,
                gate_up_bias=stacked(prefix, gate_up, "bias"),
                down=state[f"{prefix}.mlp.down_proj.weight"],
                down_bias=state.get(f"{prefix}.mlp.down_proj.bias"),
            )
        )
    embedding = state["model.embed_tokens.weight"]
    head = state.get("lm_head.weight", embedding)
    return ModelWeights(embedding, tuple(layers), state["model.norm.weight"], head)


@torch.inference_mode()
def run(config: ModelConfig, weights: ModelWeights, texts: list[list[int]], chunk: int) -> list[Tensor]:
    """Logits of every position of each text, all texts advancing by `chunk` tokens per step."""
    ops = load_ops("reference")
    dtype = weights.embedding.dtype
    decoder = Decoder(config, weights, ops, MAX_MODEL_LEN)
    per_text = -(-MAX_MODEL_LEN // BLOCK_SIZE)
    cache = KVCache(config, per_text * len(texts), BLOCK_SIZE, dtype, "cpu")
    cache.tensor.fill_(float("nan"))
    blocks = [list(range(index, per_text * len(texts), len(texts))) for index in range(len(texts))]  # interleaved
    rows: list[list[Tensor]] = [[] for _ in texts]
    for start in range(0, max(len(text) for text in texts), chunk):
        live = [index for index, text in enumerate(texts) if start < len(text)]
        items = [BatchItem(texts[index][start : start + chunk], start, blocks[index], None) for index in live]
        inputs = build(Batch(tuple(items)), BLOCK_SIZE)
        plan = ops.plan_step(inputs.layout, cache.tensor, config.num_heads)
        logits = decoder.logits(decoder.forward(inputs.token_ids, cache.tensor, plan))
        for index, part in zip(live, logits.split([len(item.token_ids) for item in items]), strict=True):
            rows[index].append(part)
    return [torch.cat(parts) for parts in rows]


def random_text(length: int) -> list[int]:
    return torch.randint(SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize("case", CASES)
def test_logits_agree_with_transformers(case: str) -> None:
    model = make_reference(case)
    config = make_config(model.config)
    texts = [random_text(length) for length in (300, 1, 16, 33)]
    results = run(config, make_weights(model.state_dict(), config.num_layers), texts, chunk=128)
    for text, logits in zip(texts, results, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([text])).logits[0]
        span = float(expected.max() - expected.min())
        assert float((logits - expected).abs().max()) <= 1e-4 * span


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype: torch.dtype) -> None:
    model = make_reference("qwen3")
    config = make_config(model.config)
    text = random_text(200)
    (logits,) = run(config, make_weights(model.state_dict(), config.num_layers, dtype), [text], chunk=64)
    with torch.inference_mode():
        expected = model(torch.tensor([text])).logits[0]
    span = float(expected.max() - expected.min())
    limit = 0.05 if dtype == torch.bfloat16 else 0.01
    assert logits.dtype == dtype
    assert float((logits.float() - expected).abs().max()) <= limit * span


@pytest.mark.parametrize("case", ["llama", "qwen2-windows", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_have_the_same_bits_for_any_chunk_and_company(case: str, dtype: torch.dtype) -> None:
    model = make_reference(case)
    config = make_config(model.config)
    weights = make_weights(model.state_dict(), config.num_layers, dtype)
    texts = [random_text(length) for length in (140, 70, 5)]
    together = run(config, weights, texts, chunk=512)
    for chunk in (1, 23, 64) if case == "llama" else (23,):
        for logits, expected in zip(run(config, weights, texts, chunk=chunk), together, strict=True):
            assert torch.equal(logits, expected)
    for text, expected in zip(texts, together, strict=True):
        assert torch.equal(run(config, weights, [text], chunk=48)[0], expected)


def test_dynamic_scaling_is_fixed_by_the_longest_text_that_can_be_served() -> None:
    config = make_config(make_reference("llama-dynamic").config)
    trained = config.max_position_embeddings
    short, long = build_rope_table(config, trained), build_rope_table(config, 2 * trained)
    plain = build_rope_table(make_config(make_reference("llama").config), trained)
    assert torch.equal(short.cos, plain.cos)
    assert not torch.equal(long.cos[:trained], short.cos)


@pytest.mark.parametrize("length", [8, 9, 8192])
def test_a_table_does_not_depend_on_its_length(length: int) -> None:
    config = make_config(make_reference("llama-llama3").config)
    assert torch.equal(build_rope_table(config, length).cos[:8], build_rope_table(config, 8).cos)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_frequencies_are_those_of_any_machine(head_dim: int) -> None:
    """Rounded from what no instruction set can disagree on: torch's own float32 powers differ without AVX2."""
    for theta in (1e4, 1e5, 5e5, 1e6, 1e7):
        exponents = [float(torch.tensor(float(index)) / head_dim) for index in range(0, head_dim, 2)]
        powers = torch.tensor([theta**exponent for exponent in exponents], dtype=torch.float64).float()
        config = replace(make_config(LlamaConfig(**rope("default"))), head_dim=head_dim, rope=RopeConfig(theta=theta))
        frequencies, _ = rope_frequencies(config, 8)
        assert torch.equal(frequencies, 1.0 / powers), theta
