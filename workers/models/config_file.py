"""config.json and its neighbours, read into a `ModelConfig`. No torch: `tandem serve` checks a model before it starts.

The reading follows what Hugging Face transformers computes from the same file, and refuses by name whatever the runtime
would have to ignore.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tandem.workers.block_key import TOKEN_BYTES
from tandem.workers.errors import ModelError
from tandem.workers.models.config import Architecture, ModelConfig, RopeConfig

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
HEADLESS: dict[str, Architecture] = {
    "LlamaModel": "llama",
    "MistralModel": "mistral",
    "Qwen2Model": "qwen2",
    "Qwen3Model": "qwen3",
}
"""The same without a language-model head, as embedding models are often saved."""

_ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_ROPE_COMMON_KEYS = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"})


class JsonFile:
    """A JSON object on disk, with typed look-ups whose errors name the file and the field."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(f"{path} is missing") from None
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise ModelError(f"{path} must hold a JSON object, but holds a {type(value).__name__}")
        self.values: dict[str, Any] = value

    def fail(self, reason: str) -> ModelError:
        return ModelError(f"{self.path}: {reason}")

    def size(self, name: str, *, default: int | None = None) -> int:
        """A positive integer. Without a default the field must be there."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.fail(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"{name} must be a positive integer, but is {value!r}")
        return value

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.fail(f"{name} must be true or false, but is {value!r}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of ids, or null."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
            raise self.fail(f"{name} must be an integer or a list of integers, but is {value!r}")
        return tuple(ids)


def read_config(folder: Path) -> ModelConfig:
    """The configuration of the checkpoint in `folder`. Raises `ModelError` for anything that cannot be served."""
    file = JsonFile(config_path(folder))
    architecture, generates = _architecture(file)
    _refuse_unsupported(file)
    num_heads = file.size("num_attention_heads")
    num_kv_heads = _num_kv_heads(file, architecture, num_heads)
    head_dim = _head_dim(file, architecture, num_heads)
    attention_bias = architecture == "qwen2" or (architecture != "mistral" and file.flag("attention_bias"))
    eos_token_ids, bos_token_id = _special_token_ids(folder, file)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(file),
        hidden_size=file.size("hidden_size"),
        intermediate_size=file.size("intermediate_size"),
        num_layers=file.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(file, file.values, "rms_norm_eps", default=1e-6),
        max_position_embeddings=file.size("max_position_embeddings"),
        tie_word_embeddings=file.flag("tie_word_embeddings") or not generates,
        generates=generates,
        rope=_rope(file),
        qk_norm=architecture == "qwen3",
        sliding_window=_sliding_window(file, architecture),
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        attention_bias=attention_bias,
        output_bias=attention_bias and architecture != "qwen2",
        mlp_bias=architecture == "llama" and file.flag("mlp_bias"),
    )


def _vocab_size(file: JsonFile) -> int:
    size, most = file.size("vocab_size"), 1 << 8 * TOKEN_BYTES
    if size > most:
        raise file.fail(f"vocab_size must be at most {most}: block keys hold {TOKEN_BYTES} bytes of a token id")
    return size


def config_path(folder: Path) -> Path:
    """Where config.json is. Raises `ModelError` with a hint when the folder holds something else."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder")
    path = folder / "config.json"
    if not path.exists():
        gguf = sorted(folder.glob("*.gguf"))
        hint = f"; to serve {gguf[0].name}, give the path of that file" if gguf else ""
        raise ModelError(f"{path} is missing: not a model in Hugging Face format{hint}")
    return path


def _architecture(file: JsonFile) -> tuple[Architecture, bool]:
    """It, and whether it has a head."""
    names = file.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise file.fail(f"architectures must name exactly one, but is {names!r}")
    if names[0] in HEADLESS:
        return HEADLESS[names[0]], False
    if names[0] not in ARCHITECTURES:
        raise file.fail(f"architecture {names[0]} is not supported (supported: {', '.join(ARCHITECTURES)})")
    return ARCHITECTURES[names[0]], True


def _refuse_unsupported(file: JsonFile) -> None:
    values = file.values
    if "auto_map" in values:
        raise file.fail("auto_map asks for code that comes with the model; Tandem runs no remote code")
    if values.get("quantization_config") is not None:
        method = values["quantization_config"]
        name = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        raise file.fail(f"quantization_config ({name}) is not supported; use unquantised weights or a GGUF file")
    if values.get("hidden_act", "silu") != "silu":
        raise file.fail(f"hidden_act {values['hidden_act']!r} is not supported (only silu is)")
    for name in ("num_experts", "num_local_experts"):
        if values.get(name):
            raise file.fail(f"{name} is {values[name]!r}: mixture-of-experts models are not supported")
    if values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise file.fail(f"partial_rotary_factor {values['partial_rotary_factor']!r} is not supported (only 1.0 is)")


def _num_kv_heads(file: JsonFile, architecture: Architecture, num_heads: int) -> int:
    # A null means "as many as query heads" everywhere; an absent field means that for Llama alone.
    absent_is_all = architecture == "llama" or "num_key_value_heads" in file.values
    num_kv_heads = file.size("num_key_value_heads", default=num_heads if absent_is_all else None)
    if num_heads % num_kv_heads:
        raise file.fail(f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})")
    return num_kv_heads


