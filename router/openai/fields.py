"""Request bodies: strict parsing, the fields that both endpoints share, and refusals that name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, from_json

from tandem.router.errors import ApiError, bad_request
from tandem.router.plan import resolve_seed
from tandem.router.tokenizer import Tokenizer
from tandem.workers.types import SamplingParams

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
MAX_STOP_CHARACTERS = 256
SMALLEST_TOP_P = 1e-9
"""`top_p: 0` is allowed by the API and keeps the one most likely token."""

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0)]


class WireModel(BaseModel):
    """Nothing is converted and nothing is ignored: "1" is not a number, and an unknown field is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(WireModel):
    include_usage: bool | None = None


class SharedFields(WireModel):
    """Fields of both endpoints; None means that the client left the choice to us."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None

    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def include_usage(self) -> bool:
        """Raises `ApiError` when options for a stream come without one."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, tokenizer: Tokenizer, *, max_tokens: int, num_logprobs: int | None) -> SamplingParams:
        stop_token_ids = set(self.stop_token_ids or ())
        if not all(token_id < tokenizer.vocab_size for token_id in stop_token_ids):
            raise bad_request("'stop_token_ids' holds an id outside the vocabulary.", param="stop_token_ids")
        if not self.ignore_eos:
            stop_token_ids.update(tokenizer.eos_token_ids)
        return SamplingParams(
            max_tokens=max_tokens,
            seed=resolve_seed(self.seed),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else max(self.top_p, SMALLEST_TOP_P),
            top_k=min(self.top_k or 0, tokenizer.vocab_size),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            num_logprobs=num_logprobs,
            stop_token_ids=tuple(sorted(stop_token_ids)),
        )


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in this body. NaN, lone surrogates, deep nesting and anything else that is not JSON: 400."""
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"The request body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(content, dict):
        raise bad_request("The request body must be a JSON object.", code="invalid_json")
    return content


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
    complaints = list(dict.fromkeys(detail["msg"] for detail in details if _path(detail, body) == param))
    return bad_request(f"Invalid value for '{param}': {'; or '.join(complaints)}.", param=param, code="invalid_value")


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
