"""The messages of a chat, as the API has them and as chat templates want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from tandem.router.errors import bad_request
from tandem.router.openai.wire import WireModel

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class TextPart(WireModel):
    type: Literal["text"]
    text: str


class RefusalPart(WireModel):
    type: Literal["refusal"]
    refusal: str


class CalledFunction(WireModel):
    name: FunctionName
    arguments: str


class ToolCall(WireModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


Parts = Annotated[list[TextPart], Field(min_length=1)]


class Message(WireModel):
    """One message. Fields for other media may be null, as they are in answers that clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | Annotated[list[TextPart | RefusalPart], Field(min_length=1)] | None = None
    name: Annotated[str, Field(max_length=64)] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


def for_template(messages: Sequence[Message], names: frozenset[str]) -> list[dict[str, Any]]:
    """The messages as dictionaries. `names`: what the template can show at all. Raises `ApiError` for what would be
    lost."""
    return [_as_dict(message, f"messages[{number}]", names) for number, message in enumerate(messages)]


def _as_dict(message: Message, place: str, names: frozenset[str]) -> dict[str, Any]:
    _check(message, place, names)
    # "developer" is the newer name of the same thing, and templates know the older one
    role = "system" if message.role == "developer" else message.role
    told: dict[str, Any] = {"role": role, "content": _text(message)}
    if message.name is not None:
        told["name"] = message.name
    if message.tool_call_id is not None:
        told["tool_call_id"] = message.tool_call_id
    thoughts = message.reasoning_content or message.reasoning
    if thoughts:
        # a template that does not show them drops them on purpose: models do not read their old thoughts
        told["reasoning_content"] = thoughts
    if message.tool_calls:
        told["tool_calls"] = [
            _call(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls)
        ]
    return told


def _check(message: Message, place: str, names: frozenset[str]) -> None:
    role = message.role
    if message.content is None and not (role == "assistant" and (message.tool_calls or message.refusal)):
        raise bad_request(
            f"Missing required parameter: '{place}.content'.",
            param=f"{place}.content",
            code="missing_required_parameter",
        )
    for field in ("tool_calls", "refusal", "reasoning_content", "reasoning"):
        if role != "assistant" and getattr(message, field):
            raise bad_request(f"Only assistants' messages have '{field}'.", param=f"{place}.{field}")
    if (role == "tool") != (message.tool_call_id is not None):
        text = "is required in" if role == "tool" else "belongs to"
        raise bad_request(f"'tool_call_id' {text} messages of the role 'tool'.", param=f"{place}.tool_call_id")
    if message.name is not None and role != "tool" and "name" not in names:
        raise bad_request("This model's chat template does not show names.", param=f"{place}.name")


def _text(message: Message) -> str:
    if message.content is None:
        return message.refusal or ""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in message.content)


def _call(call: ToolCall, place: str) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves, so they get the object."""
    try:
        # refuses NaN, lone surrogates, and nesting that would be too deep for a template
        arguments = from_json(call.function.arguments or "{}", allow_inf_nan=False)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        param = f"{place}.function.arguments"
        raise bad_request(f"'{param}' must hold a JSON object.", param=param)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
