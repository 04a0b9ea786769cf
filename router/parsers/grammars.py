"""Grammars (llguidance's Lark dialect) that hold an answer to the form of a call, in the format that its reader reads.

    forced      every answer is one call or several, and nothing else
    if called   text as before, but what stands behind a call's mark is a call

Behind `thoughts` there may be thoughts first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.router.grammar import json_rule
from tandem.router.parsers.select import CallFormat

TokenMark = Callable[[str], str]
"""How a mark is written in a grammar: as text, or as the control token that it is."""


@dataclass(frozen=True, slots=True)
class Function:
    """A tool as a grammar sees it."""

    name: str
    parameters: Mapping[str, Any] | None
    is_strict: bool = True
    """Its arguments must match the parameters' schema; otherwise any object will do."""


@dataclass(frozen=True, slots=True)
class _Form:
    opening: str
    before_name: str
    before_arguments: str
    closing: str
    end: str = ""


def forced_grammar(
    form: CallFormat, functions: Sequence[Function], *, parallel: bool, mark: TokenMark, mistral_has_marks: bool
) -> str:
    """At least one call of these functions, and exactly one unless `parallel`."""
    if form == "mistral" and not mistral_has_marks:
        more = ' ("," " "? object)*' if parallel else ""
        start = f'start: {mark("[TOOL_CALLS]")} "[" object{more} "]"\n'
        return start + _alternatives("object", functions, '{"name": "', '", "arguments": ', "}")
    layout = _layout(form, mark)
    # without a closing tag, what ends a call is the beginning of the next one
    between = {"hermes": '"\\n"?', "mistral": '""'}.get(form, '";" " "?')
    more = f" ({between} call)*" if parallel else ""
    return f"start: call{more}\n" + _call(layout, functions)


def if_called_grammar(functions: Sequence[Function], *, mark: TokenMark) -> str:
    """For Hermes' tags: free text and calls in any order, but whatever follows the opening tag is a call."""
    layout, opening = _layout("hermes", mark), mark("<tool_call>")
    if opening.startswith("<"):  # a control token: no text can contain it
        free = f"free: /(?s:.*)/ {opening}\n"
    else:
        free = f"free[suffix={opening}]: /(?s:.*)/\n"
    text = f'start: part* rest\npart: free called {layout.closing}\n{free}rest: /(?s:.*)/\ncalled: "\\n"? fn\n'
    return text + _alternatives("fn", functions, '{"name": "', '", "arguments": ', "}")


def with_thoughts(grammar: str, *, starts_inside: bool, mark: TokenMark) -> str:
    """The same behind thoughts: `starts_inside` they have begun in the prompt, otherwise they may be there or not."""
    behind = re.sub(r"(?m)^start\s*:", "behind_thoughts:", grammar, count=1)
    closing = mark("</think>")
    if closing.startswith("<"):  # a control token: no text can contain it
        inside = f"inside_thoughts: /(?s:.*)/ {closing}\n"
    else:
        inside = f"inside_thoughts[suffix={closing}]: /(?s:.*)/\n"
    thoughts = "inside_thoughts" if starts_inside else f"({mark('<think>')} inside_thoughts)?"
    return f"start: {thoughts} /\\s*/ behind_thoughts\n{inside}{behind}"


def _layout(form: CallFormat, mark: TokenMark) -> _Form:
    if form == "hermes":
        opening, closing = f'{mark("<tool_call>")} "\\n"', f'"\\n" {mark("</tool_call>")}'
        return _Form(opening, '{"name": "', '", "arguments": ', closing, "}")
    if form == "mistral":
        return _Form(mark("[TOOL_CALLS]"), "", mark("[ARGS]"), "")
    return _Form("", '{"name": "', '", "parameters": ', "", "}")


def _call(layout: _Form, functions: Sequence[Function]) -> str:
    start = f"call: {layout.opening} fn {layout.closing}\n"
    if layout.before_name:
        return start + _alternatives("fn", functions, layout.before_name, layout.before_arguments, layout.end)
    names = " | ".join(f"fn_{number}" for number in range(len(functions)))
    rules = [
        f"fn_{number}: {json.dumps(function.name)} {layout.before_arguments} args_{number}"
        for number, function in enumerate(functions)
    ]
    return start + "\n".join([f"fn: {names}", *rules, *_arguments("fn", functions, "args")]) + "\n"


def _alternatives(rule: str, functions: Sequence[Function], before: str, between: str, after: str) -> str:
    names = " | ".join(f"{rule}_{number}" for number in range(len(functions)))
    rules = [
        f"{rule}_{number}: {json.dumps(before + function.name + between)} {rule}_args_{number} {json.dumps(after)}"
        for number, function in enumerate(functions)
    ]
    return "\n".join([f"{rule}: {names}", *rules, *_arguments(rule, functions, f"{rule}_args")]) + "\n"


def _arguments(rule: str, functions: Sequence[Function], name: str) -> list[str]:
    return [f"{name}_{number}: {json_rule(_schema(function))}" for number, function in enumerate(functions)]


def _schema(function: Function) -> dict[str, Any]:
    if function.is_strict and function.parameters:
        return dict(function.parameters)
    return {"type": "object"}
