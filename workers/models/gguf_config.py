"""The metadata of a GGUF file as the config.json and generation_config.json of a Hugging Face folder."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf.constants import TokenType

from tandem.workers.models.gguf_file import GgufFile

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF's name to Hugging Face's. Mistral files call themselves llama, and compute the same."""

ROPE_FACTORS = "rope_freqs.weight"

_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>")
"""Control tokens that end an answer whatever eos_token_id says: chat files often name only one of two."""
_POOLING = {1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}
"""pooling_type, in the words of sentence-transformers. 0 is none."""
_FACTOR_TOLERANCE = 1e-4


def config_of(file: GgufFile, dtype: str) -> dict[str, Any]:
    """config.json for `file` with weights stored as `dtype`. Raises `ModelError` for what cannot be served."""
    keys = ArchitectureKeys(file)
    if keys.architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise file.fail(f"architecture {keys.architecture} is not supported (supported: {supported})")
    if keys.get("expert_count", 0):
        raise file.fail("mixture-of-experts models are not supported")
    num_heads = keys.size("attention.head_count")
    hidden_size = keys.size("embedding_length")
    head_dim = keys.size("attention.key_length", hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.get(name, head_dim) != head_dim:
            raise file.fail(f"{name} {keys.get(name)} is not supported: it must equal the head size, {head_dim}")
    if "token_embd.weight" not in file.tensors:
        raise file.fail("tensor token_embd.weight is missing")
    end_ids = end_token_ids(file)
    return {
        "architectures": [ARCHITECTURES[keys.architecture]],
        "model_type": keys.architecture,
        "dtype": dtype,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.size("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "rope_parameters": _rope_parameters(keys, head_dim),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids[0] if len(end_ids) == 1 else end_ids,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }


def end_token_ids(file: GgufFile) -> list[int]:
    """Ids that end an answer: the file's own first, then control tokens that mean the same in every known template."""
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    types = file.metadata.get("tokenizer.ggml.token_type", [])
    named = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    control = {token: index for index, (token, kind) in enumerate(zip(tokens, types)) if kind == TokenType.CONTROL}
    known = [control[token] for token in _END_TOKENS if token in control]
    return list(dict.fromkeys([*(index for index in named if index is not None), *known]))


def pooling_of(file: GgufFile) -> str | None:
    """How an embedding model's file wants its hidden states pooled. None: it does not say, as most do not."""
    kind = ArchitectureKeys(file).get("pooling_type", 0)
    return _POOLING.get(kind, f"type {kind}") if kind else None


class ArchitectureKeys:
    """Look-ups under `<architecture>.`, whose errors name the file and the key."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))

    def get(self, name: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{name}", default)

    def size(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # some writers give one value per layer
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.file.fail(f"{self.architecture}.{name} must be a positive integer, but is {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.file.fail(f"{self.architecture}.{name} must be a number, but is {value!r}")
        # Stored as float32: 1e-5 reads back as 9.999999747378752e-06. The shortest text that rounds to it is meant.
        return float(str(np.float32(value)))


def _rope_parameters(keys: ArchitectureKeys, head_dim: int) -> dict[str, Any]:
    theta = keys.number("rope.freq_base", 10_000.0)
    if ROPE_FACTORS in keys.file.tensors:
        return _llama3_parameters(keys.file, theta, head_dim)
    kind = keys.get("rope.scaling.type", "linear" if keys.get("rope.scale_linear") else "none")
    factor = keys.number("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "yarn":
        raise keys.file.fail(f"rope.scaling.type {kind} is not supported (none, linear and yarn are)")
    return _yarn_parameters(keys, theta, factor)


def _yarn_parameters(keys: ArchitectureKeys, theta: float, factor: float) -> dict[str, Any]:
    for name in ("yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor"):
        if keys.get(f"rope.scaling.{name}") is not None:
            raise keys.file.fail(f"rope.scaling.{name} is not supported")
    parameters = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": keys.size(
            "rope.scaling.original_context_length", keys.size("context_length")
        ),
    }
    for name in ("beta_fast", "beta_slow"):
        if keys.get(f"rope.scaling.yarn_{name}") is not None:
            parameters[name] = keys.number(f"rope.scaling.yarn_{name}")
    if keys.get("rope.scaling.attn_factor") is not None:
        # GGUF multiplies the default of the YaRN paper; Hugging Face's attention_factor replaces it.
        scale = keys.number("rope.scaling.attn_factor")
        parameters["attention_factor"] = scale * (0.1 * math.log(factor) + 1.0)
    return parameters


def _llama3_parameters(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, which GGUF stores as its result (a divisor per frequency), as the parameters it came from.

    With x = 1 / wavelength, a divisor is 1 (short waves), `factor` (long ones), or between them
    1 / ((1 - s) / factor + s) with s = (original * x - low) / (high - low): linear in x, so two points in between
    give s's slope and intercept. Only original : low : high matter, and low is 1 in every published model.
    """
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.type.name != "F32" or math.prod(tensor.shape) != head_dim // 2:
        raise file.fail(f"{ROPE_FACTORS} must hold {head_dim // 2} numbers of type F32")
    divisors = file.data(tensor).reshape(-1).view(np.float32).astype(np.float64)
    factor = float(divisors.max())
    if factor == 1.0 and divisors.min() == 1.0:
        return {"rope_type": "default", "rope_theta": theta}
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    for original, high in [(8192, 4.0), *_fit_llama3(divisors, frequencies, factor)]:
        expected = _llama3_divisors(frequencies, factor, original, high)
        if np.allclose(expected, divisors, rtol=_FACTOR_TOLERANCE):
            return {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": float(f"{factor:.6g}"),  # float32, perhaps computed
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise file.fail(f"{ROPE_FACTORS} does not have the form of Llama 3's scaling, the only one that is supported")


Array = np.ndarray[Any, np.dtype[np.float64]]


def _fit_llama3(divisors: Array, frequencies: Array, factor: float) -> list[tuple[int, float]]:
    between = (divisors > 1.0 + _FACTOR_TOLERANCE) & (divisors < factor * (1 - _FACTOR_TOLERANCE))
    if between.sum() < 2:
        return []
    smooth = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    slope, intercept = np.polyfit(frequencies[between], smooth, 1)
    if intercept >= 0:
        return []
    high = 1.0 - 1.0 / float(intercept)
    return [(round(float(slope) * (high - 1.0)), round(high, 3))]


def _llama3_divisors(frequencies: Array, factor: float, original: int, high: float) -> Array:
    smooth = np.clip((original * frequencies - 1.0) / (high - 1.0), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))
