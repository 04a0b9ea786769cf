"""The shapes of a response: whole, and as named events with sequence numbers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tandem.router.errors import ApiError
from tandem.router.events import named_event
from tandem.router.form import Naming, Usage, pieces_of
from tandem.router.openai.logprobs import chat_logprobs
from tandem.router.openai.messages import Message
from tandem.router.output import Answer, Delta
from tandem.router.parsers.pieces import Content, Piece
from tandem.router.plan import Plan
from tandem.router.responses.items import FunctionCall, InputMessage, ReasoningItem, as_messages
from tandem.router.responses.output import Event, Output
from tandem.router.tokenizer import Tokenizer
from tandem.workers.types import TokenLogprobs

if TYPE_CHECKING:
    from tandem.router.responses.wire import AskedResponse


class ResponseForm:
    """See `form.Form`. A response that is to be stored is, however it ends."""

    is_pure = False

    def __init__(self, asked: AskedResponse, plan: Plan, tokenizer: Tokenizer, naming: Naming) -> None:
        self._asked = asked
        self._plan = plan
        self._tokenizer = tokenizer
        self._naming = naming
        self._id = f"resp_{naming.unique_id}"
        self._output = Output()
        self._numbers = itertools.count()
        self._is_over = False
        if asked.request.store is not False:
            asked.store.begin(self._id, asked.caller, lambda: self._response("in_progress"), naming.cancel)

    def take_prompt(self, position: int, scored: Sequence[TokenLogprobs]) -> None:
        """This API shows nothing of the kind."""

    def begin(self) -> bytes:
        response = self._response("in_progress")
        return self._events(
            [
                {"type": "response.created", "response": response},
                {"type": "response.in_progress", "response": response},
            ]
        )

    def show(self, index: int, answer: Answer, delta: Delta) -> bytes:
        return self._events(self._output.push(self._pieces(delta), self._logprobs(delta)))

    def show_text(self, index: int, text: str) -> bytes:
        return self._events(self._output.push([Content(text)])) if text else b""

    def end(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        events: list[Event] = []
        response = self._finished(answers[0], usage, events)
        events.append({"type": f"response.{response['status']}", "response": response})
        return self._events(events)

    def fail(self, error: ApiError) -> bytes:
        is_cancelled = error.code == "response_cancelled"
        events: list[Event] = []
        self._output.close("incomplete", events)
        response = self._response("cancelled" if is_cancelled else "failed")
        if not is_cancelled:
            code = error.code if error.code == "rate_limit_exceeded" else "server_error"
            response["error"] = {"code": code, "message": error.message}
        self._store(response)
        # the API has no event of its own for a response that was cancelled
        kind = "response.incomplete" if is_cancelled else "response.failed"
        return self._events([*events, {"type": kind, "response": response}])

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Mapping[str, Any]:
        total = answers[0].total
        self._output.push(self._pieces(total), self._logprobs(total))
        return self._finished(answers[0], usage, [])

    def _pieces(self, delta: Delta) -> Sequence[Piece]:
        return pieces_of(delta, self._plan.showing.reading)

    def _logprobs(self, delta: Delta) -> Iterable[tuple[int, dict[str, Any]]]:
        """With the number of pieces before each token, as `Output.push` takes them."""
        if not self._asked.request.shows_logprobs:
            return ()
        content = chat_logprobs(self._tokenizer, delta.scored)["content"]
        return zip([token.num_pieces for token in delta.scored], content, strict=True)

    def _finished(self, answer: Answer, usage: Usage, events: list[Event]) -> dict[str, Any]:
        is_whole = answer.total.finish_reason == "stop"
        self._output.close("completed" if is_whole else "incomplete", events)
        response = self._response("completed" if is_whole else "incomplete")
        if is_whole:
            response["completed_at"] = int(time.time())
        else:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {
                "cached_tokens": usage.num_cached,
                "cache_write_tokens": usage.num_prompt - usage.num_cached,
            },
            "output_tokens": usage.num_completion,
            "output_tokens_details": {"reasoning_tokens": usage.num_reasoning},
            "total_tokens": usage.num_prompt + usage.num_completion,
        }
        self._store(response)
        return response

    def _store(self, response: Mapping[str, Any]) -> None:
        """As it ended first: who leaves while the end is being sent, leaves a response that is whole."""
        asked = self._asked
        if not self._is_over and asked.request.store is not False:
            messages = (*asked.messages, *_answer_messages(self._output.items))
            asked.store.put(self._id, asked.caller, response, messages)
        self._is_over = True

    def _response(self, status: str) -> dict[str, Any]:
        request = self._asked.request
        given = request.model_dump(mode="json", by_alias=True)
        text = given["text"] or {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._naming.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._naming.model,
            "output": [dict(item) for item in self._output.items],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": given["reasoning"] and given["reasoning"]["effort"], "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "temperature": self._plan.sampling.temperature,
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": given["tool_choice"] or "auto",
            "tools": given["tools"] or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }

    def _events(self, events: Iterable[Event]) -> bytes:
        return b"".join([named_event({**event, "sequence_number": next(self._numbers)}) for event in events])


def _answer_messages(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """What the model said, for the next turn. A call that was cut short is no call."""
    whole = [item for item in items if item["status"] == "completed" or item["type"] == "message"]
    told = [item for item in whole if item["type"] == "function_call" or item.get("content")]
    return as_messages([_as_input(item) for item in told]) if told else []


def _as_input(item: Mapping[str, Any]) -> InputMessage | FunctionCall | ReasoningItem:
    match item["type"]:
        case "message":
            return InputMessage.model_validate(item)
        case "function_call":
            return FunctionCall.model_validate(item)
        case _:
            return ReasoningItem.model_validate(item)