def _head_dim(file: JsonFile, architecture: Architecture, num_heads: int) -> int:
    hidden_size = file.size("hidden_size")
    if file.values.get("head_dim") is None and architecture != "qwen3" and hidden_size % num_heads:
        raise file.fail(f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})")
    head_dim = file.size("head_dim", default=128 if architecture == "qwen3" else max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise file.fail(f"head_dim must be even, but is {head_dim}")
    return head_dim


def _rope(file: JsonFile) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5), or `rope_theta` beside `rope_scaling` (before)."""
    name = "rope_scaling" if file.values.get("rope_scaling") else "rope_parameters"
    values = file.values.get(name) or {}
    if not isinstance(values, dict):
        raise file.fail(f"{name} must be an object, but is {values!r}")
    scaling = values.get("rope_type", values.get("type", "default"))
    if scaling not in _ROPE_KEYS:
        raise file.fail(f"{name} of type {scaling!r} is not supported (supported: {', '.join(_ROPE_KEYS)})")
    if values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise file.fail(f"{name}.partial_rotary_factor {values['partial_rotary_factor']!r} is not supported")
    theta = _number(file, values, "rope_theta", default=_number(file, file.values, "rope_theta", default=10_000.0))
    if scaling == "default":
        nested = [key for key, value in values.items() if isinstance(value, dict)]
        if nested:
            raise file.fail(f"{name} per layer type ({', '.join(nested)}) is not supported")
        return RopeConfig(theta=theta)
    unknown = sorted(key for key in values.keys() - _ROPE_KEYS[scaling] - _ROPE_COMMON_KEYS if values[key] is not None)
    if unknown:
        raise file.fail(f"{name}.{unknown[0]} is not supported with type {scaling}")
    return _scaled_rope(file, values, scaling, theta)


def _scaled_rope(file: JsonFile, values: dict[str, Any], scaling: Any, theta: float) -> RopeConfig:
    max_len = file.size("max_position_embeddings")
    original = max_len
    if scaling in ("llama3", "yarn"):
        # A value outside the scaling parameters wins, as in transformers.
        outer, inner = (v.get("original_max_position_embeddings") for v in (file.values, values))
        original = outer or inner or max_len
        if isinstance(original, bool) or not isinstance(original, int) or original < 1:
            raise file.fail(f"original_max_position_embeddings must be a positive integer, but is {original!r}")
    default_factor = max_len / original if scaling == "yarn" else None
    optional = {
        name: None if values.get(name) is None else _number(file, values, name)
        for name in ("attention_factor", "mscale", "mscale_all_dim")
    }
    return RopeConfig(
        theta=theta,
        scaling=scaling,
        factor=_number(file, values, "factor", default=default_factor),
        original_max_position_embeddings=original if scaling != "linear" else None,
        low_freq_factor=_number(file, values, "low_freq_factor", default=None if scaling == "llama3" else 1.0),
        high_freq_factor=_number(file, values, "high_freq_factor", default=None if scaling == "llama3" else 4.0),
        # Zero stands for the default here, as in transformers.
        beta_fast=_number(file, values, "beta_fast", default=32.0) or 32.0,
        beta_slow=_number(file, values, "beta_slow", default=1.0) or 1.0,
        truncate=values.get("truncate") is not False,
        **optional,
    )


def _number(file: JsonFile, values: dict[str, Any], name: str, *, default: float | None = None) -> float:
    value = values.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise file.fail(f"{name} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise file.fail(f"{name} must be a finite number of at least 0, but is {value!r}")
    return float(value)


def _sliding_window(file: JsonFile, architecture: Architecture) -> tuple[int | None, ...]:
    num_layers = file.size("num_hidden_layers")
    values = file.values
    if architecture == "llama":
        return ()
    if architecture == "mistral":
        # An absent field is 4096 and a null is none: the configuration class of transformers says so.
        window = values.get("sliding_window", 4096)
        return () if window is None else (file.size("sliding_window", default=window),) * num_layers
    if not file.flag("use_sliding_window") or values.get("sliding_window") is None:
        return ()
    window = file.size("sliding_window")
    layer_types = values.get("layer_types")
    if layer_types is None:
        first = values.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(layer_types) != num_layers or not set(layer_types) <= {"sliding_attention", "full_attention"}:
        raise file.fail(f"layer_types must name full_attention or sliding_attention for each of {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _special_token_ids(folder: Path, config: JsonFile) -> tuple[tuple[int, ...], int | None]:
    """Every end-of-sequence id that the two files name, generation_config.json first, and the first bos id."""
    files = [config]
    path = folder / "generation_config.json"
    if path.exists():
        files.insert(0, JsonFile(path))
    eos = dict.fromkeys(token_id for file in files for token_id in file.token_ids("eos_token_id"))
    bos = [token_id for file in files for token_id in file.token_ids("bos_token_id")]
    vocab_size = config.size("vocab_size")
    # Some published files name ids that the model has no row for; such a token can never be generated.
    return tuple(token_id for token_id in eos if 0 <= token_id < vocab_size), bos[0] if bos else None
