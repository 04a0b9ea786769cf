"""GGUF files, written here with the gguf package's writer, converted and compared with what went into them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from transformers.integrations.gguf import dequant

from tandem.workers.errors import ModelError
from tandem.workers.models import gguf_convert
from tandem.workers.models.checkpoint import check_model, load_weights
from tandem.workers.models.gguf_check import check_gguf, default_gguf_dtype
from tandem.workers.models.gguf_config import end_token_ids
from tandem.workers.models.gguf_convert import convert_gguf, gguf_name
from tandem.workers.models.gguf_file import SUPPORTED_TYPES, read_gguf
from tandem.workers.pooling import read_pooling

Type = gguf.GGMLQuantizationType
QUANTISED = sorted(SUPPORTED_TYPES - {Type.F32, Type.F16, Type.BF16, Type.Q5_0, Type.Q5_1})
"""Types that transformers decodes too. (`test_weight_types` has Q5: what the gguf package packs comes back.)"""
SCALE_OFFSETS = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}
"""Where a K-quant block keeps its float16 scales, in bytes."""

NESTED = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QcI", 1, b"x", 9) + 2000 * struct.pack("<IQ", 9, 1)
"""A value that is an array of one array of one array ..."""


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of Llama's q and k rows, element by element: the two halves of a head become neighbours."""
    head_dim = rows.shape[0] // num_heads
    out = np.empty_like(rows)
    for head in range(num_heads):
        for row in range(head_dim):
            half, index = divmod(row, head_dim // 2)
            out[head * head_dim + 2 * index + half] = rows[head * head_dim + row]
    return out


def add_metadata(writer: gguf.GGUFWriter, config: Any, **values: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(config.head_dim)
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokens = ["<|endoftext|>", "<s>", "<|im_end|>", *"abcdefgh", "ab"]
    tokens += [f"x{index}" for index in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (vocab_size - 3)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a model of transformers as GGUF: matrices as `kind`, metadata by the names of the writer's methods."""

    def write(
        model: Any,
        kind: Type = Type.F32,
        *,
        architecture: str | None = None,
        tensors: dict[str, np.ndarray | None] | None = None,
        tokenizer: bool = True,
        **metadata: Any,
    ) -> Path:
        path = tmp_path / "tiny.gguf"
        config = model.config
        writer = gguf.GGUFWriter(path, architecture or config.model_type.replace("mistral", "llama"))
        add_metadata(writer, config, **metadata)
        if tokenizer:
            add_tokenizer(writer, config.vocab_size)
        for name, value in (gguf_tensors(model) | (tensors or {})).items():
            if value is None:
                continue
            matrix_kind = kind if value.ndim > 1 else Type.F32
            writer.add_tensor(name, gguf.quantize(value, matrix_kind), raw_dtype=matrix_kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    is_llama = model.config.model_type in ("llama", "mistral")
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = value.float().numpy()
        module = name.split(".")[-2]
        tensors[gguf_name(name)] = permute(array, heads[module]) if is_llama and module in heads else array
    return tensors


def convert(path: Path, dtype: Any = "float32") -> Path:
    folder = path.parent / f"converted-{dtype}"
    folder.mkdir(exist_ok=True)
    convert_gguf(check_gguf(path), folder, dtype)
    return folder


def assert_refused(path: Path, *words: str) -> None:
    with pytest.raises(ModelError) as info:
        convert(path)
    message = str(info.value)
    assert str(path) in message
    assert "\n" not in message
    for word in words:
        assert word in message


def test_names() -> None:
    assert gguf_name("model.layers.13.self_attn.q_norm.weight") == "blk.13.attn_q_norm.weight"
    assert gguf_name("model.layers.0.mlp.down_proj.bias") == "blk.0.ffn_down.bias"
    assert gguf_name("model.layers.0.post_attention_layernorm.weight") == "blk.0.ffn_norm.weight"
    assert gguf_name("lm_head.weight") == "output.weight"


def test_every_variant_survives(variant: Any, write_gguf: Any) -> None:
    """Same weights and same shapes, whatever the architecture. (Rotary scaling and windows have their own tests.)"""
    converted = convert(write_gguf(variant.model))
    config = check_model(converted)
    ours = load_weights(converted, config, torch.float32)
    original = check_model(variant.folder)
    theirs = load_weights(variant.folder, original, torch.float32)
    assert torch.equal(ours.embedding, theirs.embedding)
    assert torch.equal(ours.lm_head, theirs.lm_head)
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        for name in one.__dataclass_fields__:
            left, right = getattr(one, name), getattr(other, name)
            assert (left is None) == (right is None)
            assert left is None or torch.equal(left, right), name
    same = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "qk_norm")
    assert all(getattr(config, name) == getattr(original, name) for name in same)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
def test_weight_types(write_gguf: Any, make_checkpoint: Any, kind: Type) -> None:
    """Close to the source, and exactly what the type's own rounding makes of it."""
    model = make_checkpoint("qwen2", intermediate_size=96).model
    converted = convert(write_gguf(model, kind))
    weights = load_weights(converted, check_model(converted), torch.float32)
    source = model.state_dict()["model.layers.1.mlp.down_proj.weight"].numpy()
    steps = {Type.F32: 0, Type.F16: 2**-11, Type.BF16: 2**-8, Type.Q8_0: 1 / 127, Type.Q5_0: 1 / 16, Type.Q5_1: 1 / 16}
    assert np.abs(weights.layers[1].down.numpy() - source).max() <= steps.get(kind, 1 / 8) * np.abs(source).max()
    rounded = gguf.dequantize(gguf.quantize(source, kind), kind)
    assert np.array_equal(weights.layers[1].down.numpy(), rounded)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_quantised_blocks_against_another_decoder(tmp_path: Path, kind: Type) -> None:
    """Random bits in every block, decoded by this path and by the decoder of transformers."""
    rows, columns = 37, 512
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    raw = rng.integers(0, 256, (rows, columns // block_len, block_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS.get(kind, (0, 2) if kind == Type.Q4_1 else (0,)):
        scales = rng.uniform(-2, 2, raw.shape[:2]).astype(np.float16)
        raw[:, :, offset : offset + 2] = scales[..., None].view(np.uint8)
    path = tmp_path / "blocks.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blocks", raw.reshape(rows, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(path)
    ours = gguf_convert._dequantise(file, file.tensors["blocks"], torch.float32)
    theirs = dequant.dequantize(torch.from_numpy(raw.reshape(rows, -1)), int(kind)).reshape(rows, columns)
    assert ours.shape == (rows, columns)
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-5)


def test_rows_are_dequantised_in_parts(write_gguf: Any, make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(make_checkpoint("qwen3", intermediate_size=96).model, Type.Q8_0)
    whole = load_weights(folder := convert(path), check_model(folder), torch.float32)
    monkeypatch.setattr(gguf_convert, "_CHUNK_ELEMENTS", 200)
    folder.rename(path.parent / "whole")
    parts = load_weights(folder := convert(path), check_model(folder), torch.float32)
    assert torch.equal(whole.embedding, parts.embedding)


def test_large_models_are_written_in_shards(
    write_gguf: Any, make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint("llama").model
    monkeypatch.setattr(gguf_convert, "SHARD_BYTES", 50_000)
    converted = convert(write_gguf(model))
    assert len(list(converted.glob("model-*-of-*.safetensors"))) > 3
    weights = load_weights(converted, check_model(converted), torch.float32)
    assert torch.equal(weights.lm_head, model.state_dict()["lm_head.weight"])


def test_dtype_and_progress(write_gguf: Any, make_checkpoint: Any, tmp_path: Path) -> None:
    model = make_checkpoint("qwen3").model
    path = write_gguf(model, Type.F16)
    file = check_gguf(path)
    assert default_gguf_dtype(file) == "bfloat16"
    seen: list[tuple[int, int]] = []
    folder = tmp_path / "out"
    folder.mkdir()
    convert_gguf(file, folder, "bfloat16", lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(file.tensors)) for done in range(1, len(file.tensors) + 1)]
    expected = model.state_dict()["lm_head.weight"].half().bfloat16()
    assert torch.equal(load_weights(folder, check_model(folder), torch.bfloat16).lm_head, expected)


def test_float32_files_stay_float32(write_gguf: Any, make_checkpoint: Any) -> None:
    assert default_gguf_dtype(check_gguf(write_gguf(make_checkpoint("llama").model))) == "float32"


@pytest.mark.parametrize(
    ("head_dim", "parameters"),
    [
        (64, {"factor": 8.0, "original_max_position_embeddings": 8192, "high_freq_factor": 4.0}),
        (64, {"factor": 32.0, "original_max_position_embeddings": 8192, "high_freq_factor": 4.0}),
        (64, {"factor": 4.0, "original_max_position_embeddings": 4096, "high_freq_factor": 6.0}),
    ],
)
def test_llama3_scaling_is_recovered(
    write_gguf: Any, make_checkpoint: Any, head_dim: int, parameters: dict[str, Any]
) -> None:
    """GGUF keeps the divisors of the frequencies, we need the parameters that made them."""
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "low_freq_factor": 1.0, **parameters}
    model = make_checkpoint("llama", head_dim=head_dim, rope_parameters=rope).model
    plain = 500_000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    converted = convert(write_gguf(model, tensors={"rope_freqs.weight": divisors}))
    assert json.loads((converted / "config.json").read_text())["rope_parameters"] == rope


def test_divisors_that_are_not_llama3(write_gguf: Any, make_checkpoint: Any) -> None:
    divisors = np.linspace(1, 3, 8, dtype=np.float32)
    path = write_gguf(make_checkpoint("llama").model, tensors={"rope_freqs.weight": divisors})
    assert_refused(path, "rope_freqs.weight", "Llama 3")


def test_divisors_of_one_are_no_scaling(write_gguf: Any, make_checkpoint: Any) -> None:
    path = write_gguf(make_checkpoint("llama").model, tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    assert check_model(convert(path)).rope.scaling == "default"


def test_linear_and_yarn_scaling(write_gguf: Any, make_checkpoint: Any) -> None:
    model = make_checkpoint("qwen2").model
    linear = write_gguf(model, rope_scaling_type=gguf.RopeScalingType.LINEAR, rope_scaling_factor=3.0)
    rope = check_model(convert(linear)).rope
    assert (rope.scaling, rope.factor, rope.theta) == ("linear", 3.0, 10_000.0)
    (linear.parent / "converted-float32").rename(linear.parent / "linear")
    yarn = write_gguf(
        model,
        rope_scaling_type=gguf.RopeScalingType.YARN,
        rope_scaling_factor=4.0,
        rope_scaling_orig_ctx_len=128,
        rope_scaling_yarn_beta_fast=16.0,
    )
    rope = check_model(convert(yarn)).rope
    assert (rope.scaling, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 128)
    assert (rope.beta_fast, rope.beta_slow, rope.attention_factor) == (16.0, 1.0, None)


def test_missing_output_bias_is_zero(write_gguf: Any, make_checkpoint: Any) -> None:
    """Qwen models converted to Llama have biases on q, k and v only; Llama's configuration knows all or none."""
    model = make_checkpoint("llama", attention_bias=True).model
    path = write_gguf(model, tensors={f"blk.{layer}.attn_output.bias": None for layer in range(2)})
    layer = load_weights(folder := convert(path), check_model(folder), torch.float32).layers[0]
    assert layer.output_bias is not None
    assert not layer.output_bias.any()
    assert layer.qkv_bias is not None
    assert layer.qkv_bias.all()


def test_end_tokens(write_gguf: Any, make_checkpoint: Any) -> None:
    """The file names <|im_end|>; the control token <|endoftext|> ends an answer too."""
    path = write_gguf(make_checkpoint("qwen2").model)
    assert end_token_ids(check_gguf(path)) == [2, 0]
    assert check_model(convert(path)).eos_token_ids == (2, 0)


@pytest.mark.parametrize("kind", [gguf.PoolingType.LAST, gguf.PoolingType.MEAN, gguf.PoolingType.NONE, None])
def test_embedding_models(write_gguf: Any, make_checkpoint: Any, kind: gguf.PoolingType | None) -> None:
    """They say how they are pooled, and read their text's end as a token."""
    metadata = {} if kind is None else {"pooling_type": kind}
    path = write_gguf(make_checkpoint("qwen3").model, add_eos_token=True, **metadata)
    folder = convert(path)
    assert read_pooling(folder).mode == ("mean" if kind is gguf.PoolingType.MEAN else "last")
    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode("ab").ids
    assert (ids[-1] == 2) == bool(kind)


def test_unsupported_architecture(write_gguf: Any, make_checkpoint: Any) -> None:
    assert_refused(write_gguf(make_checkpoint("llama").model, architecture="gemma3"), "gemma3", "qwen3")


def test_mixture_of_experts(write_gguf: Any, make_checkpoint: Any) -> None:
    assert_refused(write_gguf(make_checkpoint("llama").model, expert_count=8), "mixture-of-experts")


def test_partial_rotary(write_gguf: Any, make_checkpoint: Any) -> None:
    path = write_gguf(make_checkpoint("llama").model, rope_dimension_count=8)
    assert_refused(path, "rope.dimension_count 8", "16")


def test_missing_tensor(write_gguf: Any, make_checkpoint: Any) -> None:
    path = write_gguf(make_checkpoint("llama").model, tensors={"blk.1.ffn_up.weight": None})
    assert_refused(path, "blk.1.ffn_up.weight is missing")


def test_surplus_tensor(write_gguf: Any, make_checkpoint: Any) -> None:
    path = write_gguf(make_checkpoint("llama").model, tensors={"blk.1.surprise": np.ones(4, np.float32)})
    assert_refused(path, "blk.1.surprise")


def test_wrong_shape(write_gguf: Any, make_checkpoint: Any) -> None:
    path = write_gguf(make_checkpoint("llama").model, tensors={"blk.1.ffn_norm.weight": np.ones(63, np.float32)})
    assert_refused(path, "blk.1.ffn_norm.weight", "[63]", "[64]")


def test_no_tokenizer(write_gguf: Any, make_checkpoint: Any) -> None:
    assert_refused(write_gguf(make_checkpoint("llama").model, tokenizer=False), "tokenizer")


def test_unknown_and_unsupported_types(write_gguf: Any, make_checkpoint: Any) -> None:
    path = write_gguf(make_checkpoint("llama").model)
    data = path.read_bytes()
    at = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    for kind, word in ((999, "unknown type 999"), (int(Type.IQ4_XS), "IQ4_XS"), (int(Type.I32), "I32")):
        path.write_bytes(data[:at] + kind.to_bytes(4, "little") + data[at + 4 :])
        assert_refused(path, "output_norm.weight", word, "Q4_K")


@pytest.mark.parametrize("keep", [4, 20, 24, 60, 200, 2_000, 40_000, -32])
def test_truncated(write_gguf: Any, make_checkpoint: Any, keep: int) -> None:
    path = write_gguf(make_checkpoint("llama").model)
    os.truncate(path, keep if keep > 0 else path.stat().st_size + keep)
    assert_refused(path, "truncated")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "not a valid GGUF file"),
        (b"GGML" + bytes(100), "not a GGUF file"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(100), "version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(100), "little-endian"),
        (b"GGUF" + b"\x03\0\0\0" + b"\xff" * 200, "truncated"),
        (NESTED, "not a valid GGUF file"),
    ],
)
def test_foreign_files(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "foreign.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as info:
        check_gguf(path)
    assert str(path) in str(info.value)
    assert word in str(info.value)


def test_one_part_of_many(tmp_path: Path) -> None:
    path = tmp_path / "part-00001-of-00003.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="one of 3 parts"):
        check_gguf(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere\.gguf is missing"):
        check_gguf(tmp_path / "nowhere.gguf")


def test_damage_never_escapes_as_another_error(write_gguf: Any, make_checkpoint: Any) -> None:
    """Any flipped byte of the header gives a model or a `ModelError`, nothing else."""
    path = write_gguf(make_checkpoint("llama", num_hidden_layers=1).model)
    data = path.read_bytes()
    header = check_gguf(path).header_bytes
    rng = np.random.default_rng(3)
    refused = 0
    for offset in rng.integers(0, header, 400):
        damaged = bytearray(data)
        damaged[offset] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            check_gguf(path)
        except ModelError:
            refused += 1
    assert refused > 100
