"""Looking for a mark in text that arrives in portions."""

from __future__ import annotations


def split_at(text: str, mark: str) -> tuple[str, str, bool]:
    """(before, after, found). Not found: `after` is the end of the text that may be the start of the mark."""
    at = text.find(mark)
    if at >= 0:
        return text[:at], text[at + len(mark) :], True
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return text[:-length], text[-length:], False
    return text, "", False


def held_space(text: str) -> tuple[str, str]:
    """The text, and the white space at its end: before a call of a tool it means nothing."""
    kept = text.rstrip()
    return kept, text[len(kept) :]
