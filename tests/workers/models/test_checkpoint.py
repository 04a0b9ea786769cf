"""Checkpoints from disk to stacked weights, and everything that must be refused with one clear line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.workers.errors import ModelError
from tandem.workers.models.checkpoint import check_model, default_dtype, load_weights, read_config, revision_of


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite model.safetensors after `edit` has changed its dictionary in place."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_refused(folder: Path, *words: str) -> None:
    """`check_model` raises one line that holds every word."""
    with pytest.raises(ModelError) as info:
        check_model(folder)
    message = str(info.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_every_variant_round_trips(variant: Any) -> None:
    config = check_model(variant.folder)
    weights = load_weights(variant.folder, config, torch.float32)
    state = variant.model.state_dict()

    def expect(tensor: torch.Tensor | None, *names: str) -> None:
        found = [state[name] for name in names if name in state]
        assert (tensor is None) == (not found)
        if tensor is not None:
            assert torch.equal(tensor, torch.cat(found))
            assert tensor.is_contiguous()

    expect(weights.embedding, "model.embed_tokens.weight")
    expect(weights.final_norm, "model.norm.weight")
    expect(weights.lm_head, "lm_head.weight")
    assert (weights.lm_head is weights.embedding) == variant.model.config.tie_word_embeddings
    assert len(weights.layers) == variant.model.config.num_hidden_layers
    for index, layer in enumerate(weights.layers):
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        expect(layer.input_norm, f"model.layers.{index}.input_layernorm.weight")
        expect(layer.post_norm, f"model.layers.{index}.post_attention_layernorm.weight")
        expect(layer.qkv, *(f"{attention}{name}_proj.weight" for name in "qkv"))
        expect(layer.qkv_bias, *(f"{attention}{name}_proj.bias" for name in "qkv"))
        expect(layer.q_norm, f"{attention}q_norm.weight")
        expect(layer.k_norm, f"{attention}k_norm.weight")
        expect(layer.output, f"{attention}o_proj.weight")
        expect(layer.output_bias, f"{attention}o_proj.bias")
        expect(layer.gate_up, f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight")
        expect(layer.gate_up_bias, f"{mlp}gate_proj.bias", f"{mlp}up_proj.bias")
        expect(layer.down, f"{mlp}down_proj.weight")
        expect(layer.down_bias, f"{mlp}down_proj.bias")


def test_shards_load_like_one_file(make_checkpoint: Any) -> None:
    checkpoint = make_checkpoint("qwen3", options={"max_shard_size": "60KB"})
    assert len(list(checkpoint.folder.glob("*.safetensors"))) > 2
    config = check_model(checkpoint.folder)
    weights = load_weights(checkpoint.folder, config, torch.float32)
    assert torch.equal(weights.embedding, checkpoint.model.state_dict()["model.embed_tokens.weight"])
    assert torch.equal(weights.layers[1].down, checkpoint.model.state_dict()["model.layers.1.mlp.down_proj.weight"])


def test_weights_are_cast_to_the_serving_dtype(make_checkpoint: Any) -> None:
    checkpoint = make_checkpoint()
    config = check_model(checkpoint.folder)
    for dtype in (torch.bfloat16, torch.float16):
        weights = load_weights(checkpoint.folder, config, dtype)
        expected = checkpoint.model.state_dict()["model.layers.0.mlp.down_proj.weight"].to(dtype)
        assert torch.equal(weights.layers[0].down, expected)


def test_loaded_weights_outlive_the_file(make_checkpoint: Any) -> None:
    """Somebody may replace or cut the file while a worker serves from it."""
    checkpoint = make_checkpoint()
    weights = load_weights(checkpoint.folder, check_model(checkpoint.folder), torch.float32)
    before = weights.embedding.clone()
    path = checkpoint.folder / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(weights.embedding, before)


def test_overflow_of_float16_is_refused(make_checkpoint: Any) -> None:
    folder = make_checkpoint().folder
    edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].fill_(1e5))
    with pytest.raises(ModelError, match=r"model\.norm\.weight does not fit into float16"):
        load_weights(folder, check_model(folder), torch.float16)


def test_rotary_buffers_are_ignored_and_nothing_else(make_checkpoint: Any) -> None:
    folder = make_checkpoint().folder
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    check_model(folder)
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.surprise": torch.ones(8)}))
    assert_refused(folder, "model.safetensors", "model.layers.0.self_attn.surprise")


def test_a_tied_model_may_hold_an_equal_copy(make_checkpoint: Any) -> None:
    folder = make_checkpoint(tie_word_embeddings=True).folder
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    config = check_model(folder)
    load_weights(folder, config, torch.float32)
    edit_tensors(folder, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(ModelError, match=r"lm_head\.weight differs"):
        load_weights(folder, config, torch.float32)


def test_missing_tensor(make_checkpoint: Any) -> None:
    folder = make_checkpoint().folder
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert_refused(folder, "model.layers.1.mlp.up_proj.weight is missing")


def test_a_model_saved_without_its_head(make_checkpoint: Any, edit_json: Any) -> None:
    """As `AutoModel` saves it: other names, and nothing to generate with."""
    folder = make_checkpoint("qwen3", tie_word_embeddings=False).folder
    whole = load_weights(folder, check_model(folder), torch.float32)
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    (folder / "modules.json").write_text("[]")  # a folder of sentence-transformers: the architecture's name stays
    assert not check_model(folder).generates
    (folder / "modules.json").unlink()

    def without_prefix(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_tensors(folder, without_prefix)
    edit_json(folder / "config.json", architectures=["Qwen3Model"])
    config = check_model(folder)
    assert not config.generates
    weights = load_weights(folder, config, torch.float32)
    assert torch.equal(weights.embedding, whole.embedding)
    assert torch.equal(weights.final_norm, whole.final_norm)
    for one, other in zip(weights.layers, whole.layers, strict=True):
        assert torch.equal(one.qkv, other.qkv)
        assert torch.equal(one.down, other.down)


def test_untied_model_without_lm_head(make_checkpoint: Any) -> None:
    folder = make_checkpoint().folder
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert_refused(folder, "lm_head.weight is missing")


def test_wrong_shape(make_checkpoint: Any) -> None:
    folder = make_checkpoint().folder
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": torch.ones(63)}))
    assert_refused(folder, "model.safetensors", "model.norm.weight", "[63]", "[64]")


def test_unsupported_tensor_dtype(make_checkpoint: Any) -> None:
    folder = make_checkpoint().folder
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.float64)}))
    assert_refused(folder, "model.norm.weight", "F64")


@pytest.mark.parametrize("keep", [0, 4, 100, 10_000, -1])
def test_truncated_safetensors(make_checkpoint: Any, keep: int) -> None:
    path = make_checkpoint().folder / "model.safetensors"
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    assert_refused(path.parent, "model.safetensors", "truncated")


def test_bytes_behind_the_tensors(make_checkpoint: Any) -> None:
    path = make_checkpoint().folder / "model.safetensors"
    os.truncate(path, path.stat().st_size + 1)
    assert_refused(path.parent, "model.safetensors", "damaged")


def test_header_that_is_not_json(make_checkpoint: Any) -> None:
    path = make_checkpoint().folder / "model.safetensors"
    for header in (b"not json", b"[" * 100_000):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        assert_refused(path.parent, "model.safetensors", "not a safetensors file")


def test_header_that_lies_about_offsets(make_checkpoint: Any) -> None:
    path = make_checkpoint().folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["data_offsets"] = [-256, 0]
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    assert_refused(path.parent, "model.norm.weight", "does not fit")


def test_missing_shard(make_checkpoint: Any) -> None:
    folder = make_checkpoint(options={"max_shard_size": "60KB"}).folder
    shard = min(folder.glob("*.safetensors"))
    shard.unlink()
    assert_refused(folder, shard.name, "missing")


def test_index_that_contradicts_its_shards(make_checkpoint: Any) -> None:
    folder = make_checkpoint(options={"max_shard_size": "60KB"}).folder
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = next(s for s in shards if s != index["weight_map"]["model.norm.weight"])
    path.write_text(json.dumps(index))
    assert_refused(folder, path.name, "model.norm.weight")


def test_shard_outside_the_folder(make_checkpoint: Any, edit_json: Any) -> None:
    folder = make_checkpoint(options={"max_shard_size": "60KB"}).folder
    edit_json(folder / "model.safetensors.index.json", weight_map={"a": "../secret.safetensors"})
    assert_refused(folder, "../secret.safetensors")


def test_pickled_weights(make_checkpoint: Any) -> None:
    folder = make_checkpoint().folder
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert_refused(folder, "pytorch_model.bin", "pickled", "convert")


def test_no_weights(make_checkpoint: Any) -> None:
    folder = make_checkpoint().folder
    (folder / "model.safetensors").unlink()
    assert_refused(folder, str(folder), "no weights")


def test_no_config(make_checkpoint: Any) -> None:
    folder = make_checkpoint().folder
    (folder / "config.json").unlink()
    assert_refused(folder, "config.json", "missing")
    (folder / "tiny.Q4_0.gguf").touch()
    assert_refused(folder, "tiny.Q4_0.gguf", "give the path of that file")


def test_no_folder(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "nowhere", "not a folder")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_invalid_json(make_checkpoint: Any, name: str) -> None:
    folder = make_checkpoint().folder
    for text in ('{"cut": ', "[" * 100_000):
        (folder / name).write_text(text)
        assert_refused(folder, name, "not valid JSON")


def test_no_tokenizer(make_checkpoint: Any) -> None:
    folder = make_checkpoint().folder
    (folder / "tokenizer.json").unlink()
    assert_refused(folder, "tokenizer.json", "missing")
    (folder / "tokenizer.model").touch()
    assert_refused(folder, "tokenizer.json", "tokenizer.model alone is not enough")


def test_revision_follows_the_content(make_checkpoint: Any, edit_json: Any) -> None:
    folder = make_checkpoint().folder
    first = revision_of(folder)
    assert first == revision_of(folder)
    assert len(first) == 16
    edit_tensors(folder, lambda t: t["model.layers.1.self_attn.v_proj.weight"].add_(1e-3))
    second = revision_of(folder)
    edit_json(folder / "config.json", rms_norm_eps=1e-3)
    assert len({first, second, revision_of(folder)}) == 3


def test_revision_does_not_depend_on_the_place(make_checkpoint: Any, tmp_path: Path) -> None:
    folder = make_checkpoint().folder
    before = revision_of(folder)
    assert revision_of(folder.rename(tmp_path / "elsewhere")) == before


@pytest.mark.parametrize(
    ("named", "device", "expected"),
    [
        ("float32", "cpu", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
        ("float16", "cpu", "bfloat16"),
        ("float16", "cuda", "float16"),
        (None, "cpu", "float32"),
    ],
)
def test_default_dtype(make_checkpoint: Any, edit_json: Any, named: str | None, device: Any, expected: str) -> None:
    folder = make_checkpoint().folder
    edit_json(folder / "config.json", dtype=..., torch_dtype=named)
    assert default_dtype(folder, device=device) == expected
    if named is not None:
        edit_json(folder / "config.json", dtype=named, torch_dtype=...)
        assert default_dtype(folder, device=device) == expected


def test_default_dtype_that_nobody_serves(make_checkpoint: Any, edit_json: Any) -> None:
    folder = make_checkpoint().folder
    edit_json(folder / "config.json", dtype="float8_e4m3fn")
    with pytest.raises(ModelError, match="float8_e4m3fn"):
        default_dtype(folder)


def test_checking_needs_no_torch(make_checkpoint: Any) -> None:
    """`tandem serve` says what is wrong before it has imported anything heavy."""
    code = (
        "import sys, pathlib\n"
        "from tandem.workers.models.checkpoint import check_model, default_dtype, revision_of\n"
        "from tandem.workers.models.gguf_check import check_gguf\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "check_model(folder), default_dtype(folder), revision_of(folder)\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, "-c", code, str(make_checkpoint().folder)], check=True, env=environment, timeout=60)


def test_read_config_is_the_first_half_of_check_model(variant: Any) -> None:
    assert read_config(variant.folder) == check_model(variant.folder)
