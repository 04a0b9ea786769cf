"""Calls as bare JSON objects from the first character on, as Llama 3 writes them, several divided by `;`:

    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Bern"}}

The tag may be missing. An object that turns out to be no call is shown as text, and so is all that follows it.
"""

from __future__ import annotations

from tandem.router.parsers.pieces import Content, Piece
from tandem.router.parsers.tagged import CallWriter

MARK = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"


class BareJsonReader:
    """See the module."""

    is_reasoning = False

    def __init__(self) -> None:
        self._held = ""
        self._writer: CallWriter | None = None
        self._num_calls = 0
        self._is_text = False

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._held += text
        while not self._is_text and self._read_some(pieces):
            pass
        if self._is_text and self._held:
            pieces.append(Content(self._held))
            self._held = ""
        return pieces

    def _read_some(self, pieces: list[Piece]) -> bool:
        if self._writer is not None:
            self._held = self._writer.push(self._held, pieces)
            if not self._writer.call.is_complete:
                return False
            if self._writer.has_started:
                self._num_calls += 1
            else:
                self._held = self._writer.call.raw + self._held
                self._is_text = True
            self._writer = None
            return True
        start = self._held.lstrip(_BETWEEN if self._num_calls else " \t\r\n").removeprefix(MARK).lstrip()
        if start.startswith("{"):
            self._held, self._writer = start, CallWriter(self._num_calls)
            return True
        if not MARK.startswith(start):  # "" too is the start of something
            self._is_text = True
        return False

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._writer is not None:
            return [] if self._writer.has_started else [Content(self._writer.call.raw)]
        return [Content(held)] if held and self._num_calls == 0 else []
