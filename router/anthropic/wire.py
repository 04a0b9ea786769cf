"""POST /v1/messages: what it takes, and what that comes down to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.router.anthropic.form import MessageForm
from tandem.router.config import GatewayConfig
from tandem.router.errors import ApiError, bad_request, renamed
from tandem.router.form import Form, Naming
from tandem.router.openai.chat import ChatCompletionRequest
from tandem.router.openai.fields import INT64_MAX, StopString
from tandem.router.openai.messages import CalledFunction, FunctionName, Message, TextPart, ToolCall
from tandem.router.openai.tool_fields import MAX_TOOLS, FunctionDescription, NamedFunction, NamedTool, Tool
from tandem.router.openai.wire import WireModel, parse_body
from tandem.router.plan import Plan
from tandem.router.prompt import read_question
from tandem.router.tokenizer import Tokenizer

UNSUPPORTED: dict[str, Sequence[Any]] = {
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_config": (),
    "output_format": (),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
}
"""Fields of the API that are not served, with the values that ask for nothing."""
RENAMED = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences"}


class CacheControl(WireModel):
    """A wish about caching. Prompts are cached here without being asked."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(WireModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(WireModel):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(WireModel):
    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(WireModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class InputMessage(WireModel):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(min_length=1)]


class CustomTool(WireModel):
    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AnyChoice(WireModel):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class ToolChoice(WireModel):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class ThinkingDisabled(WireModel):
    type: Literal["disabled"]


class RequestMetadata(WireModel):
    user_id: Annotated[str, Field(max_length=256)] | None = None


class CountedFields(WireModel):
    """What a prompt consists of: all that POST /v1/messages/count_tokens takes."""

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=4096)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[AnyChoice | ToolChoice, Field(discriminator="type")] | None = None
    thinking: ThinkingDisabled | None = None
    cache_control: CacheControl | None = None

    def chat(self, **more: Any) -> ChatCompletionRequest:
        """The same question as a chat."""
        messages = [] if self.system is None else [Message(role="system", content=_joined(self.system))]
        for message in self.messages:
            messages += _messages(message)
        choice = self.tool_choice
        given: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "tools": [_tool(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": None if choice is None else _choice(choice),
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            # an answer that is begun is gone on with
            "continue_final_message": True if messages[-1].role == "assistant" else None,
            **more,
        }
        return ChatCompletionRequest.of(given)


class MessageRequest(CountedFields):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    # what follows changes no answer, by the API's own words
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def plan(self, tokenizer: Tokenizer, config: GatewayConfig) -> Plan:
        """Raises `ApiError`, with fields named as in this API."""
        chat = self.chat(
            max_completion_tokens=self.max_tokens,
            stream=self.stream,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )
        # sixteen are allowed here, four there
        chat = chat.model_copy(update={"stop": self.stop_sequences})
        try:
            return chat.plan(tokenizer, config)
        except ApiError as error:
            raise renamed(error, RENAMED) from error

    def form(self, plan: Plan, tokenizer: Tokenizer, naming: Naming) -> Form:
        return MessageForm(plan, naming)


def parse(body: bytes) -> MessageRequest:
    """Raises `ApiError` 400 naming the field."""
    return parse_body(MessageRequest, body, UNSUPPORTED)


def parse_counted(body: bytes) -> CountedFields:
    """Raises `ApiError` 400 naming the field."""
    return parse_body(CountedFields, body, UNSUPPORTED)


def count_tokens(request: CountedFields, tokenizer: Tokenizer) -> int:
    """Of the prompt that these fields make. Raises `ApiError`."""
    return len(read_question(request.chat().question(tokenizer), tokenizer).token_ids)


def _messages(message: InputMessage) -> list[Message]:
    """A user's message may answer several calls and say something too: in a chat these are messages of their own."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    return _assistant(message.content) if message.role == "assistant" else _user(message.content)


def _user(blocks: Sequence[Block]) -> list[Message]:
    told: list[Message] = []
    texts: list[str] = []
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                content = "" if block.content is None else _joined(block.content)
                told.append(Message(role="tool", content=content, tool_call_id=block.tool_use_id))
            case _:
                raise bad_request(f"A user's message holds no block of the type '{block.type}'.", param="messages")
    if texts:
        told.append(Message(role="user", content=[TextPart(type="text", text=text) for text in texts]))
    return told


def _assistant(blocks: Sequence[Block]) -> list[Message]:
    text, thoughts = "", ""
    calls: list[ToolCall] = []
    for block in blocks:
        match block:
            case TextBlock():
                text += block.text
            case ThinkingBlock():
                thoughts += block.thinking
            case ToolUseBlock():
                function = CalledFunction(name=block.name, arguments=json.dumps(block.input))
                calls.append(ToolCall(id=block.id, function=function))
            case _:
                raise bad_request("An assistant's message holds no results of tools.", param="messages")
    return [
        Message(role="assistant", content=text, reasoning_content=thoughts or None, tool_calls=calls if calls else None)
    ]


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tool(tool: CustomTool) -> Tool:
    function = FunctionDescription(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _choice(choice: AnyChoice | ToolChoice) -> str | NamedTool:
    if isinstance(choice, ToolChoice):
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return {"any": "required"}.get(choice.type, choice.type)
