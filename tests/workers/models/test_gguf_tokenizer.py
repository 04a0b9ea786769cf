"""Tokenizers rebuilt from GGUF metadata, against the one that transformers builds or against tokens known by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import transformers

from tandem.workers.errors import ModelError
from tandem.workers.models.gguf_file import GgufFile, read_gguf
from tandem.workers.models.gguf_tokenizer import build_tokenizer, check_tokenizer, write_tokenizer

TEXTS = [
    "Hello world, it's 12345 o'clock!",
    "a  1\n\n  b\t\u00a0c",
    "naïve café — 東京 🦊",
    "<|im_start|>user\nHi<|im_end|>\n",
    "THE'LL don't  <tool> x<tool>y",
    "",
    " ",
]
CORPUS = [*TEXTS, "the cat sat on the mat and the cat said hello to the other cat 12 34 56", "world world hello"]


def train(kind: str) -> tuple[dict[str, int], list[str]]:
    """A small byte-level or SentencePiece-like vocabulary with its merges, learned from `CORPUS`."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    if kind == "gpt2":
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        alphabet = []
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [" ".join(pair) for pair in model["merges"]]


def byte_level(pre: str, **changes: Any) -> dict[str, Any]:
    vocab, merges = train("gpt2")
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<|im_start|>", "<|im_end|>", "<tool>"]
    metadata = {
        "general.architecture": "qwen2",
        "qwen2.context_length": 512,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(vocab) + [3, 3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(vocab),
        "tokenizer.ggml.eos_token_id": len(vocab) + 1,
    }
    return metadata | changes


def sentencepiece(**changes: Any) -> dict[str, Any]:
    vocab, _ = train("llama")
    pieces = sorted(vocab, key=vocab.__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 512,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | changes


def as_file(metadata: dict[str, Any]) -> GgufFile:
    return GgufFile(path=Path("tiny.gguf"), metadata=metadata, tensors={}, header_bytes=0)


def write_file(folder: Path, metadata: dict[str, Any]) -> Path:
    """The metadata as a real file, for transformers. It wants some keys of the model too."""
    architecture = metadata["general.architecture"]
    path = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif name != "general.architecture":
            writer.add_string(name, value)
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe", "tekken"])
def test_byte_level_against_transformers(tmp_path: Path, pre: str) -> None:
    metadata = byte_level(pre) | {"tokenizer.ggml.add_bos_token": False}
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=write_file(tmp_path, metadata).name)
    ours = build_tokenizer(read_gguf(tmp_path / "tiny.gguf"))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text).input_ids, text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_sentencepiece_against_transformers(tmp_path: Path) -> None:
    metadata = sentencepiece()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=write_file(tmp_path, metadata).name)
    ours = build_tokenizer(read_gguf(tmp_path / "tiny.gguf"))
    for text in TEXTS:
        if not text.startswith(" "):  # where SentencePiece adds its own space all the same, and transformers does not
            assert ours.encode(text).ids == theirs(text).input_ids, text


def test_sentencepiece_bytes_and_spaces() -> None:
    tokenizer = build_tokenizer(as_file(sentencepiece()))
    ids = tokenizer.encode("Ω hello").ids
    assert ids[0] == 1
    assert {3 + 0xCE, 3 + 0xA9} <= set(ids)
    assert tokenizer.decode(ids) == "Ω hello"
    assert tokenizer.decode(tokenizer.encode("  two", add_special_tokens=False).ids) == "  two"


def test_digits_stand_alone_in_smollm() -> None:
    """A run of spaces before a digit belongs together: the digit is cut off first."""
    ours = build_tokenizer(as_file(byte_level("smollm")))
    plain = build_tokenizer(as_file(byte_level("gpt-2")))
    assert ours.encode("56").tokens == ["5", "6"]
    pieces = [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str("a  12")]
    assert pieces == ["a", "ĠĠ", "1", "2"]
    assert plain.pre_tokenizer.pre_tokenize_str("a  12") != ours.pre_tokenizer.pre_tokenize_str("a  12")


def test_llama3_takes_whole_words_first_and_begins_with_bos() -> None:
    metadata = byte_level("llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("zqzq")  # a token that no merge makes
    metadata["tokenizer.ggml.token_type"].append(1)
    index = len(metadata["tokenizer.ggml.tokens"]) - 1
    tokenizer = build_tokenizer(as_file(metadata))
    assert tokenizer.encode("zqzq").ids == [metadata["tokenizer.ggml.bos_token_id"], index]
    assert build_tokenizer(as_file(metadata | {"tokenizer.ggml.pre": "qwen2"})).encode("zqzq").ids != [index]


def test_control_tokens_are_special_and_user_tokens_are_text() -> None:
    metadata = byte_level("qwen2")
    tokenizer = build_tokenizer(as_file(metadata))
    start = metadata["tokenizer.ggml.bos_token_id"]
    assert tokenizer.encode("<|im_start|>Hi<|im_end|>").ids[0] == start
    ids = tokenizer.encode("x<tool>y<|im_end|>").ids
    assert start + 2 in ids
    assert tokenizer.decode(ids) == "x<tool>y"


def test_files_for_transformers_and_templates(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    write_tokenizer(as_file(byte_level("qwen2", **{"tokenizer.chat_template": template})), tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.bos_token, loaded.eos_token) == ("<|im_start|>", "<|im_end|>")
    text = loaded.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text == "<|im_start|>Hi<|im_end|>"
    raw = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert raw["chat_template"] == template
    assert raw["model_max_length"] == 512
    for sample in TEXTS:
        assert loaded(sample).input_ids == build_tokenizer(as_file(byte_level("qwen2"))).encode(sample).ids


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"tokenizer.ggml.tokens": []}, "no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.pre": "mystery"}, "mystery"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "not a pair"),
        ({"tokenizer.ggml.merges": ["unheard of"]}, "inconsistent"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "bos_token_id"),
    ],
)
def test_what_cannot_be_rebuilt(metadata: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word) as info:
        build_tokenizer(as_file(byte_level("qwen2", **metadata)))
    assert str(info.value).startswith("tiny.gguf: ")


@pytest.mark.parametrize("pre", ["mystery", None])
def test_cheap_check_finds_unknown_splitting(pre: str | None) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre"):
        check_tokenizer(as_file(byte_level("qwen2", **{"tokenizer.ggml.pre": pre})))


def test_vocabulary_with_a_token_twice() -> None:
    metadata = byte_level("qwen2")
    metadata["tokenizer.ggml.tokens"][5] = metadata["tokenizer.ggml.tokens"][6]
    with pytest.raises(ModelError, match="twice"):
        build_tokenizer(as_file(metadata))


def test_scores_of_another_length() -> None:
    with pytest.raises(ModelError, match="scores"):
        build_tokenizer(as_file(sentencepiece(**{"tokenizer.ggml.scores": [0.0]})))


@pytest.mark.parametrize(("scores", "expected"), [((-1.0, -2.0), ["ab", "c"]), ((-2.0, -1.0), ["a", "bc"])])
def test_the_better_score_merges_first(scores: tuple[float, float], expected: list[str]) -> None:
    metadata = sentencepiece(**{"tokenizer.ggml.add_space_prefix": False})
    pieces = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "bc"]
    metadata["tokenizer.ggml.tokens"] = pieces
    metadata["tokenizer.ggml.scores"] = [0.0] * 3 + [-9.0] * 3 + list(scores)
    metadata["tokenizer.ggml.token_type"] = [2, 3, 3] + [1] * 5
    assert build_tokenizer(as_file(metadata)).encode("abc", add_special_tokens=False).tokens == expected
