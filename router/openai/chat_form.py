"""The shapes of a chat completion: whole, and in chunks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tandem.router.errors import ApiError
from tandem.router.form import Naming, Usage, pieces_of
from tandem.router.openai import sse
from tandem.router.openai.logprobs import chat_logprobs, prompt_logprobs
from tandem.router.output import Answer, Delta
from tandem.router.parsers.pieces import CallArguments, CallStart, Content, Message, Piece, Reasoning
from tandem.router.plan import Plan
from tandem.router.tokenizer import Tokenizer
from tandem.workers.types import TokenLogprobs


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


def chat_finish_reason(answer: Answer) -> str | None:
    """An answer that was cut short is that, whatever it holds."""
    reason = answer.total.finish_reason
    return "tool_calls" if reason == "stop" and answer.has_calls else reason


class ChatForm:
    """See `form.Form`."""

    is_pure = True

    def __init__(self, plan: Plan, tokenizer: Tokenizer, naming: Naming) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._naming = naming
        self._envelope = {"id": f"chatcmpl-{naming.unique_id}", "created": naming.created, "model": naming.model}
        self._writer = sse.ChunkWriter(
            {**self._envelope, "object": "chat.completion.chunk"}, shows_usage=plan.include_usage
        )
        self._unopened = set(range(plan.num_choices)) if plan.scores_prompts else set()
        """Choices whose first chunk waits for the logprobs of the prompt."""
        self._prompt_logprobs: msgspec.Raw | None = None
        """Where they are shown."""
        self._text_chunks: Sequence[Callable[[str], bytes]] | None = None
        """By choice; made when the first is asked for, since most of a client's time it waits."""

    def take_prompt(self, position: int, scored: Sequence[TokenLogprobs]) -> None:
        if self._plan.shows_prompt_logprobs:
            self._prompt_logprobs = prompt_logprobs(self._tokenizer, self._plan.prompts[position], scored)

    def begin(self) -> bytes:
        """The first chunk of each choice carries the role."""
        if self._unopened:
            return b""
        extras = self._extras()
        return b"".join([self._opening(index, extras) for index in range(self._plan.num_choices)])

    def _opening(self, index: int, extras: Mapping[str, Any]) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._writer.chunk(choice, extras)

    def show(self, index: int, answer: Answer, delta: Delta) -> bytes:
        """Chunks of text carry no finish reason, and the one with the finish reason carries no text."""
        if index in self._unopened:
            self._unopened.discard(index)
            opening = self._opening(index, self._extras() | self._scored_prompt())
            return opening + self.show(index, answer, delta)
        told = self._told(delta)
        if not told and (delta.scored or (self._plan.return_token_ids and delta.token_ids)):
            told = [{"content": ""}]
        # what belongs to tokens goes with the first of the chunks that they make
        chunks = [
            self._chunk(index, each, delta if position == 0 else None, None) for position, each in enumerate(told)
        ]
        if delta.finish_reason is not None:
            chunks.append(self._chunk(index, {}, None, chat_finish_reason(answer)))
        return b"".join(chunks)

    def show_text(self, index: int, text: str) -> bytes:
        if not text:
            return b""
        if self._text_chunks is None:
            choices = [
                {"index": number, "delta": {"content": sse.TEXT}, "logprobs": None, "finish_reason": None}
                for number in range(self._plan.num_choices)
            ]
            self._text_chunks = [self._writer.text_chunk(choice) for choice in choices]
        return self._text_chunks[index](text)

    def _told(self, delta: Delta) -> list[dict[str, Any]]:
        return [_piece(piece) for piece in pieces_of(delta, self._plan.showing.reading)]

    def _chunk(self, index: int, told: dict[str, Any], delta: Delta | None, finish_reason: str | None) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": told, "logprobs": None, "finish_reason": finish_reason}
        if delta is not None and delta.scored:
            choice["logprobs"] = chat_logprobs(self._tokenizer, delta.scored)
        if self._plan.return_token_ids:
            choice["token_ids"] = [] if delta is None else delta.token_ids
        return self._writer.chunk(choice)

    def end(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        last = self._writer.usage(usage.for_openai()) if self._plan.include_usage else b""
        return last + sse.DONE

    def fail(self, error: ApiError) -> bytes:
        return sse.error(error)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Mapping[str, Any]:
        return {
            **self._envelope,
            "object": "chat.completion",
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": usage.for_openai(),
            **self._extras(),
            **self._scored_prompt(),
        }

    def _scored_prompt(self) -> dict[str, Any]:
        return {} if self._prompt_logprobs is None else {"prompt_logprobs": self._prompt_logprobs}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": self._message(answer),
            "logprobs": None,
            "finish_reason": chat_finish_reason(answer),
        }
        if self._plan.sampling.num_logprobs is not None:
            choice["logprobs"] = chat_logprobs(self._tokenizer, answer.total.scored)
        if self._plan.return_token_ids:
            choice["token_ids"] = answer.total.token_ids
        return choice

    def _message(self, answer: Answer) -> dict[str, Any]:
        read = Message.of(pieces_of(answer.total, self._plan.showing.reading))
        content = None if read.calls and not read.content else read.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if read.reasoning:
            message["reasoning_content"] = read.reasoning
        if read.calls:
            message["tool_calls"] = [
                {
                    "id": new_call_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in read.calls
            ]
        return message

    def _extras(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._plan.prompts[0])} if self._plan.return_token_ids else {}


def _piece(piece: Piece) -> dict[str, Any]:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": new_call_id(), "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
