"""Tiny checkpoints with random weights, made by transformers, in every variant that Tandem serves."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

ARCHITECTURES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
YARN_MORE = YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 5_000.0, **parameters}}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-all-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama-linear": ("llama", rope(rope_type="linear", factor=3.0)),
    "llama-dynamic": ("llama", rope(rope_type="dynamic", factor=2.0)),
    "llama-dynamic-beyond": ("llama", rope(rope_type="dynamic", factor=2.0) | {"max_position_embeddings": 128}),
    "llama-llama3": ("llama", rope(**LLAMA3)),
    "llama-yarn": ("llama", rope(**YARN)),
    "llama-yarn-more": ("llama", rope(**YARN_MORE)),
    "llama-yarn-factor": ("llama", rope(**YARN, attention_factor=1.3)),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 50}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    "qwen2-yarn": ("qwen2", rope(**YARN)),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3-linear": ("qwen3", rope(rope_type="linear", factor=2.0)),
}


@dataclass(frozen=True)
class Checkpoint:
    """A folder on disk, and the model that transformers has of it (float32, eager attention)."""

    folder: Path
    model: transformers.PreTrainedModel


def make_model(architecture: str, **changes: Any) -> transformers.PreTrainedModel:
    """Every parameter random, biases and norms too: transformers starts them at 0 and 1, which would hide mistakes."""
    config_class, model_class = ARCHITECTURES[architecture]
    config = config_class(**(SHAPE | changes), attn_implementation="eager")
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name else 0.0
            parameter.copy_(center + 0.15 * torch.randn(parameter.shape, generator=generator))
    return model


def save(model: transformers.PreTrainedModel, folder: Path, **options: Any) -> Checkpoint:
    model.save_pretrained(folder, **options)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.save(str(folder / "tokenizer.json"))
    return Checkpoint(folder, model)


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Checkpoint]:
    """A fresh checkpoint in a folder of the test's own: architecture, options of `save_pretrained`, config changes."""

    def make(architecture: str = "llama", *, options: dict[str, Any] | None = None, **changes: Any) -> Checkpoint:
        return save(make_model(architecture, **changes), tmp_path / "model", **(options or {}))

    return make


@pytest.fixture(scope="session", params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Each variant in turn. Read only."""
    architecture, changes = VARIANTS[request.param]
    return save(make_model(architecture, **changes), tmp_path_factory.mktemp(request.param))


@pytest.fixture
def edit_json() -> Callable[..., None]:
    """Change fields of a JSON file; the value `...` removes one."""

    def edit(path: Path, **changes: Any) -> None:
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))

    return edit
