"""Grammars over a tokenizer of single characters and a few words: followed, completed, shared, refused."""

from __future__ import annotations

import asyncio
import string
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tandem.workers import grammar
from tandem.workers.constraint import Constraint, NothingAllowed
from tandem.workers.errors import RequestError
from tandem.workers.grammar import Grammar, GrammarCache, GrammarState, compile_grammar, load_grammar_tokenizer
from tandem.workers.types import SamplingParams

TEXTS = ["<unk>", "</s>", *string.ascii_lowercase, *string.digits, *'{}":,-', "yes", "ye", "no"]
IDS = {text: index for index, text in enumerate(TEXTS)}
EOS = 1
VOCAB = len(TEXTS) + 5  # the model's is padded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(IDS, [], unk_token="<unk>"))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def cache(folder: Path) -> GrammarCache:
    return GrammarCache(lambda: load_grammar_tokenizer(folder, VOCAB, [EOS]))


def next_texts(state: GrammarState) -> set[str]:
    words = np.zeros(-(-VOCAB // 32), np.int32)
    state.fill(words)
    return {TEXTS[index] for index in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))}


def ids_of(*texts: str) -> list[int]:
    return [IDS[text] for text in texts]


def test_a_state_follows_an_answer_to_its_end(cache: GrammarCache) -> None:
    state = cache.get('start: ("yes" | "no") ("no" | "7")?').start()
    answer = ids_of("no", "no")  # a prompt, which does not count
    expected_after = ({"y", "ye", "yes", "n", "no"}, {"s"}, {"n", "no", "7", "</s>"}, {"o"})
    for text, expected in zip(("ye", "s", "n", "o"), expected_after):
        assert next_texts(state) == expected
        assert not state.is_complete
        answer += ids_of(text)
        state.follow(answer, 2)
        state.follow(answer, 2)
    assert state.is_complete
    assert not state.error


def test_an_answer_may_end_where_it_matches(cache: GrammarCache) -> None:
    state = cache.get("start: /[a-b]+/").start()
    assert next_texts(state) == {"a", "b"}
    state.follow(ids_of("a"), 0)
    assert next_texts(state) == {"a", "b", "</s>"}
    assert not state.is_complete
    state.follow(ids_of("a", "</s>"), 0)
    assert state.is_complete


def test_states_of_one_grammar_are_apart(cache: GrammarCache) -> None:
    compiled = cache.get('start: "yes" | "no"')
    first, second = compiled.start(), compiled.start()
    first.follow(ids_of("yes"), 0)
    assert first.is_complete
    assert next_texts(second) == {"y", "ye", "yes", "n", "no"}
    later = compiled.start()
    later.follow(ids_of("y", "e"), 0)
    assert next_texts(later) == {"s"}


def test_a_constraint_with_a_grammar_ends_what_cannot_go_on(cache: GrammarCache) -> None:
    params = SamplingParams(max_tokens=9, seed=0, grammar="", stop_token_ids=(EOS,), min_tokens=2)
    compiled = cache.get("start: /[a-b]+/")
    constraint = Constraint(params, VOCAB, compiled.start())
    words = constraint.mask(ids_of("a"), 0)
    assert words is not None
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert set(np.flatnonzero(bits)) == set(ids_of("a", "b"))  # too early for the end
    with pytest.raises(NothingAllowed, match="cannot go on"):
        Constraint(params, VOCAB, compiled.start()).mask(ids_of("no"), 0)
    assert not Constraint(params, VOCAB, compiled.start()).is_complete(ids_of("no"), 0)


@pytest.mark.parametrize(
    "text",
    [
        "start: /(/",
        "start: nobody",
        "start: %json {",
        'start: %json {"type": "strin"}',
        "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
        'start: %json {"items": ' * 300 + "}" * 300,
        'start: "' + "a" * 300_000 + '"',
        'start: "\ud800"',
        "",
        "\0",
        "start: /(a{1000}){1000}/",
    ],
    ids=range(11),
)
def test_what_is_no_grammar_or_too_much_of_one_is_refused_soon(cache: GrammarCache, text: str) -> None:
    cache.get('start: "a"')  # loads the tokenizer
    started = time.thread_time()
    with pytest.raises(RequestError) as caught:
        cache.get(text)
    assert time.thread_time() - started < 3.0
    assert caught.value.param == "grammar"
    assert len(str(caught.value)) < 400


def test_a_tokenizer_that_cannot_be_used_is_the_request_s_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        load_grammar_tokenizer(tmp_path, VOCAB, [EOS])
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RequestError, match="tokenizer"):
        load_grammar_tokenizer(tmp_path, VOCAB, [EOS])


async def test_a_grammar_is_compiled_once_however_many_ask_and_the_oldest_goes(folder: Path) -> None:
    cache = GrammarCache(lambda: load_grammar_tokenizer(folder, VOCAB, [EOS]), max_cached=2)
    await asyncio.gather(*(cache.prepare('start: "a"') for _ in range(5)))
    assert isinstance(cache.get('start: "a"'), Grammar)
    assert cache.num_compiled == 1
    await cache.prepare('start: "b"')
    cache.get('start: "a"')
    await cache.prepare('start: "c"')
    await cache.prepare('start: "a"')
    assert cache.num_compiled == 3
    await cache.prepare('start: "b"')  # had gone: "a" was asked for after it
    assert cache.num_compiled == 4
    with pytest.raises(RequestError):
        await cache.prepare("start: /(/")
    cache.close()


def test_what_takes_too_much_work_is_refused(cache: GrammarCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large vocabulary some regular expressions take seconds; with this one it takes a lower limit."""
    cache.get('start: "a"')
    tokenizer = cache._tokenizer
    assert tokenizer is not None
    compile_grammar(tokenizer, "start: /([a-f]{1,30}b?){1,30}/")
    monkeypatch.setattr(grammar, "INITIAL_FUEL", 10)
    monkeypatch.setattr(grammar, "STEP_FUEL", 10)
    with pytest.raises(RequestError, match="cannot be compiled"):
        compile_grammar(tokenizer, "start: /([a-f]{1,30}b?){1,30}/")
