"""Calls as a list of Python calls, as Llama 3.2 and 4 write them: `[get_weather(city="Bern"), now()]`.

Only literals are understood; nothing is evaluated. Python's values become JSON, so a call is shown when it is whole.
"""

from __future__ import annotations

import ast
import json

from tandem.router.parsers.pieces import CallArguments, CallStart, Content, Piece

MAX_LIST_CHARACTERS = 1 << 16
MARK = "<|python_tag|>"


class PythonicReader:
    """See the module."""

    is_reasoning = False

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> list[Piece]:
        self._held += text
        if not self._is_text:
            start = self._held.lstrip().removeprefix(MARK).lstrip()
            could_be_calls = start.startswith("[") or MARK.startswith(start)
            self._is_text = not could_be_calls or len(start) > MAX_LIST_CHARACTERS
        if not self._is_text:
            return []
        held, self._held = self._held, ""
        return [Content(held)] if held else []

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        calls = None if self._is_text else _calls(held.strip().removeprefix(MARK).strip())
        if not calls:
            return [Content(held)] if held else []
        pieces: list[Piece] = []
        for index, (name, arguments) in enumerate(calls):
            pieces += [CallStart(index, name), CallArguments(index, arguments)]
        return pieces


def _calls(text: str) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON) of each call; None if the text is something else."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not all(isinstance(each, ast.Call) for each in tree.elts):
            return None
        return [_call(each) for each in tree.elts if isinstance(each, ast.Call)]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None  # not Python, or not literals


def _call(call: ast.Call) -> tuple[str, str]:
    name = ast.unparse(call.func)
    if call.args or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError("arguments must be named")
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    return name, json.dumps(arguments, ensure_ascii=False)
