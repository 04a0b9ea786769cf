"""GET /openapi.json and /docs: what each route takes, made from the very models that check it.

The page needs nothing from elsewhere: servers often have no way out, and browsers then show an empty page.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel

from tandem.router.anthropic.wire import UNSUPPORTED as MESSAGES_UNSUPPORTED
from tandem.router.anthropic.wire import CountedFields, MessageRequest
from tandem.router.auth import OPEN_PATHS
from tandem.router.docs_answers import ANSWERS, ERROR, EVENT, MESSAGES_ERROR, PAGES, REFUSALS, STREAMING
from tandem.router.openai.chat import UNSUPPORTED as CHAT_UNSUPPORTED
from tandem.router.openai.chat import ChatCompletionRequest
from tandem.router.openai.completions import UNSUPPORTED as COMPLETIONS_UNSUPPORTED
from tandem.router.openai.completions import CompletionRequest
from tandem.router.openai.embeddings import EmbeddingRequest
from tandem.router.responses.wire import UNSUPPORTED as RESPONSES_UNSUPPORTED
from tandem.router.responses.wire import ResponseRequest
from tandem.router.text_fields import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, tuple[str, type[BaseModel], Mapping[str, Any]]] = {
    "/v1/chat/completions": ("The next message of a chat", ChatCompletionRequest, CHAT_UNSUPPORTED),
    "/v1/completions": ("How texts go on", CompletionRequest, COMPLETIONS_UNSUPPORTED),
    "/v1/responses": ("A response (Responses API)", ResponseRequest, RESPONSES_UNSUPPORTED),
    "/v1/messages": ("The next message (Messages API)", MessageRequest, MESSAGES_UNSUPPORTED),
    "/v1/messages/count_tokens": ("Tokens of a prompt (Messages API)", CountedFields, {}),
    "/v1/embeddings": ("Where the model puts texts, as vectors of length 1", EmbeddingRequest, {}),
    "/tokenize": ("Text or messages as token ids", TokenizeRequest, {}),
    "/detokenize": ("Token ids as text", DetokenizeRequest, {}),
}
"""POST routes: summary, model of the body, fields that are refused."""
OTHERS: dict[tuple[str, str], str] = {
    ("get", "/v1/responses/{response_id}"): "A stored response",
    ("delete", "/v1/responses/{response_id}"): "Forget a stored response",
    ("post", "/v1/responses/{response_id}/cancel"): "End a response that is being written",
    ("get", "/v1/models"): "The model that is served",
    ("get", "/v1/models/{model}"): "The same by its name",
    ("get", "/version"): "The version of the server",
    ("get", "/health"): "200 when requests can be served",
    ("get", "/live"): "200 while the process answers",
    ("get", "/ready"): "200 when all that the cluster was started with is there",
    ("get", "/docs"): "This, for people",
    ("get", "/openapi.json"): "This, for programs",
}


@cache
def openapi() -> dict[str, Any]:
    """The description, in OpenAPI 3.1."""
    schemas: dict[str, Any] = {"Error": ERROR, "MessagesError": MESSAGES_ERROR}
    schemas |= dict(ANSWERS.values())
    paths: dict[str, dict[str, Any]] = {}
    for path, (summary, model, refused) in BODIES.items():
        # two APIs may use one name for different things
        prefix = f"{model.__name__}."
        schema = model.model_json_schema(ref_template=f"#/components/schemas/{prefix}{{model}}")
        schemas |= {prefix + name: part for name, part in schema.pop("$defs", {}).items()}
        schemas[model.__name__] = schema
        body = {"required": True, "content": {"application/json": {"schema": _reference(model.__name__)}}}
        operation = {**_operation(path, "post", summary), "requestBody": body}
        if refused:
            operation["description"] = "Refused by name: " + ", ".join(sorted(refused)) + "."
        paths.setdefault(path, {})["post"] = operation
    for (method, path), summary in OTHERS.items():
        paths.setdefault(path, {})[method] = _operation(path, method, summary)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": version("tandem-serve")},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


@cache
def page() -> bytes:
    """The same as a page: one table per route."""
    described = openapi()
    parts = ["<h1>Tandem</h1><p>Fields in <b>bold</b> are required. <a href='openapi.json'>openapi.json</a></p>"]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{method.upper()} {html.escape(path)}</h2><p>{html.escape(operation['summary'])}</p>")
            if "requestBody" in operation:
                parts.append(_table(BODIES[path][1], described["components"]["schemas"]))
            parts.append(f"<p>{html.escape(operation.get('description', ''))}</p>")
    style = "body{font:16px sans-serif;margin:2em auto;max-width:60em}td{padding:.1em 1em .1em 0;vertical-align:top}"
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>Tandem</title><style>{style}</style>"
    return (head + "".join(parts) + "</html>").encode()


def _operation(path: str, method: str, summary: str) -> dict[str, Any]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": f"{method}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {"200": _answer(path, method), **_refusals(path)},
    }
    if path in OPEN_PATHS:
        operation["security"] = []
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation


def _answer(path: str, method: str) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if (method, path) in ANSWERS:
        content["application/json"] = {"schema": _reference(ANSWERS[method, path][0])}
    if path in STREAMING and method == "post":
        content["text/event-stream"] = {"schema": EVENT}
    content |= PAGES.get(path, {})
    return {"description": "The answer", "content": content}


def _refusals(path: str) -> dict[str, Any]:
    """What may go wrong is the same everywhere, but for the Messages API, which says it in its own way."""
    if path in OPEN_PATHS:  # probes, which are answered when not all is well, too
        return {"503": {"description": "Not now", "content": {"application/json": {"schema": _reference("Health")}}}}
    name = "MessagesError" if path.startswith("/v1/messages") else "Error"
    content = {"application/json": {"schema": _reference(name)}}
    return {status: {"description": words, "content": content} for status, words in REFUSALS.items()}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _table(model: type[BaseModel], schemas: Mapping[str, Any]) -> str:
    schema = schemas[model.__name__]
    rows = []
    for name, field in schema["properties"].items():
        shown = html.escape(name)
        shown = f"<b>{shown}</b>" if name in schema.get("required", ()) else shown
        about = " ".join([_kind(field), field.get("description", "")])
        rows.append(f"<tr><td><code>{shown}</code><td>{html.escape(about)}")
    return f"<table>{''.join(rows)}</table>"


def _kind(schema: Mapping[str, Any]) -> str:
    """A schema in a few words: `number 0..2 or null`."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition(".")[2])
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        kinds = [_kind(option) for option in options]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "const" in schema or "enum" in schema:
        return " | ".join(str(value) for value in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    low, high = schema.get("minimum"), schema.get("maximum")
    bounds = "" if low is None and high is None else f" {'' if low is None else low}..{'' if high is None else high}"
    return kind + bounds
