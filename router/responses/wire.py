"""POST /v1/responses: what it takes, and what that comes down to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.router.config import GatewayConfig
from tandem.router.errors import ApiError, renamed
from tandem.router.form import Form, Naming
from tandem.router.openai.chat import ChatCompletionRequest
from tandem.router.openai.fields import Label, Metadata
from tandem.router.openai.messages import FunctionName, Message
from tandem.router.openai.structure import JsonObjectFormat, JsonSchema, JsonSchemaFormat, TextFormat
from tandem.router.openai.tool_fields import MAX_TOOLS, FunctionDescription, NamedFunction, NamedTool, Tool
from tandem.router.openai.wire import WireModel, parse_body
from tandem.router.plan import Plan
from tandem.router.responses.form import ResponseForm
from tandem.router.responses.items import Input, as_messages
from tandem.router.responses.store import ResponseStore
from tandem.router.tokenizer import Tokenizer

UNSUPPORTED: dict[str, Sequence[Any]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": (),
}
"""Fields of the API that are not served, with the values that ask for nothing."""
RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Our words for what a chat calls otherwise."""


class FunctionTool(WireModel):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(WireModel):
    type: Literal["function"]
    name: str


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextSettings(WireModel):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(WireModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: None = None
    generate_summary: None = None


class ResponseStreamOptions(WireModel):
    include_obfuscation: Literal[False] | None = None


class ResponseRequest(WireModel):
    model: str
    input: Input
    include: (
        Annotated[list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], Field(max_length=8)]
        | None
    ) = None
    """There is no encrypted content: thoughts come in clear."""
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    text: TextSettings | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    truncation: Literal["disabled"] | None = None
    # what follows changes no answer, by the API's own words
    metadata: Metadata | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    safety_identifier: Label | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: Label | None = None

    @property
    def shows_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """A request with the conversation that it goes on with. `caller` owns what is stored."""

    request: ResponseRequest
    messages: Sequence[Message]
    """Without the instructions, which are of this response alone."""
    store: ResponseStore
    caller: str

    @property
    def model(self) -> str:
        return self.request.model

    def plan(self, tokenizer: Tokenizer, config: GatewayConfig) -> Plan:
        """Raises `ApiError`, with fields named as in this API."""
        try:
            plan = self._chat().plan(tokenizer, config)
        except ApiError as error:
            raise renamed(error, RENAMED) from error
        field = plan.grammar_field
        return dataclasses.replace(plan, grammar_field=None if field is None else RENAMED.get(field, field))

    def form(self, plan: Plan, tokenizer: Tokenizer, naming: Naming) -> Form:
        return ResponseForm(self, plan, tokenizer, naming)

    def _chat(self) -> ChatCompletionRequest:
        request = self.request
        instructions = [] if request.instructions is None else [Message(role="system", content=request.instructions)]
        given: dict[str, Any] = {
            "model": request.model,
            "messages": [*instructions, *self.messages],
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_completion_tokens": request.max_output_tokens,
            "logprobs": request.shows_logprobs or None,
            "top_logprobs": request.top_logprobs,
            "stream": request.stream,
            "tools": _tools(request.tools),
            "tool_choice": _choice(request.tool_choice),
            "parallel_tool_calls": request.parallel_tool_calls,
            "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
            "prompt_cache_key": request.prompt_cache_key,
            "response_format": None if request.text is None else _format(request.text),
        }
        return ChatCompletionRequest.of(given)


def parse(body: bytes, caller: str, store: ResponseStore) -> AskedResponse:
    """Raises `ApiError` 400 naming the field, 404 for an unknown previous response."""
    request = parse_body(ResponseRequest, body, UNSUPPORTED)
    before: Sequence[Message] = ()
    if request.previous_response_id is not None:
        before = store.get(request.previous_response_id, caller, param="previous_response_id").messages
    return AskedResponse(request, (*before, *as_messages(request.input)), store, caller)


def _tools(tools: Sequence[FunctionTool] | None) -> list[Tool] | None:
    if not tools:
        return None
    return [
        Tool(
            type="function",
            function=FunctionDescription(
                name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
            ),
        )
        for tool in tools
    ]


def _choice(choice: str | ChosenFunction | None) -> str | NamedTool | None:
    if isinstance(choice, ChosenFunction):
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return choice


def _format(text: TextSettings) -> TextFormat | JsonObjectFormat | JsonSchemaFormat | None:
    if not isinstance(text.format, SchemaFormat):
        return text.format
    given: Mapping[str, Any] = {
        "name": text.format.name,
        "schema": text.format.schema_,
        "strict": text.format.strict,
        "description": text.format.description,
    }
    return JsonSchemaFormat(type="json_schema", json_schema=JsonSchema(**given))
