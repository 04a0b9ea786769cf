"""What a grammar lets through is a call that parses, in the format that the reader reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tandem.router.grammar import json_object_grammar, json_schema_grammar
from tandem.router.parsers.grammars import Function, forced_grammar, if_called_grammar, with_thoughts
from tandem.router.parsers.select import CallFormat

# a schema with a reference: it must still lead somewhere inside the grammar
INTEGER: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/I"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"I": {"type": "integer"}},
}
REFERRED = {"$ref": "#/$defs/O", "$defs": {"O": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
FUNCTIONS = [Function("f", INTEGER), Function("g", None)]
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": 1}}'
OLD_MISTRAL = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'
NEW_MISTRAL = '[TOOL_CALLS]f[ARGS]{"a": 1}'


def matches(grammar: str, text: str) -> bool:
    """Whether the grammar lets the text through and lets it end there."""
    tokenizer = LLTokenizer("byte")
    assert LLMatcher.validate_grammar(grammar, tokenizer) == ""
    matcher = LLMatcher(tokenizer, grammar)
    ids = tokenizer.tokenize_str(text)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def forced(form: CallFormat, *, parallel: bool = False, has_marks: bool = False) -> str:
    return forced_grammar(form, FUNCTIONS, parallel=parallel, mark=json.dumps, mistral_has_marks=has_marks)


@pytest.mark.parametrize(
    ("form", "has_marks", "call", "two"),
    [
        ("hermes", False, HERMES, f"{HERMES}\n{HERMES}"),
        ("llama3_json", False, LLAMA, f"{LLAMA}; {LLAMA}"),
        ("mistral", False, OLD_MISTRAL, OLD_MISTRAL[:-1] + ', {"name": "g", "arguments": {}}]'),
        ("mistral", True, NEW_MISTRAL, NEW_MISTRAL * 2),
    ],
)
def test_only_whole_calls_of_known_functions(form: CallFormat, has_marks: bool, call: str, two: str) -> None:
    one, many = forced(form, has_marks=has_marks), forced(form, parallel=True, has_marks=has_marks)
    for grammar in (one, many):
        assert matches(grammar, call)
        assert not matches(grammar, call[:-1])
        assert not matches(grammar, call.replace("1", '"x"'))
        assert not matches(grammar, call.replace("f", "h", 1))
        assert not matches(grammar, "Sure! " + call)
    assert matches(many, two)
    assert not matches(one, two)


def test_json_stays_on_one_line() -> None:
    """Or a model could write white space for ever."""
    for grammar in (json_object_grammar(), json_schema_grammar(REFERRED)):
        assert matches(grammar, '{"a": 1}')
        assert matches(grammar, '{"a":1}')
        assert not matches(grammar, '{"a":\n1}')
        assert not matches(grammar, '{"a":  1}')
    assert matches(json_schema_grammar(True), "[1, 2]")


def test_thoughts_may_come_first() -> None:
    maybe = with_thoughts(forced("hermes"), starts_inside=False, mark=json.dumps)
    inside = with_thoughts(forced("hermes"), starts_inside=True, mark=json.dumps)
    assert matches(maybe, HERMES)
    assert matches(maybe, f"<think>hm <</think>\n\n{HERMES}")
    assert not matches(maybe, f"hm</think>{HERMES}")
    assert matches(inside, f"hm</think>{HERMES}")
    assert not matches(inside, HERMES)


def test_free_text_until_the_mark_of_a_call() -> None:
    grammar = if_called_grammar(FUNCTIONS, mark=json.dumps)
    for text in ("", "Hello.", f"Well: {HERMES}", f"{HERMES} and {HERMES} so."):
        assert matches(grammar, text)
    for text in ('<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>', "<tool_call>so"):
        assert not matches(grammar, text)
