"""Fields that hold the answer to a form: `response_format` of chat, `structured_outputs` of both endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from tandem.router.errors import bad_request
from tandem.router.grammar import choice_grammar, json_object_grammar, json_schema_grammar, regex_grammar
from tandem.router.openai.wire import WireModel
from tandem.workers.grammar import MAX_GRAMMAR_CHARS

MAX_CHOICES = 1024
Text = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class JsonSchema(WireModel):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    # `schema` is a method of the base class
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None
    """Any: a schema is always followed to the letter."""


class TextFormat(WireModel):
    type: Literal["text"]


class JsonObjectFormat(WireModel):
    type: Literal["json_object"]


class JsonSchemaFormat(WireModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(WireModel):
    """Exactly one of these."""

    json_: Annotated[dict[str, Any] | bool | Text | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: Text | None = None

    def to_grammar(self) -> str:
        """Raises `ApiError`."""
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            raise bad_request(
                "'structured_outputs' takes exactly one of json, json_object, regex, choice and grammar.",
                param="structured_outputs",
            )
        if self.json_ is not None:
            return json_schema_grammar(_as_schema(self.json_))
        if self.regex is not None:
            return regex_grammar(self.regex)
        if self.choice is not None:
            return choice_grammar(self.choice)
        return json_object_grammar() if self.grammar is None else self.grammar


def format_grammar(format: ResponseFormat | None) -> str | None:
    """None: any text."""
    if isinstance(format, JsonObjectFormat):
        return json_object_grammar()
    if isinstance(format, JsonSchemaFormat):
        schema = format.json_schema.schema_
        return json_schema_grammar({} if schema is None else schema)
    return None


def _as_schema(given: dict[str, Any] | bool | str) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return from_json(given, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request("'structured_outputs.json' is not JSON.", param="structured_outputs.json") from error
