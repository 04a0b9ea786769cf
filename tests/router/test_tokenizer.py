"""The gateway's tokenizer against transformers', and detokenising against the whole text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, trainers

from tandem.router.detokenizer import WindowDetokenizer
from tandem.router.tokenizer import Tokenizer
from tandem.workers.errors import ModelError, RequestError

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": 'Be <brief> & "kind".'}, {"role": "user", "content": "日本語 🙂\n\n  spaced  "}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two <|im_end|>"},
        {"role": "user", "content": "Three"},
    ],
]
TEMPLATES = {
    "loops": "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}\n"
    "  {{ bos_token }}{{ m | tojson }}\n    {% endfor %}\n{{ eos_token }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
    "{{ m.content }}{% endfor %}{% if tools is none and documents is not defined or not documents %}x{% endif %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "undefined": "{{ nothing }}{% if nothing is defined %}a{% endif %}{{ messages[0]['content'].strip() | upper }}",
    "indent": "{{ messages | tojson(indent=2) }}{{ messages[0].keys() | list | tojson }}",
}


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def save_sentencepiece_tokenizer(folder: Path, decoder: Any = None) -> None:
    """As Llama 2, Mistral and TinyLlama have: spaces are U+2581, unknown characters are bytes."""
    tokenizer = RawTokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder or decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special[:3], show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and some more words"] * 10, trainer)
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    for piece in special[3:]:  # bytes are ordinary pieces, not added tokens
        vocab.setdefault(piece, len(vocab))
    (folder / "tokenizer.json").write_text(json.dumps(state))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("sentencepiece")
    save_sentencepiece_tokenizer(folder)
    return Tokenizer(folder)


@pytest.mark.parametrize("messages", CHATS)
def test_chat_prompt_equals_transformers(tokenizer_folder: Path, tokenizer: Tokenizer, messages: Any) -> None:
    theirs = transformers_tokenizer(tokenizer_folder)
    text = tokenizer.render_chat(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("as_file", [False, True])
def test_templates_render_as_in_transformers(tokenizer_folder: Path, tmp_path: Path, name: str, as_file: bool) -> None:
    for file in tokenizer_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = "the file wins" if as_file else TEMPLATES[name]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if as_file:
        (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
    theirs = transformers_tokenizer(tmp_path)
    for messages in CHATS:
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert Tokenizer(tmp_path).render_chat(messages) == expected


def test_tools_render_as_in_transformers(tokenizer_folder: Path, tmp_path: Path) -> None:
    for file in tokenizer_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{%- if tools %}{{- '# Tools\n' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
        "{%- endif %}"
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.tool_calls %}"
        "{%- for call in m.tool_calls %}{%- if call.function %}{%- set call = call.function %}{%- endif %}"
        '{{- \'<tool_call>\n{"name": "\' + call.name + \'", "arguments": \' }}{{- call.arguments | tojson }}'
        "{{- '}\n</tool_call>' }}{%- endfor %}{%- endif %}{{- m.content }}{{- '<|im_end|>\n' }}{%- endfor %}"
    )
    function = {"name": "f", "description": "<é>", "parameters": {"type": "object", "properties": {"a": {}}}}
    tools = [{"type": "function", "function": function}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "'x' & é"}}}
    messages: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    theirs = transformers_tokenizer(tmp_path)
    expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode_chat(messages, tools=tools).token_ids == expected
    assert tokenizer.style.renders_tools
    assert tokenizer.style.calls == "hermes"


@pytest.mark.parametrize("text", ["", " ", "Hello world", "  two  spaces\n", "Grüße 🙂 日本語", "<|im_end|> inside"])
def test_encode_equals_transformers(tokenizer_folder: Path, tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text, add_special_tokens=True) == transformers_tokenizer(tokenizer_folder).encode(text)


def test_template_that_refuses_is_the_clients_error(tokenizer_folder: Path, tmp_path: Path) -> None:
    for file in tokenizer_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        Tokenizer(tmp_path).render_chat(CHATS[0])


@pytest.mark.parametrize(
    "template",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages[0].content + 1 }}", "{{ 1 / 0 }}"],
)
def test_template_cannot_do_harm(tokenizer_folder: Path, tmp_path: Path, template: str) -> None:
    for file in tokenizer_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError):
        Tokenizer(tmp_path).render_chat(CHATS[0])


@pytest.mark.parametrize("broken", ["missing", "not json", "not a tokenizer", "bad template"])
def test_unusable_files_are_named(tokenizer_folder: Path, tmp_path: Path, broken: str) -> None:
    if broken != "missing":
        content = {"not json": "{", "not a tokenizer": "{}"}.get(broken)
        good = (tokenizer_folder / "tokenizer.json").read_text()
        (tmp_path / "tokenizer.json").write_text(good if content is None else content)
    if broken == "bad template":
        (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelError, match="chat template" if broken == "bad template" else r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_eos_ids_come_from_all_files(tokenizer_folder: Path, tmp_path: Path) -> None:
    for file in tokenizer_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert Tokenizer(tmp_path).eos_token_ids == (2,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0, "vocab_size": 512}))
    assert Tokenizer(tmp_path).eos_token_ids == (0, 2)
    assert Tokenizer(tmp_path).vocab_size == 512
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    assert Tokenizer(tmp_path).eos_token_ids == (1, 2, 5)


# Detokenising


def shown(tokenizer: Tokenizer, ids: list[int], prompt: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@given(ids=st.lists(st.integers(0, 399), max_size=40))
def test_byte_level_equals_decoding_the_whole(tokenizer: Tokenizer, ids: list[int]) -> None:
    whole = tokenizer._tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(shown(tokenizer, ids, [5])) == whole


@given(text=st.text(max_size=30), prompt=st.text("abc d", min_size=1, max_size=10))
def test_sentencepiece_adds_to_the_prompt(sentencepiece: Tokenizer, text: str, prompt: str) -> None:
    ids = sentencepiece.encode(text, add_special_tokens=False)
    prompt_ids = sentencepiece.encode(prompt, add_special_tokens=False)
    decode = sentencepiece._tokenizer.decode
    assert "".join(shown(sentencepiece, ids, prompt_ids)) == decode(prompt_ids + ids)[len(decode(prompt_ids)) :]
    assert "".join(shown(sentencepiece, ids, [1])) == decode([1, *ids])  # nothing but <s> before it


@given(text=st.text(max_size=20))
def test_characters_are_never_cut(tokenizer: Tokenizer, sentencepiece: Tokenizer, text: str) -> None:
    for each in (tokenizer, sentencepiece):
        pieces = shown(each, each.encode(text, add_special_tokens=False), [1])
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(text=st.text(max_size=30))
@settings(max_examples=50)
def test_window_detokenizer_agrees(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    window = WindowDetokenizer(tokenizer._tokenizer, tokenizer._table.special_ids, [40, 41])
    assert "".join([*(window.push(token_id) for token_id in ids), window.finish()]) == text


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(prepend_scheme="always"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.WordPiece(),
        decoders.BPEDecoder(),
    ],
)
def test_other_decoders_give_the_words(tmp_path: Path, decoder: Any) -> None:
    save_sentencepiece_tokenizer(tmp_path, decoder)
    tokenizer = Tokenizer(tmp_path)
    prompt, ids = (tokenizer.encode(text, add_special_tokens=False) for text in ("the quick", "brown fox"))
    decode: Callable[[list[int]], str] = tokenizer._tokenizer.decode
    assert "".join(shown(tokenizer, ids, prompt)) == decode(prompt + ids)[len(decode(prompt)) :]


def test_special_and_unknown_ids_have_no_text(tokenizer: Tokenizer) -> None:
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert "".join(shown(tokenizer, [0, *hello, 1, 2, 100_000], [5])) == "hello"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(100_000) == b""


def test_noise_does_not_pile_up(tokenizer: Tokenizer) -> None:
    byte = next(i for i in range(400) if tokenizer.token_bytes(i) == b"\xff")
    window = WindowDetokenizer(tokenizer._tokenizer, tokenizer._table.special_ids, [])
    pieces = [window.push(byte) for _ in range(100)]
    assert sum(map(len, pieces)) >= 80
