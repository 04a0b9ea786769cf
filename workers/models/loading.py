"""Tensors from safetensors files into the stacked form that the runtime wants.

Every weight is copied out of the mapped file into memory of our own: one pass at memory speed, after which nobody who
replaces or truncates the file can change a token or crash the worker (a mapped page behind a cut file is a SIGBUS), and
every tensor starts at an aligned address (safetensors promises 8 bytes only).
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.workers.errors import ModelError
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.safetensors_file import TensorEntry
from tandem.workers.models.weights import LayerWeights, ModelWeights


class TensorReader:
    """Reads tensors by name from the files that hold them, each mapped once. Use as a context manager."""

    def __init__(self, tensors: dict[str, TensorEntry], dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def stacked(self, *names: str) -> Tensor:
        """The tensors one below the other (dimension 0), copied into one new contiguous tensor of the serving dtype."""
        parts = [self._mapped(name) for name in names]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        out = torch.empty(shape, dtype=self._dtype)
        torch.cat([part.to(self._dtype) for part in parts], out=out)
        if self._dtype == torch.float16 and not bool(torch.isfinite(out).all()):
            raise ModelError(
                f"{self._tensors[names[0]].file}: {names[0]} does not fit into float16: serve it as bfloat16"
            )
        return out

    def _mapped(self, name: str) -> Tensor:
        entry = self._tensors[name]
        file = entry.file
        try:
            if file not in self._files:
                self._files[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            tensor: Tensor = self._files[file].get_tensor(entry.stored_name or name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: {name} cannot be read: {error}") from error
        return tensor


def load_stacked(tensors: dict[str, TensorEntry], config: ModelConfig, dtype: torch.dtype) -> ModelWeights:
    """Load a checkpoint whose names and shapes have been checked (see `checkpoint.check_tensors`)."""
    with TensorReader(tensors, dtype) as reader:
        embedding = reader.stacked("model.embed_tokens.weight")
        return ModelWeights(
            embedding=embedding,
            layers=tuple(_load_layer(reader, config, layer) for layer in range(config.num_layers)),
            final_norm=reader.stacked("model.norm.weight"),
            lm_head=_load_lm_head(reader, config, embedding, tensors),
        )


def _load_layer(reader: TensorReader, config: ModelConfig, layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    qkv = [f"{attention}{name}_proj" for name in "qkv"]
    gate_up = [f"{mlp}{name}_proj" for name in ("gate", "up")]

    def weight(*modules: str) -> Tensor:
        return reader.stacked(*(f"{module}.weight" for module in modules))

    def bias(has_bias: bool, *modules: str) -> Tensor | None:
        return reader.stacked(*(f"{module}.bias" for module in modules)) if has_bias else None

    return LayerWeights(
        input_norm=weight(f"{prefix}input_layernorm"),
        qkv=weight(*qkv),
        qkv_bias=bias(config.attention_bias, *qkv),
        q_norm=weight(f"{attention}q_norm") if config.qk_norm else None,
        k_norm=weight(f"{attention}k_norm") if config.qk_norm else None,
        output=weight(f"{attention}o_proj"),
        output_bias=bias(config.output_bias, f"{attention}o_proj"),
        post_norm=weight(f"{prefix}post_attention_layernorm"),
        gate_up=weight(*gate_up),
        gate_up_bias=bias(config.mlp_bias, *gate_up),
        down=weight(f"{mlp}down_proj"),
        down_bias=bias(config.mlp_bias, f"{mlp}down_proj"),
    )


def _load_lm_head(
    reader: TensorReader, config: ModelConfig, embedding: Tensor, tensors: dict[str, TensorEntry]
) -> Tensor:
    """The output matrix; the embedding itself when tied. A tied checkpoint may hold a copy, which must be equal."""
    if not config.tie_word_embeddings:
        return reader.stacked("lm_head.weight")
    if "lm_head.weight" in reader:
        entry = tensors["lm_head.weight"]
        same = entry.shape == tuple(embedding.shape) and torch.equal(reader.stacked("lm_head.weight"), embedding)
        if not same:
            raise ModelError(f"{entry.file}: lm_head.weight differs from the embedding that config.json ties it to")
    return embedding
