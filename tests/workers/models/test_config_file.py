"""config.json as transformers reads it, in both spellings, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tandem.workers.errors import ModelError
from tandem.workers.models.config import RopeConfig
from tandem.workers.models.config_file import read_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
OLD_LLAMA3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write(folder: Path, **changes: Any) -> Path:
    values = {name: value for name, value in (BASE | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_values_equal_those_of_transformers(variant: Any) -> None:
    ours, theirs = read_config(variant.folder), variant.model.config
    assert ours.architecture == theirs.model_type
    for name in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.num_layers == theirs.num_hidden_layers
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert ours.head_dim == theirs.head_dim
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.scaling == theirs.rope_parameters["rope_type"]


def test_defaults_of_llama(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    theirs = transformers.AutoConfig.from_pretrained(write(tmp_path, model_type="llama"))
    assert config.num_kv_heads == theirs.num_key_value_heads == 4
    assert config.head_dim == theirs.head_dim == 4
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.tie_word_embeddings is theirs.tie_word_embeddings is False
    assert config.rope == RopeConfig(theta=10_000.0)


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        OLD_LLAMA3,
        {"rope_type": "yarn", "factor": 4.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16, "truncate": False},
    ],
)
def test_both_spellings_of_rope_are_equal(tmp_path: Path, scaling: dict[str, Any]) -> None:
    old = read_config(write(tmp_path, rope_theta=500.0, rope_scaling=scaling))
    kind = scaling.get("rope_type", scaling.get("type"))
    new = read_config(write(tmp_path, rope_parameters={**scaling, "rope_type": kind, "rope_theta": 500.0}))
    assert old == new
    assert old.rope.theta == 500.0
    assert old.rope.scaling == kind
    assert old.rope.factor == scaling["factor"]


def test_original_length_of_rope(tmp_path: Path) -> None:
    """Inside the parameters; a value beside them wins; else the maximum. Dynamic scaling knows only the maximum."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read_config(write(tmp_path, rope_scaling=yarn)).rope.original_max_position_embeddings == 64
    outer = write(tmp_path, rope_scaling=yarn, original_max_position_embeddings=32)
    assert read_config(outer).rope.original_max_position_embeddings == 32
    bare = write(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert read_config(bare).rope.original_max_position_embeddings == 256
    dynamic = write(
        tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64}
    )
    assert read_config(dynamic).rope.original_max_position_embeddings == 256


def test_yarn_without_a_factor(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}
    assert read_config(write(tmp_path, rope_scaling=yarn)).rope.factor == 4.0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 8}, ()),
        ({"architectures": ["MistralForCausalLM"]}, (4096,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, ()),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, ()),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": True},
            (),
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (None, None, None, 8),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
    ],
)
def test_sliding_window(tmp_path: Path, changes: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    windows = read_config(write(tmp_path, num_key_value_heads=2, **changes)).sliding_window
    assert windows in (expected, expected or (None,) * 4)


def test_qwen3_heads_are_128_wide_unless_said(tmp_path: Path) -> None:
    folder = write(tmp_path, architectures=["Qwen3ForCausalLM"], num_key_value_heads=2)
    assert read_config(folder).head_dim == transformers.Qwen3Config(hidden_size=16).head_dim == 128


def test_biases_by_architecture(tmp_path: Path) -> None:
    def biases(name: str, **changes: Any) -> tuple[bool, bool, bool]:
        config = read_config(write(tmp_path, architectures=[name], num_key_value_heads=2, **changes))
        return config.attention_bias, config.output_bias, config.mlp_bias

    assert biases("LlamaForCausalLM") == (False, False, False)
    assert biases("LlamaForCausalLM", attention_bias=True) == (True, True, False)
    assert biases("LlamaForCausalLM", mlp_bias=True) == (False, False, True)
    assert biases("Qwen2ForCausalLM") == (True, False, False)
    assert biases("Qwen3ForCausalLM", attention_bias=True) == (True, True, False)


def test_end_tokens_of_both_files(tmp_path: Path) -> None:
    folder = write(tmp_path, eos_token_id=2, bos_token_id=1)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5], "bos_token_id": 3}))
    config = read_config(folder)
    assert config.eos_token_ids == (7, 5, 2)
    assert config.bos_token_id == 3


def test_end_tokens_without_a_row(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, eos_token_id=[2, 32])).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, ["MixtralForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": ...}, ["architectures"]),
        ({"auto_map": {"AutoModel": "model.Model"}}, ["auto_map", "remote code"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"num_experts": 8}, ["num_experts", "mixture"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, ["rope_scaling", "longrope"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "surprise": 1}}, ["surprise", "linear"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor is missing"]),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, ["factor", "'two'"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor is missing"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["per layer type", "full_attention"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads", "num_key_value_heads (3)"]),
        ({"hidden_size": 18}, ["hidden_size (18)"]),
        ({"head_dim": 5}, ["head_dim", "even"]),
        ({"vocab_size": ...}, ["vocab_size is missing"]),
        ({"vocab_size": (1 << 24) + 1}, ["vocab_size must be at most 16777216"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers", "-1"]),
        ({"hidden_size": "16"}, ["hidden_size", "'16'"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "'no'"]),
        ({"eos_token_id": "two"}, ["eos_token_id", "'two'"]),
        ({"architectures": ["Qwen2ForCausalLM"]}, ["num_key_value_heads is missing"]),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "num_key_value_heads": 2,
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention"],
            },
            ["layer_types"],
        ),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as info:
        read_config(write(tmp_path, **changes))
    message = str(info.value)
    assert str(tmp_path / "config.json") in message
    assert "\n" not in message
    for word in words:
        assert word in message


def test_json_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"config\.json must hold a JSON object"):
        read_config(tmp_path)
