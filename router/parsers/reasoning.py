"""Thoughts between `<think>` and `</think>` at the start of an answer."""

from __future__ import annotations

from tandem.router.parsers.holdback import split_at
from tandem.router.parsers.pieces import Content, Piece, Reader, Reasoning

OPENING, CLOSING = "<think>", "</think>"


class ReasoningReader:
    """Splits off the thoughts and leaves the rest to another reader (or shows it as it is).

    `starts_inside`: the prompt already ended with the opening tag, as many templates have it.
    """

    def __init__(self, rest: Reader | None, *, starts_inside: bool) -> None:
        self._rest = rest
        self._state = "inside" if starts_inside else "before"
        self._held = ""

    @property
    def is_reasoning(self) -> bool:
        return self._state == "inside"

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        if self._state == "before":
            self._look_for_opening()
        if self._state == "inside":
            pieces += self._think()
        if self._state == "after":
            # the blank lines between the thoughts and the answer belong to neither
            self._held = self._held.lstrip()
            if self._held:
                self._state = "rest"
        if self._state == "rest":
            held, self._held = self._held, ""
            pieces += self._show(held)
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._state == "inside":
            return [Reasoning(held)] if held else []
        pieces = self._show(held) if self._state == "before" else []
        return pieces + ([] if self._rest is None else self._rest.finish())

    def _look_for_opening(self) -> None:
        start = self._held.lstrip()
        if start.startswith(OPENING):
            self._held = start[len(OPENING) :]
            self._state = "inside"
        elif not OPENING.startswith(start):
            self._state = "rest"

    def _think(self) -> list[Piece]:
        thought, self._held, is_over = split_at(self._held, CLOSING)
        if is_over:
            self._state = "after"
        return [Reasoning(thought)] if thought else []

    def _show(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [Content(text)] if self._rest is None else self._rest.push(text)
