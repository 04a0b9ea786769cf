"""What an answer's text is read as must not depend on the portions in which it comes."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.parsers.pieces import Call, Message
from tandem.router.parsers.select import CallFormat, Reading, call_format_of

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"", "b": [1, {"c": 2}]}}\n</tool_call>'
CASES: list[tuple[CallFormat, str, Message]] = [
    ("hermes", f"hi\n{HERMES}", Message("hi", "", [Call("f", '{"a": "x}\\"", "b": [1, {"c": 2}]}')])),
    (
        "hermes",
        f'{HERMES}\n<tool_call>{{"arguments": {{"z":1}} , "name":"g"}}</tool_call>\n',
        Message("", "", [Call("f", '{"a": "x}\\"", "b": [1, {"c": 2}]}'), Call("g", '{"z":1}')]),
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', Message("", "", [Call("f", "{}")])),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>',
        Message("", "", [Call("f", '{"a":1}')]),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', Message("", "", [Call("f", '{"a": 1')])),
    ("hermes", "no <tool thing ", Message("no <tool thing ")),
    ("hermes", "  ", Message("  ")),
    ("hermes", "<tool_call>oops</tool_call>", Message("<tool_call>oops</tool_call>")),
    ("hermes", 'a <tool_call>{"x": 1}</tool_call> b', Message('a<tool_call>{"x": 1}</tool_call> b')),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        Message("", "", [Call("f", '{"a": 1}'), Call("g", "{}")]),
    ),
    ("llama3_json", '{"x": 1} and', Message('{"x": 1} and')),
    ("llama3_json", 'hello {"name":"f"}', Message('hello {"name":"f"}')),
    ("llama3_json", '{"name": "f", "parameters": {"a"', Message("", "", [Call("f", '{"a"')])),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name":"g","arguments":{}}]',
        Message("", "", [Call("f", '{"a": 1}'), Call("g", "{}")]),
    ),
    (
        "mistral",
        'hey [TOOL_CALLS]f[ARGS]{"a": "}"}[TOOL_CALLS]g[CALL_ID]123[ARGS]{}',
        Message("hey", "", [Call("f", '{"a": "}"}'), Call("g", "{}")]),
    ),
    ("mistral", "hi [TOOL", Message("hi [TOOL")),
    (
        "pythonic",
        '[f(a="x", b=[1,{"c":None}]), g.h()]',
        Message("", "", [Call("f", '{"a": "x", "b": [1, {"c": null}]}'), Call("g.h", "{}")]),
    ),
    ("pythonic", "[1,2]", Message("[1,2]")),
    ("pythonic", '[f(a=open("x"))]', Message('[f(a=open("x"))]')),
    ("pythonic", "[f(1)]", Message("[f(1)]")),
    ("pythonic", "hello", Message("hello")),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(), each, max_size=4),
    max_leaves=10,
)


def read(reading: Reading, portions: list[str]) -> Message:
    reader = reading.reader()
    assert reader is not None
    message = Message()
    for portion in portions:
        for piece in reader.push(portion):
            message.add(piece)
    for piece in reader.finish():
        message.add(piece)
    return message


def cut(text: str, places: set[int]) -> list[str]:
    borders = [0, *sorted(place for place in places if 0 < place < len(text)), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
@settings(max_examples=15)
@given(places=st.sets(st.integers(0, 120), max_size=60))
def test_any_portions_give_the_same_message(form: CallFormat, text: str, expected: Message, places: set[int]) -> None:
    assert read(Reading(calls=form), cut(text, places)) == expected
    assert read(Reading(calls=form), list(text)) == expected


@pytest.mark.parametrize(("form", "text", "expected"), [case for case in CASES if case[1].strip()])
def test_thoughts_come_off_before_anything_else_is_read(form: CallFormat, text: str, expected: Message) -> None:
    thoughts = "\nhm <tool_call> [TOOL_CALLS] {"
    whole = f"<think>{thoughts}</think>\n\n{text}"
    expected = Message(expected.content, thoughts, expected.calls)
    for portions in (list(whole), [whole]):
        assert read(Reading(calls=form, reasoning=True), portions) == expected
    assert read(Reading(calls=form, reasoning=True, starts_inside=True), [whole.removeprefix("<think>")]) == expected


@settings(max_examples=50)
@given(places=st.sets(st.integers(0, 60), max_size=40), text=st.text("<think>/ \na", max_size=40))
def test_text_around_thoughts_is_neither_lost_nor_made_up(places: set[int], text: str) -> None:
    message = read(Reading(reasoning=True), cut(text, places) if text else [])
    assert message == read(Reading(reasoning=True), [text])
    if not text.lstrip().startswith("<think>"):
        assert message == Message(text)


def test_thoughts_that_never_end_are_thoughts() -> None:
    assert read(Reading(reasoning=True), ["<think>", "so </thi"]) == Message("", "so </thi")


@settings(max_examples=50)
@given(VALUES)
def test_arguments_of_any_form_arrive_as_they_were_written(value: object) -> None:
    arguments = json.dumps({"x": value}, ensure_ascii=False)
    text = '<tool_call>{"name": "f", "arguments": ' + arguments + "}</tool_call>"
    assert read(Reading(calls="hermes"), list(text)).calls == [Call("f", arguments)]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("[func_name1(params_name1=1)]", "pythonic"),
        ("<tool_call><function=f>", None),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_seen_in_the_template(template: str, expected: CallFormat | None) -> None:
    assert call_format_of(template) == expected
