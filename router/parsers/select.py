"""Which way a model writes its calls and thoughts: told by a flag, or seen in its chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tandem.router.chat_template import ChatTemplate
from tandem.router.parsers.bare_json import MARK as PYTHON_TAG
from tandem.router.parsers.bare_json import BareJsonReader
from tandem.router.parsers.mistral import MARK as MISTRAL_MARK
from tandem.router.parsers.mistral import MistralReader
from tandem.router.parsers.pieces import Reader
from tandem.router.parsers.pythonic import PythonicReader
from tandem.router.parsers.reasoning import ReasoningReader
from tandem.router.parsers.tagged import TaggedReader

CallFormat = Literal["hermes", "llama3_json", "mistral", "pythonic"]
CallParserChoice = Literal["auto", "hermes", "llama3_json", "mistral", "pythonic"]
ReasoningParserChoice = Literal["auto", "think", "none"]

READERS: dict[CallFormat, Callable[[], Reader]] = {
    "hermes": TaggedReader,
    "llama3_json": BareJsonReader,
    "mistral": MistralReader,
    "pythonic": PythonicReader,
}
SHOWN_TOKENS: dict[CallFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": (PYTHON_TAG,),
    "mistral": (MISTRAL_MARK, "[ARGS]", "[CALL_ID]"),
    "pythonic": (PYTHON_TAG,),
}
"""Control tokens that a reader must see. Where they are ordinary tokens, they are seen anyway."""
_SIGNS: tuple[tuple[str, CallFormat], ...] = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument', "llama3_json"),
)


def call_format_of(template: str) -> CallFormat | None:
    """The format that this chat template speaks of."""
    # Qwen's coder models put XML inside the tag, which is another format
    if "<function=" in template:
        return None
    return next((form for sign, form in _SIGNS if sign in template), None)


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """What is known of a model's way to talk."""

    renders_tools: bool = False
    """Its chat template shows tools by itself."""
    calls: CallFormat | None = None
    """None: not known."""
    reasoning: bool = False
    """It may think before it answers."""


def style_of(
    template: ChatTemplate | None,
    calls: CallParserChoice = "auto",
    reasoning: ReasoningParserChoice = "auto",
) -> ChatStyle:
    """What was asked for, and for the rest what the template shows."""
    source = "" if template is None else template.source
    return ChatStyle(
        renders_tools=template is not None and "tools" in template.names,
        calls=call_format_of(source) if calls == "auto" else calls,
        reasoning="</think>" in source if reasoning == "auto" else reasoning == "think",
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one request are read."""

    calls: CallFormat | None = None
    reasoning: bool = False
    starts_inside: bool = False
    """The prompt ends inside the model's thoughts."""

    @property
    def is_plain(self) -> bool:
        """There is nothing in the text but words."""
        return self.calls is None and not self.reasoning

    def reader(self) -> Reader | None:
        """None: the text is plain."""
        calls = None if self.calls is None else READERS[self.calls]()
        return ReasoningReader(calls, starts_inside=self.starts_inside) if self.reasoning else calls

    def shown_tokens(self) -> tuple[str, ...]:
        thoughts = ("<think>", "</think>") if self.reasoning else ()
        return thoughts + (() if self.calls is None else SHOWN_TOKENS[self.calls])


PLAIN_READING = Reading()
