"""Calls as JSON objects between tags, as Hermes and Qwen write them:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Bern"}}
</tool_call>
"""

from __future__ import annotations

from tandem.router.parsers.holdback import held_space, split_at
from tandem.router.parsers.json_call import JsonCall
from tandem.router.parsers.pieces import CallArguments, CallStart, Content, Piece

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class CallWriter:
    """Turns a `JsonCall` that is being read into pieces."""

    def __init__(self, index: int) -> None:
        self.call = JsonCall()
        self.index = index
        self.has_started = False

    def push(self, text: str, pieces: list[Piece]) -> str:
        """Returns what follows the call's object."""
        rest = self.call.push(text)
        if self.call.name is not None and not self.has_started:
            self.has_started = True
            pieces.append(CallStart(self.index, self.call.name))
        arguments = self.call.take()
        if arguments:
            pieces.append(CallArguments(self.index, arguments))
        return rest


class TaggedReader:
    """See the module."""

    is_reasoning = False

    def __init__(self) -> None:
        self._held = ""
        self._writer: CallWriter | None = None
        self._num_calls = 0

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._read_some(pieces):
            pass
        return pieces

    def _read_some(self, pieces: list[Piece]) -> bool:
        """Read up to the next border. True if there may be more behind it."""
        if self._writer is None:
            return self._read_text(pieces)
        if not self._writer.call.is_complete:
            if not self._writer.call.raw:
                self._held = self._held.lstrip()
            self._held = self._writer.push(self._held, pieces)
            return self._writer.call.is_complete
        _, self._held, is_closed = split_at(self._held, CLOSING)
        if is_closed:
            self._end_call(pieces)
        return is_closed

    def _read_text(self, pieces: list[Piece]) -> bool:
        before, after, is_found = split_at(self._held, OPENING)
        if is_found:
            if before.strip():
                pieces.append(Content(before.rstrip()))
            self._held = after
            self._writer = CallWriter(self._num_calls)
            return True
        shown, space = held_space(before)
        self._held = space + after
        if shown:
            pieces.append(Content(shown))
        return False

    def _end_call(self, pieces: list[Piece]) -> None:
        assert self._writer is not None
        if self._writer.has_started:
            self._num_calls += 1
        else:
            # no call after all: the client sees what the model wrote
            pieces.append(Content(f"{OPENING}{self._writer.call.raw}{CLOSING}"))
        self._writer = None

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._writer is None:
            # white space at the end is shown, unless it follows a call
            return [Content(held)] if held and (held.strip() or self._num_calls == 0) else []
        if self._writer.has_started:
            return []
        return [Content(f"{OPENING}{self._writer.call.raw}{held}")]
