"""Calls behind Mistral's mark, in both of its forms:

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Bern"}}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}          (the mark once per call)
"""

from __future__ import annotations

from tandem.router.parsers.holdback import held_space, split_at
from tandem.router.parsers.json_call import JsonScanner
from tandem.router.parsers.pieces import CallArguments, CallStart, Content, Piece
from tandem.router.parsers.tagged import CallWriter

MARK, ARGUMENTS_MARK, ID_MARK = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_BETWEEN = " \t\r\n,"


class MistralReader:
    """See the module."""

    is_reasoning = False

    def __init__(self) -> None:
        self._held = ""
        self._num_calls = 0
        self._read = self._text
        self._writer: CallWriter | None = None
        self._scanner = JsonScanner()

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._read(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._read == self._text:
            return [Content(held)] if held and (held.strip() or self._num_calls == 0) else []
        if self._read in (self._form, self._name):
            return [Content(MARK + held)]
        return []

    # Each reads up to the next border, and returns True if there may be more behind it

    def _text(self, pieces: list[Piece]) -> bool:
        before, after, is_found = split_at(self._held, MARK)
        if is_found:
            if before.strip():
                pieces.append(Content(before.rstrip()))
            self._held, self._read = after, self._form
            return True
        shown, space = held_space(before)
        self._held = space + after
        if shown:
            pieces.append(Content(shown))
        return False

    def _form(self, pieces: list[Piece]) -> bool:
        self._held = self._held.lstrip()
        if not self._held:
            return False
        if self._held[0] == "[":
            self._held, self._read = self._held[1:], self._between
        else:
            self._read = self._name
        return True

    def _between(self, pieces: list[Piece]) -> bool:
        self._held = self._held.lstrip(_BETWEEN)
        if not self._held:
            return False
        if self._held[0] == "{":
            self._writer, self._read = CallWriter(self._num_calls), self._object
        else:
            self._held, self._read = self._held.removeprefix("]"), self._text
        return True

    def _object(self, pieces: list[Piece]) -> bool:
        assert self._writer is not None
        self._held = self._writer.push(self._held, pieces)
        if not self._writer.call.is_complete:
            return False
        if self._writer.has_started:
            self._num_calls += 1
        else:
            pieces.append(Content(self._writer.call.raw))
        self._read = self._between
        return True

    def _name(self, pieces: list[Piece]) -> bool:
        before, _, is_found = split_at(self._held, ARGUMENTS_MARK)
        if not is_found:
            return False
        self._held = self._held[len(before) + len(ARGUMENTS_MARK) :].lstrip()
        pieces.append(CallStart(self._num_calls, before.partition(ID_MARK)[0].strip()))
        self._scanner, self._read = JsonScanner(), self._arguments
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        for position, character in enumerate(self._held):
            self._scanner.push(character)
            if self._scanner.depth <= 0 and not self._scanner.is_in_string:
                pieces.append(CallArguments(self._num_calls, self._held[: position + 1]))
                self._num_calls += 1
                self._held, self._read = self._held[position + 1 :], self._text
                return True
        if self._held:
            pieces.append(CallArguments(self._num_calls, self._held))
            self._held = ""
        return False
