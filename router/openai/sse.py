"""Chunks of chat and completions as server-sent events. What all chunks of a stream share is encoded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tandem.router.errors import ApiError
from tandem.router.events import data_event, on_one_line
from tandem.router.http import encode_json

DONE = b"data: [DONE]\n\n"
TEXT = "\x00text"
"""A text that nothing else in a chunk can hold: JSON writes its first character in six others."""


def error(problem: ApiError) -> bytes:
    """The end of a stream that broke."""
    return data_event(problem.body()) + DONE


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

    def text_chunk(self, choice: Mapping[str, Any]) -> Callable[[str], bytes]:
        """A function from a text to the chunk of this choice with the text in the place of `TEXT`. Text is all that
        differs from one chunk to the next, mostly: the rest is encoded once."""
        before, after = self.chunk(choice).split(encode_json(TEXT))

        def chunk(text: str) -> bytes:
            content = encode_json(text)
            if not content.isascii():
                content = on_one_line(content)
            return before + content + after

        return chunk

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The last chunk: no choices, only the bill."""
        return self._before + b'],"usage":' + encode_json(usage) + b"}\n\n"
