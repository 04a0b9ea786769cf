"""Models of a published shape with random weights: to measure speed at a size without fetching anything.

random:qwen2.5-0.5b    random:qwen2.5-1.5b
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tandem.workers.errors import UserError
from tandem.workers.models.checkpoint import check_model, expected_shapes
from tandem.workers.models.config_file import read_config

PREFIX = "random:"
_STANDARD_DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """What differs between sizes of Qwen2.5; the rest they share."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = 151936


SHAPES = {
    "qwen2.5-0.5b": Shape(hidden=896, layers=24, heads=14, kv_heads=2, intermediate=4864),
    "qwen2.5-1.5b": Shape(hidden=1536, layers=28, heads=12, kv_heads=2, intermediate=8960),
}


def is_random(model: str) -> bool:
    return model.startswith(PREFIX)


def shape_of(model: str) -> Shape:
    """Raises `UserError` for an unknown name."""
    name = model.removeprefix(PREFIX)
    if name not in SHAPES:
        raise UserError(f"{model}: no such shape; there are: {', '.join(PREFIX + known for known in SHAPES)}")
    return SHAPES[name]


def config_values(shape: Shape) -> dict[str, object]:
    """The content of config.json."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "max_window_layers": shape.layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": _STANDARD_DEVIATION,
    }


def write_random_model(shape: Shape, folder: Path, seed: int = 0) -> None:
    """A checkpoint in `folder` (which must exist): bfloat16 weights, a tokenizer that knows one word."""
    import torch
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(config_values(shape), indent=2))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    generator = torch.Generator().manual_seed(seed)

    def tensor(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(size, dtype=torch.bfloat16)
        return torch.empty(size, dtype=torch.bfloat16).normal_(std=_STANDARD_DEVIATION, generator=generator)

    shapes = expected_shapes(read_config(folder))
    save_file(
        {name: tensor(name, size) for name, size in shapes.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    check_model(folder)


def _tokenizer() -> dict[str, object]:
    model = {"type": "WordLevel", "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2}, "unk_token": "<unk>"}
    rest = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return {"version": "1.0", "added_tokens": [], **dict.fromkeys(rest), "model": model}
