"""A model's chat template: messages in, the text of the prompt out, exactly as Hugging Face renders it.

Templates come with model files, so they are run in jinja2's sandbox, where they can reach nothing but their inputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Const, Getattr, Getitem, Name, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.workers.errors import ModelError, RequestError


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; for a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  jinja2 wants a plain set

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which would put &lt; into prompts
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class ChatTemplate:
    """One compiled template with the special tokens that it may name. Raises `ModelError` if it does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
            self.names = _names(environment.parse(source))
        except TemplateError as error:
            raise ModelError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of the prompt. `variables`: further ones that the template may read. Raises `RequestError` when the
        template refuses."""
        given = dict(variables or {})
        given |= {
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
        }
        try:
            return self._template.render(given)
        except TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            # a template is somebody else's program: what it trips over is not our bug
            raise RequestError("the chat template cannot render these messages", param="messages") from error


def _names(tree: Node) -> frozenset[str]:
    """Every variable, attribute and key that the template mentions: what it does not mention, it cannot show."""
    names = {node.name for node in tree.find_all(Name)} | {node.attr for node in tree.find_all(Getattr)}
    keys = (node.arg.value for node in tree.find_all(Getitem) if isinstance(node.arg, Const))
    return frozenset(names | {key for key in keys if isinstance(key, str)})
