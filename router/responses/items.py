"""`input` of the Responses API: items that become the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from tandem.router.openai.messages import CalledFunction, FunctionName, Message, TextPart, ToolCall
from tandem.router.openai.wire import WireModel

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(WireModel):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None
    """In answers that clients send back; what was likely once tells the model nothing."""


class InputRefusal(WireModel):
    type: Literal["refusal"]
    refusal: str


Content = str | Annotated[list[InputText | InputRefusal], Field(min_length=1)]


class InputMessage(WireModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class FunctionCall(WireModel):
    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: None = None
    namespace: None = None


class FunctionCallOutput(WireModel):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: Status | None = None
    caller: None = None


class ReasoningText(WireModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(WireModel):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: None = None
    status: Status | None = None


def _kind(item: Any) -> str:
    """Messages may come without a type."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return kind if isinstance(kind, str) else "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]
Input = str | Annotated[list[Item], Field(min_length=1, max_length=4096)]


def as_messages(given: Input) -> list[Message]:
    """A model's thoughts, words and calls are several items, and one message."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    messages: list[Message] = []
    thoughts = ""
    for item in given:
        match item:
            case ReasoningItem():
                thoughts += "".join(part.text for part in item.content or ())
            case FunctionCall():
                _add_call(messages, item, thoughts)
                thoughts = ""
            case FunctionCallOutput():
                messages.append(Message(role="tool", content=_text(item.output), tool_call_id=item.call_id))
            case InputMessage():
                is_answer = item.role == "assistant" and thoughts
                messages.append(
                    Message(
                        role=item.role,
                        content=_text(item.content),
                        reasoning_content=thoughts if is_answer else None,
                    )
                )
                thoughts = ""
    return messages


def _add_call(messages: list[Message], item: FunctionCall, thoughts: str) -> None:
    call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
    if messages and messages[-1].role == "assistant":
        last = messages[-1]
        messages[-1] = last.model_copy(update={"tool_calls": [*(last.tool_calls or ()), call]})
    else:
        messages.append(Message(role="assistant", tool_calls=[call], reasoning_content=thoughts or None))


def _text(content: Content) -> str | list[TextPart]:
    if isinstance(content, str):
        return content
    texts: Sequence[str] = [part.text if isinstance(part, InputText) else part.refusal for part in content]
    return [TextPart(type="text", text=text) for text in texts]
