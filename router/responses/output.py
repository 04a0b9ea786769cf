"""`output` of a response: items that grow, and the events that tell of it."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from tandem.router.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning

Event = dict[str, Any]


class Output:
    """Pieces in, events out (without sequence numbers). `items` is what there is so far, as the API shows it."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._text = ""
        """Of the item that is being written."""
        self._logprobs: list[dict[str, Any]] = []
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()
        """Of tokens that have made no piece yet: parts of a character, what may become a stop string or a call."""
        self._num_pieces = 0

    def push(self, pieces: Sequence[Piece], logprobs: Iterable[tuple[int, dict[str, Any]]] = ()) -> list[Event]:
        """`logprobs`: of the tokens that came with these pieces, each with the number of pieces before it. They are
        shown where the token's piece is text: those of thoughts and calls are nowhere in this API."""
        events: list[Event] = []
        self._waiting += logprobs
        for piece in pieces:
            told = self._told_of_next()
            match piece:
                case Content(text):
                    self._ensure("message", events)
                    self._write(text, told, events)
                case Reasoning(text):
                    self._ensure("reasoning", events)
                    self._grow("response.reasoning_text.delta", text, events, content_index=0)
                case CallStart(_, name):
                    self._close_item("completed", events)
                    self._open(_new_call(name), events)
                case CallArguments(_, text):
                    self._grow("response.function_call_arguments.delta", text, events)
        return events

    def close(self, status: str, events: list[Event]) -> None:
        """The end: the item that is being written, if any, is as long as it gets. Behind the last text come the tokens
        that made none, as the one that ended it."""
        told = self._told_of_next()
        if told and self._is_open("message"):
            self._write("", told, events)
        self._close_item(status, events)

    def _told_of_next(self) -> list[dict[str, Any]]:
        """The logprobs of the tokens that made the next piece."""
        told = []
        while self._waiting and self._waiting[0][0] <= self._num_pieces:
            told.append(self._waiting.popleft()[1])
        self._num_pieces += 1
        return told

    def _close_item(self, status: str, events: list[Event]) -> None:
        item = self.items[-1] if self.items else None
        if item is None or item["status"] != "in_progress":
            return
        where = self._where()
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = self._text
            done = {"type": "response.function_call_arguments.done", **where, "arguments": self._text}
            events.append(done)
        else:
            events += self._close_text(item, where)
        events.append({"type": "response.output_item.done", "output_index": where["output_index"], "item": dict(item)})

    def _close_text(self, item: dict[str, Any], where: dict[str, Any]) -> list[Event]:
        where = where | {"content_index": 0}
        part = self._part(item["type"])
        item["content"] = [part]
        if item["type"] == "reasoning":
            done: Event = {"type": "response.reasoning_text.done", **where, "text": self._text}
        else:
            done = {"type": "response.output_text.done", **where, "text": self._text, "logprobs": self._logprobs}
        return [done, {"type": "response.content_part.done", **where, "part": part}]

    def _ensure(self, kind: str, events: list[Event]) -> None:
        if self._is_open(kind):
            return
        self._close_item("completed", events)
        self._open(_new_message() if kind == "message" else _new_reasoning(), events)
        part = {"type": "response.content_part.added", **self._where(), "content_index": 0, "part": self._part(kind)}
        events.append(part)

    def _is_open(self, kind: str) -> bool:
        last = self.items[-1] if self.items else None
        return last is not None and last["type"] == kind and last["status"] == "in_progress"

    def _write(self, text: str, logprobs: list[dict[str, Any]], events: list[Event]) -> None:
        self._logprobs += logprobs
        self._grow("response.output_text.delta", text, events, content_index=0, logprobs=logprobs)

    def _open(self, item: dict[str, Any], events: list[Event]) -> None:
        self.items.append(item)
        self._text, self._logprobs = "", []
        index = len(self.items) - 1
        events.append({"type": "response.output_item.added", "output_index": index, "item": dict(item)})

    def _grow(self, event: str, text: str, events: list[Event], **more: Any) -> None:
        self._text += text
        events.append({"type": event, **self._where(), **more, "delta": text})

    def _where(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _part(self, kind: str) -> dict[str, Any]:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._logprobs)}


def _new_message() -> dict[str, Any]:
    name = "msg_" + secrets.token_hex(16)
    return {"id": name, "type": "message", "role": "assistant", "status": "in_progress", "content": []}


def _new_reasoning() -> dict[str, Any]:
    return {"id": "rs_" + secrets.token_hex(16), "type": "reasoning", "status": "in_progress", "summary": []}


def _new_call(name: str) -> dict[str, Any]:
    return {
        "id": "fc_" + secrets.token_hex(16),
        "type": "function_call",
        "status": "in_progress",
        "call_id": "call_" + secrets.token_hex(12),
        "name": name,
        "arguments": "",
    }
