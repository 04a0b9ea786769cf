"""Tools that a request offers to the model: how the prompt tells of them, and what the answer is held to.

A model whose template knows tools gets them as the template has it. Any other model is told in its system message, in
the format of Hermes, and calls and results become text that the template can show: worse than a model that was trained
for it, better than nothing, and with `tool_choice: required` its calls are as well-formed as anybody's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.router.errors import bad_request
from tandem.router.parsers.grammars import Function, TokenMark, forced_grammar, if_called_grammar, with_thoughts
from tandem.router.parsers.select import CallFormat, ChatStyle, Reading
from tandem.router.tokenizer import Tokenizer

_INSTRUCTIONS = """You can call functions. Each line describes one:
{functions}

To call a function, write a JSON object with its name and arguments between tags, and nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions on offer. `choice`: "none", "auto", "required", or the name of the one that must be called."""

    functions: tuple[Function, ...] = ()
    descriptions: tuple[Mapping[str, Any], ...] = ()
    """As the OpenAI API describes tools, for the template."""
    choice: str = "auto"
    is_named: bool = False
    parallel: bool = True

    @property
    def are_offered(self) -> bool:
        return bool(self.functions) and (self.is_named or self.choice != "none")

    @property
    def is_forced(self) -> bool:
        return self.is_named or self.choice == "required"


NO_TOOLS = Tools()


def call_format(tools: Tools, style: ChatStyle) -> CallFormat | None:
    """How calls will be written. Raises `ApiError` where nobody could read them."""
    if not tools.are_offered:
        return None
    form = style.calls or ("hermes" if not style.renders_tools else None)
    if form is None:
        raise bad_request(
            "How this model writes calls of tools is not known: the server needs --tool-call-parser.", param="tools"
        )
    # Python's literals cannot be held to a JSON schema; objects can
    return "llama3_json" if form == "pythonic" and tools.is_forced else form


def grammar_mark(tokenizer: Tokenizer) -> TokenMark:
    """How this tokenizer's marks are written in a grammar."""

    def mark(text: str) -> str:
        token_id = tokenizer.token_id(text)
        is_control = token_id is not None and tokenizer.is_special(token_id)
        return f"<[{token_id}]>" if is_control else json.dumps(text)

    return mark


def tool_grammar(tools: Tools, reading: Reading, tokenizer: Tokenizer) -> str | None:
    """What the answer is held to. None: nothing."""
    if reading.calls is None:
        return None
    mark = grammar_mark(tokenizer)
    if tools.is_forced:
        allowed = [each for each in tools.functions if not tools.is_named or each.name == tools.choice]
        strict = [Function(each.name, each.parameters) for each in allowed]
        has_marks = tokenizer.token_id("[ARGS]") is not None
        grammar = forced_grammar(reading.calls, strict, parallel=tools.parallel, mark=mark, mistral_has_marks=has_marks)
    elif reading.calls == "hermes" and any(each.is_strict for each in tools.functions):
        grammar = if_called_grammar(tools.functions, mark=mark)
    else:
        return None
    return with_thoughts(grammar, starts_inside=reading.starts_inside, mark=mark) if reading.reasoning else grammar


def told_in_text(messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """The same conversation for a template that knows no tools."""
    told: list[dict[str, Any]] = []
    if tools.are_offered:
        functions = "\n".join(json.dumps(each["function"], ensure_ascii=False) for each in tools.descriptions)
        told.append({"role": "system", "content": _INSTRUCTIONS.format(functions=functions)})
    for message in messages:
        as_text = _as_text(message)
        before = told[-1] if told else None
        # most templates want one system message, and turns that alternate
        is_more = before is not None and message["role"] == "tool" and before["role"] == "user"
        if before is not None and (is_more or (before["role"] == as_text["role"] == "system")):
            before["content"] += ("\n" if is_more else "\n\n") + as_text["content"]
        else:
            told.append(as_text)
    return told


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message.get("tool_calls") or ()
    ]
    written = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join([part for part in (message["content"], *written) if part])
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}
