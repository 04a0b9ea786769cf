"""Texts that are known to cost much: refused when they are compiled, or followed in the masks' own threads within the
limits of work. Whatever happens, it happens to the one request."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from llguidance import LLTokenizer

from tandem.workers.batch import Later, Refusal, SampleSpec
from tandem.workers.constraint import Constraint
from tandem.workers.errors import RequestError
from tandem.workers.grammar import Grammar, compile_grammar, load_grammar_tokenizer
from tandem.workers.masks import MaskMaker
from tandem.workers.types import SamplingParams

TEXTS = ["<unk>", "</s>", *string.printable[:95], "the", "ing", "and"]
VOCAB = len(TEXTS)
PARAMS = SamplingParams(max_tokens=99, seed=0, stop_token_ids=(1,))


def schema(content: Any) -> str:
    return f"start: %json {json.dumps(content)}\n"


def items(pattern: str) -> dict[str, Any]:
    """A pattern that nothing looks at before the first item."""
    return {"type": "array", "minItems": 1, "items": {"type": "string", "pattern": pattern}}


def nested(depth: int, inner: Any) -> Any:
    return inner if depth == 0 else {"type": "array", "minItems": 1, "items": nested(depth - 1, inner)}


RECURSIVE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "string", "pattern": r"^(\w+\s?){1,50}$"}, "c": {"$ref": "#/$defs/list"}},
            "required": ["v", "c"],
        },
        "list": {"type": "array", "items": {"$ref": "#/$defs/node"}},
    },
    "$ref": "#/$defs/node",
}
BOMBS = {
    "counts in counts": "start: /(x{1,10000}){1,10000}/",
    "counts in counts, deep": schema(items("^(x{1,10000}){1,10000}$")),
    "groups in groups, deep": schema(items(r"^((\w{1,20} ?){1,20},?){1,20}$")),
    "quantifiers in quantifiers": schema(items("^((a*)*b*)*$")),
    "what came long ago": schema(items("^.*a.{40}$")),
    "many words": schema(items("^(" + "|".join(f"w{n}x{7 * n}" for n in range(3000)) + ")+$")),
    "large enum": schema({"type": "array", "minItems": 1, "items": {"enum": [f"v {n}" for n in range(8000)]}}),
    "deep nesting": schema(nested(100, items(r"^(\w{1,50} ){1,50}$"))),
    "recursion": schema(RECURSIVE),
    "several at once": schema({"type": "string", "allOf": [{"pattern": f"{c}.*{c}.{{12}}"} for c in "abcd"]}),
    "ambiguous": 'start: s\ns: s s s | "a" | A\nA: /a{1,50}/\n',
}

REFUSED = ("several at once",)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    ids = {text: index for index, text in enumerate(TEXTS)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [], unk_token="<unk>"))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<unk>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    return load_grammar_tokenizer(folder, VOCAB, [1])


def compiled(tokenizer: LLTokenizer, text: str) -> Grammar | None:
    try:
        return compile_grammar(tokenizer, text)
    except RequestError:
        return None


def walk(maker: MaskMaker, grammar: Grammar, seed: int, num_tokens: int) -> list[int]:
    """An answer of random tokens, as far as it gets; any row beside it has its turn at each step."""
    rng = random.Random(seed)
    token_ids: list[int] = []
    constraint = Constraint(PARAMS, VOCAB, grammar.start())
    free = SampleSpec(PARAMS, 0, 1, [5], 0)
    while len(token_ids) < num_tokens and not constraint.is_complete(token_ids, 0):
        wait = maker.begin([SampleSpec(PARAMS, 0, len(token_ids), token_ids, 0, constraint), free])
        assert wait is not None
        mask, beside = wait()
        assert beside is None
        if isinstance(mask, Refusal):
            break
        if not isinstance(mask, Later):
            assert mask is not None
            token_ids.append(int(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))))
        if token_ids[-1:] == [1]:
            break
    return token_ids


@pytest.mark.parametrize("name", list(BOMBS))
def test_a_bomb_is_refused_or_followed_within_limits(tokenizer: LLTokenizer, name: str) -> None:
    grammar = compiled(tokenizer, BOMBS[name])
    if grammar is None:
        assert name in REFUSED
        return
    maker = MaskMaker()
    assert any(len(walk(maker, grammar, seed, 30)) > 1 for seed in range(3))


def test_what_goes_too_far_ends_its_own_answer(tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large vocabulary this pattern has 0.3 s of work in one mask; with this one it takes a lower limit."""
    monkeypatch.setattr("tandem.workers.grammar.STEP_FUEL", 400)
    grammar = compiled(tokenizer, BOMBS["groups in groups, deep"])
    assert grammar is not None
    state = grammar.start()
    words = np.zeros(-(-VOCAB // 32), np.int32)
    state.follow([TEXTS.index(text) for text in ("[", '"', "a")], 0)
    state.fill(words)
    assert "fuel" in state.error or "too many" in state.error
