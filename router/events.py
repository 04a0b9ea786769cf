"""Server-sent events as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.router.http import encode_json

# Characters at which some clients split lines, although JSON allows them in strings
_LINE_BREAKS = (
    ("\u0085".encode(), b"\\u0085"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
)


def on_one_line(content: bytes) -> bytes:
    """JSON without anything that may be taken for the end of a line."""
    if content.isascii():
        return content
    for character, escaped in _LINE_BREAKS:
        content = content.replace(character, escaped)
    return content


def data_event(body: Mapping[str, Any]) -> bytes:
    """An event without a name."""
    return b"data: " + on_one_line(encode_json(body)) + b"\n\n"


def named_event(body: Mapping[str, Any]) -> bytes:
    """An event with the name that its body's `type` says."""
    return b"event: " + str(body["type"]).encode() + b"\n" + data_event(body)
