"""JSON Schemas of what the routes answer, for the page that describes them (docs.py).

They are closed: a key that an answer has and its schema has not is a fault, found by tests/router/test_schemathesis.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
NOTHING: Schema = {"type": "null"}
ANYTHING: Schema = {}


def _object(optional: Mapping[str, Schema] | None = None, /, **required: Schema) -> Schema:
    properties = required | dict(optional or {})
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _some(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _or_null(schema: Schema) -> Schema:
    return _some(schema, NOTHING)


def _one(*values: str | bool) -> Schema:
    return {"enum": list(values)}


_MESSAGE = {"type": "string", "minLength": 1}
ERROR = _object(
    error=_object(message=_MESSAGE, type=STRING, param=_or_null(STRING), code=_or_null(STRING)),
)
MESSAGES_ERROR = _object(type=_one("error"), error=_object(type=STRING, message=_MESSAGE))

_TOKEN_IDS = _list(COUNT)
_TOP: dict[str, Schema] = {"token": STRING, "logprob": NUMBER, "bytes": _or_null(_list(COUNT))}
_TOKEN_LOGPROBS = _list(_object(**_TOP, top_logprobs=_list(_object(**_TOP))))
_SCORED: Schema = _list(
    _or_null(
        {
            "type": "object",
            "additionalProperties": _object(
                {"rank": _or_null(COUNT), "decoded_token": _or_null(STRING)}, logprob=NUMBER
            ),
        }
    )
)
_USAGE = _object(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=_object(cached_tokens=COUNT),
    completion_tokens_details=_object(reasoning_tokens=COUNT),
)
_TOOL_CALL = _object(id=STRING, type=_one("function"), function=_object(name=STRING, arguments=STRING))
_CHAT_CHOICE = _object(
    {"token_ids": _TOKEN_IDS},
    index=COUNT,
    message=_object(
        {"reasoning_content": STRING, "tool_calls": _list(_TOOL_CALL)},
        role=_one("assistant"),
        content=_or_null(STRING),
        refusal=NOTHING,
    ),
    logprobs=_or_null(_object(content=_TOKEN_LOGPROBS, refusal=NOTHING)),
    finish_reason=_one("stop", "length", "tool_calls"),
)
CHAT_COMPLETION = _object(
    {"prompt_token_ids": _TOKEN_IDS, "prompt_logprobs": _SCORED},
    id=STRING,
    object=_one("chat.completion"),
    created=COUNT,
    model=STRING,
    choices=_list(_CHAT_CHOICE),
    usage=_USAGE,
)
_COMPLETION_CHOICE = _object(
    {"token_ids": _TOKEN_IDS, "prompt_token_ids": _TOKEN_IDS, "prompt_logprobs": _SCORED},
    index=COUNT,
    text=STRING,
    logprobs=_or_null(
        _object(
            tokens=_list(STRING),
            token_logprobs=_list(_or_null(NUMBER)),
            top_logprobs=_list(_or_null({"type": "object", "additionalProperties": NUMBER})),
            text_offset=_list(COUNT),
        )
    ),
    finish_reason=_one("stop", "length"),
)
COMPLETION = _object(
    id=STRING,
    object=_one("text_completion"),
    created=COUNT,
    model=STRING,
    choices=_list(_COMPLETION_CHOICE),
    usage=_USAGE,
)
EMBEDDINGS = _object(
    object=_one("list"),
    data=_list(_object(object=_one("embedding"), index=COUNT, embedding=_some(_list(NUMBER), STRING))),
    model=STRING,
    usage=_object(prompt_tokens=COUNT, total_tokens=COUNT),
)

_STATUS = _one("in_progress", "completed", "incomplete", "cancelled", "failed")
_OUTPUT_TEXT = _object(
    type=_one("output_text"), text=STRING, annotations=_list(ANYTHING), logprobs=_or_null(_TOKEN_LOGPROBS)
)
_OUTPUT_ITEM = _some(
    _object(id=STRING, type=_one("message"), role=_one("assistant"), status=_STATUS, content=_list(_OUTPUT_TEXT)),
    _object(id=STRING, type=_one("function_call"), status=_STATUS, call_id=STRING, name=STRING, arguments=STRING),
    {"type": "object", "properties": {"type": _one("reasoning")}, "required": ["type"]},
)
RESPONSE = _object(
    {"completed_at": NUMBER},
    id=STRING,
    object=_one("response"),
    created_at=NUMBER,
    status=_STATUS,
    background=_one(False),
    error=_or_null(_object(code=STRING, message=STRING)),
    incomplete_details=_or_null(_object(reason=_one("max_output_tokens", "content_filter"))),
    instructions=_or_null(STRING),
    max_output_tokens=_or_null(COUNT),
    metadata={"type": "object", "additionalProperties": STRING},
    model=STRING,
    output=_list(_OUTPUT_ITEM),
    parallel_tool_calls=BOOLEAN,
    previous_response_id=_or_null(STRING),
    prompt_cache_key=_or_null(STRING),
    reasoning=_or_null(_object(effort=_or_null(STRING), summary=_or_null(STRING))),
    safety_identifier=_or_null(STRING),
    service_tier=STRING,
    temperature=NUMBER,
    text={"type": "object", "properties": {"format": {"type": "object"}}, "required": ["format"]},
    tool_choice=_some(STRING, {"type": "object"}),
    tools=_list({"type": "object"}),
    top_logprobs=COUNT,
    top_p=NUMBER,
    truncation=_one("disabled"),
    usage=_or_null(
        _object(
            input_tokens=COUNT,
            input_tokens_details=_object(cached_tokens=COUNT, cache_write_tokens=COUNT),
            output_tokens=COUNT,
            output_tokens_details=_object(reasoning_tokens=COUNT),
            total_tokens=COUNT,
        )
    ),
    user=_or_null(STRING),
)
RESPONSE_DELETED = _object(id=STRING, object=_one("response"), deleted=_one(True))
MESSAGE = _object(
    id=STRING,
    type=_one("message"),
    role=_one("assistant"),
    model=STRING,
    content=_list(
        _some(
            _object(type=_one("text"), text=STRING),
            _object(type=_one("tool_use"), id=STRING, name=STRING, input={"type": "object"}),
            _object(type=_one("thinking"), thinking=STRING, signature=STRING),
        )
    ),
    stop_reason=_one("end_turn", "max_tokens", "stop_sequence", "tool_use"),
    stop_sequence=_or_null(STRING),
    usage=_object(
        input_tokens=COUNT, cache_read_input_tokens=COUNT, cache_creation_input_tokens=COUNT, output_tokens=COUNT
    ),
)
MESSAGE_TOKENS = _object(input_tokens=COUNT)
TOKENS = _object(count=COUNT, max_model_len=COUNT, tokens=_TOKEN_IDS, token_strs=_or_null(_list(STRING)))
TEXT = _object(prompt=STRING)
MODEL = _object(id=STRING, object=_one("model"), created=COUNT, owned_by=STRING, max_model_len=COUNT)
MODELS = _object(object=_one("list"), data=_list(MODEL))
VERSION = _object(version=STRING)
HEALTH = _object({"reasons": _list(STRING)}, status=STRING)

ANSWERS: Mapping[tuple[str, str], tuple[str, Schema]] = {
    ("post", "/v1/chat/completions"): ("ChatCompletion", CHAT_COMPLETION),
    ("post", "/v1/completions"): ("Completion", COMPLETION),
    ("post", "/v1/embeddings"): ("Embeddings", EMBEDDINGS),
    ("post", "/v1/responses"): ("Response", RESPONSE),
    ("get", "/v1/responses/{response_id}"): ("Response", RESPONSE),
    ("delete", "/v1/responses/{response_id}"): ("ResponseDeleted", RESPONSE_DELETED),
    ("post", "/v1/responses/{response_id}/cancel"): ("Response", RESPONSE),
    ("post", "/v1/messages"): ("Message", MESSAGE),
    ("post", "/v1/messages/count_tokens"): ("MessageTokens", MESSAGE_TOKENS),
    ("post", "/tokenize"): ("Tokens", TOKENS),
    ("post", "/detokenize"): ("Text", TEXT),
    ("get", "/v1/models"): ("Models", MODELS),
    ("get", "/v1/models/{model}"): ("Model", MODEL),
    ("get", "/version"): ("Version", VERSION),
    ("get", "/health"): ("Health", HEALTH),
    ("get", "/live"): ("Health", HEALTH),
    ("get", "/ready"): ("Health", HEALTH),
}
"""(method, path): name and schema of a JSON answer. What streams says so in docs.py."""
EVENT: Schema = {
    "type": "object",
    "properties": {"event": STRING, "data": {"type": "string", "contentMediaType": "application/json"}},
    "required": ["data"],
}
"""Of a stream. The last of OpenAI's own has [DONE] for its data."""
STREAMING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Routes that answer with events when `stream` is true."""
PAGES: Mapping[str, Any] = {
    "/docs": {"text/html": {"schema": STRING}},
    "/openapi.json": {"application/json": {"schema": {"type": "object"}}},
}
REFUSALS: Mapping[str, str] = {
    "400": "Something in the request is wrong; `param` names it",
    "401": "No key, or none that is known",
    "404": "There is no such model, response or page",
    "405": "This method is not for this route",
    "408": "The body took too long to come",
    "413": "The body is too large",
    "415": "The body must be application/json",
    "429": "Too much at once; see Retry-After",
    "431": "The headers are too large",
    "500": "A fault of the server's",
    "503": "No worker can take it; see Retry-After",
    "504": "It took too long",
}
