"""Request bodies: strict parsing, and refusals that name the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, from_json

from tandem.router.errors import ApiError, bad_request


class WireModel(BaseModel):
    """Nothing is converted and nothing is ignored: "1" is not a number, and an unknown field is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


Body = TypeVar("Body", bound=WireModel)


def parse_body(model: type[Body], body: bytes, unsupported: Mapping[str, Sequence[Any]] | None = None) -> Body:
    """The request in this body. `unsupported`: fields that are not served, with the values that ask for nothing. Raises
    `ApiError` 400 naming the field."""
    fields = without_unsupported(parse_object(body), unsupported or {})
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise refusal(error, fields) from error


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in this body. NaN, lone surrogates, deep nesting and anything else that is not JSON: 400."""
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        culprit = _culprit(body)
        place = "" if culprit is None else f" at '{culprit}'"
        message = f"The request body is not valid JSON{place}: {error}."
        raise bad_request(message, param=culprit, code="invalid_json") from error
    if not isinstance(content, dict):
        raise bad_request("The request body must be a JSON object.", code="invalid_json")
    return content


def _culprit(body: bytes) -> str | None:
    """The field that makes a body no JSON although a lenient parser takes it: a NaN, an infinity, half a surrogate
    pair."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return None
    todo: list[tuple[str, Any]] = [("", content)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, dict):
            todo += [(f"{path}.{key}" if path else key, each) for key, each in reversed(value.items())]
        elif isinstance(value, list):
            todo += [(f"{path}[{number}]", each) for number, each in reversed(list(enumerate(value)))]
        elif _is_no_json(value):
            return path if not _is_no_json(path) else None
    return None


def _is_no_json(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value)


def without_unsupported(body: Mapping[str, Any], unsupported: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The body without fields of the API that are not served here, where they ask for nothing (null, or one of the
    listed values). Raises `ApiError` naming the first that asks for something."""
    for field, harmless in unsupported.items():
        value = body.get(field)
        # `==` alone would take 0 for False
        if value is not None and not any(type(value) is type(other) and value == other for other in harmless):
            raise bad_request(f"'{field}' is not supported by this server.", param=field, code="unsupported_parameter")
    return {field: value for field, value in body.items() if field not in unsupported}


def refusal(error: ValidationError, body: Mapping[str, Any]) -> ApiError:
    """The first thing that is wrong with a body, in one sentence that names the field."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    field = details[0]["loc"][0]
    # each member of a union complains for itself: the one that got furthest is the one that was meant
    details = sorted((d for d in details if d["loc"][0] == field), key=lambda d: -_path(d, body).count("["))
    param = _path(details[0], body)
    if details[0]["type"] == "extra_forbidden":
        return bad_request(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if details[0]["type"] == "missing":
        return bad_request(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    complaints = list(dict.fromkeys(_complaint(detail) for detail in details if _path(detail, body) == param))
    return bad_request(f"Invalid value for '{param}': {'; or '.join(complaints)}.", param=param, code="invalid_value")


def _complaint(detail: ErrorDetails) -> str:
    """In the words of JSON: no client knows our classes."""
    return "Input should be an object" if detail["type"] in ("model_type", "dict_type") else detail["msg"]


def _path(detail: ErrorDetails, body: Mapping[str, Any]) -> str:
    """Where in the body: pydantic's location without the names of union members."""
    here: Any = body
    path = ""
    for step in detail["loc"]:
        if isinstance(here, dict) and isinstance(step, str) and step in here:
            path += f".{step}" if path else step
            here = here[step]
        elif isinstance(here, list) and isinstance(step, int) and step < len(here):
            path += f"[{step}]"
            here = here[step]
    if detail["type"] == "missing":
        last = str(detail["loc"][-1])
        path += f".{last}" if path else last
    return path
