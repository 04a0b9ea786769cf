"""Stop strings over text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through up to the first stop string, holding back what may yet turn out to be the start of one.

    The stop string that is completed first (character by character) wins, so the cut does not depend on the pieces.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._includes_stop = includes_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that was completed."""
        if not self._stops:
            return text, None
        text = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            end, start = min(matches)
            self._held = ""
            return text[: end if self._includes_stop else start], text[start:end]
        keep = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """What was held back and is now known to belong to the answer."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, short of the whole of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
