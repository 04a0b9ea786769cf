"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.router.errors import bad_request
from tandem.router.openai.messages import FunctionName
from tandem.router.openai.wire import WireModel
from tandem.router.parsers.grammars import Function
from tandem.router.tools import NO_TOOLS, Tools

MAX_TOOLS = 128


class FunctionDescription(WireModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(WireModel):
    type: Literal["function"]
    function: FunctionDescription


class NamedFunction(WireModel):
    name: str


class NamedTool(WireModel):
    type: Literal["function"]
    function: NamedFunction


ToolList = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


def offered(tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> Tools:
    """Raises `ApiError` when the fields do not go together."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("'tool_choice' is only allowed when 'tools' are given.", param="tool_choice")
        return NO_TOOLS
    functions = [tool.function for tool in tools]
    names = [function.name for function in functions]
    if len(set(names)) != len(names):
        raise bad_request("Two of the tools have the same name.", param="tools")
    is_named = isinstance(choice, NamedTool)
    chosen = choice.function.name if isinstance(choice, NamedTool) else choice or "auto"
    if is_named and chosen not in names:
        raise bad_request("'tool_choice' names none of the tools.", param="tool_choice")
    return Tools(
        functions=tuple(Function(each.name, each.parameters, bool(each.strict)) for each in functions),
        descriptions=tuple(_description(each) for each in functions),
        choice=chosen,
        is_named=is_named,
        parallel=parallel is not False and not is_named,
    )


def _description(function: FunctionDescription) -> dict[str, Any]:
    described = {"name": function.name, "description": function.description or ""}
    return {
        "type": "function",
        "function": described | {"parameters": function.parameters or {"type": "object", "properties": {}}},
    }
