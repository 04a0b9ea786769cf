"""The tokenizer inside a GGUF file as tokenizer.json and tokenizer_config.json.

Built straight on the `tokenizers` package. (transformers can do it too, in 14 s instead of 0.5 s, but knows only some
pre-tokenizers and falls back to GPT-2's for the others without a word: among them is SmolLM's, which splits digits.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tandem.workers.models.gguf_config import pooling_of
from tandem.workers.models.gguf_file import GgufFile

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_PATTERNS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2, "tekken": _TEKKEN}
"""How the text is cut before merging, by `tokenizer.ggml.pre`: the patterns of the models' own tokenizer.json."""
_DIGIT_SPLITTERS = frozenset({"smollm"})
_PLAIN = frozenset({"gpt-2", "default"})
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""Vocabularies that take a word which is a token as it is, without merging. The same ones start with BOS by default."""


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write both files into `folder`. Raises `ModelError` for a tokenizer that cannot be rebuilt faithfully."""
    build_tokenizer(file).save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(file), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by name, and the chat template, if the file has one."""
    tokens = _tokens(file)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and index < len(tokens):
            config[f"{name}_token"] = tokens[index]
    config["add_bos_token"] = _adds_bos(file)
    config["model_max_length"] = file.metadata.get(f"{file.metadata['general.architecture']}.context_length")
    if "tokenizer.chat_template" in file.metadata:
        config["chat_template"] = file.metadata["tokenizer.chat_template"]
    return config


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer that the file describes: byte-level BPE ("gpt2") or SentencePiece BPE ("llama")."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(file)
    elif kind == "llama":
        tokenizer = _sentencepiece(file)
    else:
        raise file.fail(f"tokenizer.ggml.model {kind!r} is not supported (gpt2 and llama are)")
    _add_special_tokens(file, tokenizer)
    before = [_added_token(file, "bos")] if _adds_bos(file) else []
    behind = [_added_token(file, "eos")] if _adds_eos(file) else []
    if before or behind:
        single, other = (
            [*(f"{token}:{kind}" for token, _ in before), text, *(f"{token}:{kind}" for token, _ in behind)]
            for kind, text in enumerate(("$A:0", "$B:1"))
        )
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=single + other, special_tokens=list(dict.fromkeys(before + behind))
        )
    return tokenizer


def _added_token(file: GgufFile, name: str) -> tuple[str, int]:
    token_id = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        raise file.fail(f"tokenizer.ggml.add_{name}_token is set, but there is no tokenizer.ggml.{name}_token_id")
    return _tokens(file)[token_id], token_id


def check_tokenizer(file: GgufFile) -> None:
    """The cheap part of `build_tokenizer`: is there one, and of a kind that we can rebuild? Raises `ModelError`."""
    _tokens(file)
    if file.metadata.get("tokenizer.ggml.model") == "gpt2":
        _pre_tokenizer(file)
        _merges(file)


def _tokens(file: GgufFile) -> list[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise file.fail("it has no tokenizer (tokenizer.ggml.tokens is missing)")
    return tokens


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise file.fail("its tokenizer has no merges (tokenizer.ggml.merges is missing)")
    pairs = [merge.split(" ") for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise file.fail("tokenizer.ggml.merges holds an entry that is not a pair")
    return [(left, right) for left, right in pairs]


def _adds_bos(file: GgufFile) -> bool:
    is_default = file.metadata.get("tokenizer.ggml.model") == "llama"
    is_default |= file.metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    return bool(file.metadata.get("tokenizer.ggml.add_bos_token", is_default))


def _adds_eos(file: GgufFile) -> bool:
    """For embedding models, which read their text's end there; a prompt that is to go on must not have one."""
    return bool(file.metadata.get("tokenizer.ggml.add_eos_token")) and pooling_of(file) is not None


def _vocab(file: GgufFile) -> dict[str, int]:
    tokens = _tokens(file)
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise file.fail(f"its vocabulary holds {twice!r} twice")
    return vocab


def _byte_level(file: GgufFile) -> Tokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    tokenizer = _bpe(file, _merges(file), ignore_merges=pre in _WHOLE_WORDS_FIRST)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(file)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _pre_tokenizer(file: GgufFile) -> pre_tokenizers.PreTokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    if pre in _PLAIN:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _DIGIT_SPLITTERS:
        by_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_words])
    if pre not in _SPLIT_PATTERNS:
        known = ", ".join(sorted({*_SPLIT_PATTERNS, *_DIGIT_SPLITTERS, *_PLAIN}))
        raise file.fail(f"tokenizer.ggml.pre {pre!r} is not supported (supported: {known})")
    split = pre_tokenizers.Split(Regex(_SPLIT_PATTERNS[pre]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(file: GgufFile) -> Tokenizer:
    """SentencePiece BPE: merges follow from the vocabulary, the best score first; unknown characters become bytes."""
    tokens = _tokens(file)
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise file.fail("tokenizer.ggml.scores must hold one number per token")
    unknown = tokens[file.metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = _merges_by_score(_vocab(file), scores)
    tokenizer = _bpe(file, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    replace = normalizers.Replace(" ", "▁")
    adds_space = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if adds_space else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return tokenizer


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _bpe(file: GgufFile, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    vocab = _vocab(file)
    try:
        return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the package raises nothing narrower, for example for a merge outside the vocabulary
        raise file.fail(f"its tokenizer is inconsistent: {error}") from error


def _add_special_tokens(file: GgufFile, tokenizer: Tokenizer) -> None:
    """Control tokens are never cut nor made by merging; user-defined ones are plain text that is kept whole."""
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    added = [
        AddedToken(token, normalized=False, special=kind == TokenType.CONTROL)
        for token, kind in zip(_tokens(file), kinds)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
