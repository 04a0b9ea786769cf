"""A conversation, in whatever API's words it came, as what the model reads and what its answer is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.router.errors import bad_request
from tandem.router.parsers.grammars import with_thoughts
from tandem.router.parsers.reasoning import OPENING
from tandem.router.parsers.select import Reading
from tandem.router.tokenizer import Tokenizer
from tandem.router.tools import NO_TOOLS, Tools, call_format, grammar_mark, told_in_text, tool_grammar
from tandem.workers.errors import RequestError

RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@dataclass(frozen=True, slots=True)
class ChatQuestion:
    """What is asked, ready for a chat template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Tools = NO_TOOLS
    grammar: str | None = None
    grammar_field: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further ones for the template."""


@dataclass(frozen=True, slots=True)
class ReadQuestion:
    """The prompt, how its answers are read, and the grammar that they follow with the field that asked for it."""

    token_ids: list[int]
    reading: Reading
    grammar: str | None
    grammar_field: str | None


def read_question(question: ChatQuestion, tokenizer: Tokenizer) -> ReadQuestion:
    """Render and tokenise. Raises `ApiError` naming the field."""
    style, tools = tokenizer.style, question.tools
    _check(question)
    calls = call_format(tools, style)
    if calls is not None and question.grammar is not None and tools.is_forced:
        raise bad_request("An answer that must be a call of a tool has no other form.", param=question.grammar_field)
    messages = question.messages if style.renders_tools else told_in_text(question.messages, tools)
    shows_tools = tools.are_offered and style.renders_tools
    try:
        prompt = tokenizer.encode_chat(
            messages,
            tools=list(tools.descriptions) if shows_tools else None,
            add_generation_prompt=question.add_generation_prompt and not question.continue_final_message,
            continue_final_message=question.continue_final_message,
            variables=_variables(question, tokenizer),
        )
    except RequestError as error:
        raise bad_request(f"{error}.", param=error.param) from error
    if not prompt.token_ids:
        raise bad_request("The messages make an empty prompt.", param="messages")
    starts_inside = style.reasoning and prompt.ending.rstrip().endswith(OPENING)
    reading = Reading(calls=calls, reasoning=style.reasoning, starts_inside=starts_inside)
    grammar, grammar_field = question.grammar, question.grammar_field
    if grammar is not None and reading.reasoning:
        grammar = with_thoughts(grammar, starts_inside=starts_inside, mark=grammar_mark(tokenizer))
    if grammar is None:
        grammar = tool_grammar(tools, reading, tokenizer)
        grammar_field = None if grammar is None else "tools"
    return ReadQuestion(prompt.token_ids, reading, grammar, grammar_field)


def _check(question: ChatQuestion) -> None:
    if question.continue_final_message:
        if question.add_generation_prompt and question.variables.get("add_generation_prompt"):
            raise bad_request("The answer either continues a message or begins one.", param="continue_final_message")
        if question.messages[-1]["role"] != "assistant":
            raise bad_request("Only an assistant's message can be continued.", param="continue_final_message")
    taken = RESERVED_VARIABLES & question.variables.keys()
    if taken:
        raise bad_request(f"'{min(taken)}' has a field of its own.", param="chat_template_kwargs")


def _variables(question: ChatQuestion, tokenizer: Tokenizer) -> dict[str, Any]:
    """For the template: whatever it does not read would be ignored, so it is refused."""
    names = frozenset() if tokenizer.template is None else tokenizer.template.names
    unread = sorted(question.variables.keys() - names)
    if unread:
        raise bad_request(
            f"This model's chat template does not read '{unread[0]}'.", param=f"chat_template_kwargs.{unread[0]}"
        )
    given = dict(question.variables)
    effort = question.reasoning_effort
    if effort is not None:
        if "reasoning_effort" in names:
            given["reasoning_effort"] = effort
        elif "enable_thinking" in names:
            given["enable_thinking"] = effort != "none"
        elif effort != "none" or tokenizer.style.reasoning:
            raise bad_request("This model's reasoning cannot be adjusted.", param="reasoning_effort")
    return given
