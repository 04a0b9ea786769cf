"""A checkpoint folder in Hugging Face format, from disk to `ModelWeights`: the one door for everything that loads.

    read_config -> check_model (headers only, seconds) -> load_weights (in the worker)

Every failure is a `ModelError` of one line that names the file. Nothing is ignored silently: a tensor that is missing,
surplus or of another shape is an error. torch is imported by `load_weights` alone, so that the command line can check
a model in milliseconds.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tandem.workers.errors import ModelError
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.config_file import JsonFile, config_path, read_config
from tandem.workers.models.safetensors_file import TensorEntry, find_tensors

if TYPE_CHECKING:
    import torch

    from tandem.workers.models.weights import ModelWeights

__all__ = ["DtypeName", "check_model", "default_dtype", "load_weights", "read_config", "revision_of"]

DtypeName = Literal["bfloat16", "float16", "float32"]

_STORED_DTYPES: dict[str, DtypeName] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_ROTARY_BUFFER = re.compile(r"(model\.rotary_emb|model\.layers\.\d+\.self_attn\.rotary_emb)\.inv_freq")
_SAMPLE_BYTES = 64


def check_model(folder: Path) -> ModelConfig:
    """Everything that can be known without reading tensor data: configuration, tensor list, file sizes, tokenizer.

    Raises `ModelError`. Takes milliseconds, whatever the size of the model.
    """
    config = _without_head(folder, read_config(folder))
    check_tensors(folder, config)
    _check_tokenizer(folder)
    return config


def load_weights(folder: Path, config: ModelConfig, dtype: torch.dtype) -> ModelWeights:
    """Read the checkpoint into memory of our own, stacked per GEMM, as `dtype`. Raises `ModelError`."""
    from tandem.workers.models.loading import load_stacked  # here, so that this module needs no torch

    return load_stacked(check_tensors(folder, config), config, dtype)


def default_dtype(folder: Path, *, device: Literal["cpu", "cuda"] = "cpu") -> DtypeName:
    """What `--dtype auto` means: the dtype the checkpoint was saved in; float16 becomes bfloat16 on a CPU.

    (A CPU computes in bfloat16 natively and in float16 mostly not, and bfloat16 cannot overflow where float16 does.)
    """
    file = JsonFile(config_path(folder))
    named = file.values.get("dtype") or file.values.get("torch_dtype")
    if named is None:
        stored = {entry.dtype for entry in find_tensors(folder).values()}
        named = _STORED_DTYPES["BF16" if "BF16" in stored else "F16" if "F16" in stored else "F32"]
    for name in ("bfloat16", "float16", "float32"):
        if named == name:
            return "bfloat16" if name == "float16" and device == "cpu" else name
    raise file.fail(f"dtype {named!r} is not supported (supported: bfloat16, float16, float32)")


def revision_of(folder: Path) -> str:
    """A short hex digest that tells two sets of weights apart, in milliseconds.

    Covers config.json, and of every tensor its name, dtype, shape and three samples of 64 bytes (first, middle, last);
    so a fine-tuned copy with the same shapes differs. It detects accidents, and is no proof against an adversary.
    """
    digest = hashlib.blake2b(config_path(folder).read_bytes(), digest_size=8)
    for name, entry in sorted(find_tensors(folder).items()):
        digest.update(f"\n{name} {entry.dtype} {entry.shape} {entry.file.name}\n".encode())
        with entry.file.open("rb") as file:
            for offset in (entry.start, (entry.start + entry.end) // 2, max(entry.start, entry.end - _SAMPLE_BYTES)):
                digest.update(os.pread(file.fileno(), min(_SAMPLE_BYTES, entry.end - offset), offset))
    return digest.hexdigest()


def check_tensors(folder: Path, config: ModelConfig) -> dict[str, TensorEntry]:
    """The tensors of the checkpoint, after comparing their names and shapes with what `config` demands."""
    found = {name: entry for name, entry in _named_tensors(folder).items() if not _ROTARY_BUFFER.fullmatch(name)}
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(f"{folder}: tensor {missing[0]} is missing{_and_more(missing)}")
    for name, shape in expected.items():
        if found[name].shape != shape:
            have, want = list(found[name].shape), list(shape)
            raise ModelError(f"{found[name].file}: {name} has shape {have}, but config.json demands {want}")
    surplus = sorted(found.keys() - expected.keys() - ({"lm_head.weight"} if config.tie_word_embeddings else set()))
    if surplus:
        file = found[surplus[0]].file
        raise ModelError(f"{file}: tensor {surplus[0]} has no place in this model{_and_more(surplus)}")
    return found


def _named_tensors(folder: Path) -> dict[str, TensorEntry]:
    """A model that was saved without its head has names of its own: the same without a prefix."""
    found = find_tensors(folder)
    if "embed_tokens.weight" not in found:
        return found
    return {
        name if name.startswith("lm_head.") else f"model.{name}": replace(entry, stored_name=name)
        for name, entry in found.items()
    }


def _without_head(folder: Path, config: ModelConfig) -> ModelConfig:
    """An embedding model may call itself a causal one and come without the head. Elsewhere that is a missing tensor."""
    is_for_embeddings = (folder / "modules.json").exists()
    if config.tie_word_embeddings or not is_for_embeddings or "lm_head.weight" in find_tensors(folder):
        return config
    return replace(config, tie_word_embeddings=True, generates=False)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the checkpoint must hold."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (q_rows, hidden, config.attention_bias),
        "self_attn.k_proj": (kv_rows, hidden, config.attention_bias),
        "self_attn.v_proj": (kv_rows, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q_rows, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, has_bias) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    shapes["input_layernorm.weight"] = shapes["post_attention_layernorm.weight"] = (hidden,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _check_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    if not path.exists():
        others = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).exists()]
        hint = f" ({others[0]} alone is not enough: save it once as tokenizer.json)" if others else ""
        raise ModelError(f"{path} is missing: the model has no tokenizer{hint}")
    file = JsonFile(path)
    if "model" not in file.values:
        raise file.fail("it describes no tokenizer model")
    if (folder / "tokenizer_config.json").exists():
        JsonFile(folder / "tokenizer_config.json")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
