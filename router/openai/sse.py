"""Server-sent events as bytes. What all chunks of a stream share is encoded once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.router.errors import ApiError
from tandem.router.http import Header, encode_json

HEADERS: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx would collect the tokens
]
DONE = b"data: [DONE]\n\n"

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


def error(problem: ApiError) -> bytes:
    return b"data: " + on_one_line(encode_json(problem.body())) + b"\n\n"


class ChunkWriter:
    """Chunks of one stream, each `data: {"id": ..., "choices": [one choice]}`."""

    def __init__(self, envelope: Mapping[str, Any], *, shows_usage: bool) -> None:
        self._before = b"data: " + on_one_line(encode_json(envelope))[:-1] + b',"choices":['
        # with include_usage every chunk has the field, and all but the last have it null
        self._after = b'],"usage":null}\n\n' if shows_usage else b"]}\n\n"

    def chunk(self, choice: Mapping[str, Any], extras: Mapping[str, Any] | None = None) -> bytes:
        content = self._before + on_one_line(encode_json(choice))
        if extras:
            return content + b"]," + encode_json(extras)[1:-1] + self._after[1:]
        return content + self._after

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The last chunk: no choices, only the bill."""
        return self._before + b'],"usage":' + encode_json(usage) + b"}\n\n"
