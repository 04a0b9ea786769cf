"""Grammars tried in child processes: right answers, once each, and nobody feels what a text does to its helper."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import tokenizers

from tandem.router import grammar_check
from tandem.router.errors import ApiError
from tandem.router.grammar import choice_grammar, json_object_grammar, json_schema_grammar, regex_grammar
from tandem.router.grammar_check import GrammarChecker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = ["<unk>", "</s>", *map(chr, range(33, 127)), "\u0120"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({text: i for i, text in enumerate(texts)}, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
async def checker(folder: Path) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(folder, 99, [1])
    yield checker
    await checker.close()


async def refusal(checker: GrammarChecker, text: str) -> str | None:
    try:
        await checker.check(text)
    except ApiError as error:
        if error.status != 400:
            raise
        return error.message
    return None


async def test_what_the_builders_write_is_compiled_and_what_is_wrong_is_said(checker: GrammarChecker) -> None:
    schema = {"type": "object", "properties": {"a/b": {"enum": ["x\ny", 'z"']}}, "required": ["a/b"]}
    fine = [
        json_schema_grammar(schema),
        json_object_grammar(),
        regex_grammar("a/b\\/[/]+\n|\\d+"),
        choice_grammar(["yes", 'n"o', "a\\b\nc"]),
    ]
    assert await asyncio.gather(*(refusal(checker, text) for text in fine)) == [None] * 4
    wrong = [
        json_schema_grammar({"type": "strin"}),
        json_schema_grammar({"items": {"$ref": "#/nowhere"}}),
        regex_grammar("("),
        "start: nobody",
        'start: %json {"items": ' * 300 + "}" * 300,
        "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
        'start: "' + "a" * 300_000 + '"',
    ]
    messages = await asyncio.gather(*(refusal(checker, text) for text in wrong))
    assert all(messages)
    assert not any("too long" in message for message in messages if message)
    assert await refusal(checker, "start: nobody") == messages[3]


async def test_a_text_is_tried_once_however_many_ask(checker: GrammarChecker) -> None:
    await asyncio.gather(*(checker.check('start: "a"') for _ in range(200)))
    (helper,) = checker._helpers
    assert checker._idle == [helper]
    await checker._end(helper)
    checker._idle.clear()
    await checker.check('start: "a"')  # nobody is there to ask any more
    assert not checker._helpers


async def test_who_stops_the_gateway_from_its_terminal_does_not_stop_helpers(checker: GrammarChecker) -> None:
    await checker.check('start: "a"')
    (helper,) = checker._helpers
    assert os.getpgid(helper._process.pid) != os.getpgid(0)


async def test_a_helper_that_takes_too_long_is_killed_and_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = GrammarChecker(folder, 99, [1], timeout_s=0.3)
    await checker.check('start: "a"')
    (helper,) = checker._helpers
    pid = helper._process.pid
    os.kill(pid, 19)  # as good as a compilation without an end
    assert await refusal(checker, 'start: "b"') == "The grammar takes too long to compile."
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert await refusal(checker, 'start: "c"') is None
    (helper,) = checker._helpers
    assert helper._process.pid != pid
    helper._process.kill()
    await helper._process.wait()
    assert await refusal(checker, 'start: "d"') == "The grammar is too complex."
    assert await refusal(checker, 'start: "e"') is None
    await checker.close()
    assert not checker._helpers


async def test_the_event_loop_does_not_feel_a_bomb(checker: GrammarChecker) -> None:
    await checker.check('start: "a"')
    bombs = [f"start: /{bomb}/" for bomb in ("(a{1000}){1000}", "((a{100}){100}){100}", "(a{1000}){2000}")]
    before = time.thread_time()
    assert all(await asyncio.gather(*(refusal(checker, bomb) for bomb in bombs)))
    assert time.thread_time() - before < 0.1, "work of the loop's own thread, however loaded the machine is"


async def test_too_many_at_once_are_turned_away(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 2)
    waiting = [asyncio.create_task(checker.check(f'start: "{number}"')) for number in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught:
        await checker.check('start: "2"')
    assert caught.value.status == 429
    await asyncio.gather(*waiting)


async def test_a_model_whose_tokenizer_cannot_be_used_says_so(tmp_path: Path) -> None:
    checker = GrammarChecker(tmp_path, 99, [1])
    assert "tokenizer" in (await refusal(checker, 'start: "a"') or "")
    await checker.close()
