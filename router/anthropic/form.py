"""The shapes of a message: whole, and as named events around content blocks."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.router.anthropic.errors import error_body
from tandem.router.errors import ApiError
from tandem.router.events import named_event
from tandem.router.form import Naming, Usage, pieces_of
from tandem.router.output import Answer, Delta
from tandem.router.parsers.pieces import CallArguments, CallStart, Content, Message, Piece, Reasoning
from tandem.router.plan import Plan
from tandem.workers.types import TokenLogprobs


class MessageForm:
    """See `form.Form`."""

    is_pure = True

    def __init__(self, plan: Plan, naming: Naming) -> None:
        self._plan = plan
        self._naming = naming
        self._num_blocks = 0
        self._open: str | None = None
        """The type of the block that is being written."""

    def take_prompt(self, position: int, scored: Sequence[TokenLogprobs]) -> None:
        """This API shows nothing of the kind."""

    def begin(self) -> bytes:
        usage = _usage(Usage(sum(map(len, self._plan.prompts)), 0, 0, 0))
        return named_event({"type": "message_start", "message": self._message([], None, None, usage)})

    def show(self, index: int, answer: Answer, delta: Delta) -> bytes:
        return b"".join([self._piece(piece) for piece in self._pieces(delta)])

    def show_text(self, index: int, text: str) -> bytes:
        return self._piece(Content(text)) if text else b""

    def end(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        answer = answers[0]
        delta = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop_string}
        return (
            self._close()
            + named_event({"type": "message_delta", "delta": delta, "usage": _usage(usage)})
            + named_event({"type": "message_stop"})
        )

    def fail(self, error: ApiError) -> bytes:
        return named_event(error_body(error))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Mapping[str, Any]:
        answer = answers[0]
        read = Message.of(self._pieces(answer.total))
        blocks: list[dict[str, Any]] = []
        if read.reasoning:
            blocks.append({"type": "thinking", "thinking": read.reasoning, "signature": ""})
        if read.content or not (read.calls or blocks):
            blocks.append({"type": "text", "text": read.content})
        blocks += [{**_tool_use(call.name), "input": _parsed(call.arguments)} for call in read.calls]
        return self._message(blocks, _stop_reason(answer), answer.stop_string, _usage(usage))

    def _pieces(self, delta: Delta) -> Sequence[Piece]:
        return pieces_of(delta, self._plan.showing.reading)

    def _piece(self, piece: Piece) -> bytes:
        match piece:
            case Content(text):
                start = self._ensure("text", {"type": "text", "text": ""})
                return start + self._delta({"type": "text_delta", "text": text})
            case Reasoning(text):
                start = self._ensure("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return start + self._delta({"type": "thinking_delta", "thinking": text})
            case CallStart(_, name):
                return self._close() + self._begin("tool_use", _tool_use(name))
            case CallArguments(_, text):
                return self._delta({"type": "input_json_delta", "partial_json": text})

    def _ensure(self, kind: str, block: Mapping[str, Any]) -> bytes:
        return b"" if self._open == kind else self._close() + self._begin(kind, block)

    def _begin(self, kind: str, block: Mapping[str, Any]) -> bytes:
        self._open = kind
        return named_event({"type": "content_block_start", "index": self._num_blocks, "content_block": block})

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._num_blocks, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._num_blocks += 1
        return named_event({"type": "content_block_stop", "index": self._num_blocks - 1})

    def _message(
        self, blocks: list[dict[str, Any]], stop_reason: str | None, stop_sequence: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self._naming.unique_id}",
            "type": "message",
            "role": "assistant",
            "model": self._naming.model,
            "content": blocks,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }


def _tool_use(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": "toolu_" + secrets.token_hex(12), "name": name, "input": {}}


def _parsed(arguments: str) -> Any:
    """A call that was cut short has no arguments that could be parsed."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _stop_reason(answer: Answer) -> str | None:
    if answer.total.finish_reason == "length":
        return "max_tokens"
    if answer.has_calls:
        return "tool_use"
    return "stop_sequence" if answer.stop_string is not None else "end_turn"


def _usage(usage: Usage) -> dict[str, Any]:
    """What was cached is not counted as input in this API."""
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_read_input_tokens": usage.num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.num_completion,
    }
