"""The public port: every route, who may ask for it, and what answers.

A route that is not in `POLICIES` cannot be asked for at all (auth.py), and a test fails when one is missing there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from tandem.router.anthropic import wire as anthropic
from tandem.router.anthropic.errors import error_body as anthropic_error
from tandem.router.config import GatewayConfig
from tandem.router.docs import openapi, page
from tandem.router.openai import chat, completions
from tandem.router.openai.embedding_endpoint import EmbeddingEndpoint
from tandem.router.openai.endpoint import GenerationEndpoint, House, check_model
from tandem.router.plain_endpoint import PlainEndpoint
from tandem.router.responses.endpoint import ResponseEndpoint, StoredEndpoint
from tandem.router.responses.store import ResponseStore
from tandem.router.text_fields import parse_detokenize, parse_tokenize

OpenHouse = Callable[[], House]
Answer = Mapping[str, Any]


def public_routes(house: OpenHouse, store: ResponseStore, created: int) -> list[Route]:
    """Everything that needs a key, where there are keys. `created`: Unix time of the gateway's start."""
    return [
        *_generating(house, store),
        *_stored_responses(house, store),
        *_about_text(house),
        *_about_models(house, created),
        Route("/openapi.json", _show_openapi, methods=["GET"]),
        Route("/docs", _show_page, methods=["GET"]),
    ]


def _show_openapi(request: Request) -> Response:
    return JSONResponse(openapi())


def _show_page(request: Request) -> Response:
    return HTMLResponse(page())


def _generating(house: OpenHouse, store: ResponseStore) -> list[Route]:
    """Plain ASGI: a response object between us and `send` would halve the number of events per second."""
    return [
        _post("/v1/chat/completions", GenerationEndpoint(house, lambda body, caller: chat.parse(body))),
        _post("/v1/completions", GenerationEndpoint(house, lambda body, caller: completions.parse(body))),
        _post("/v1/responses", ResponseEndpoint(house, store)),
        _post(
            "/v1/messages",
            GenerationEndpoint(house, lambda body, caller: anthropic.parse(body), error_body=anthropic_error),
        ),
        _post("/v1/embeddings", EmbeddingEndpoint(house)),
    ]


def _stored_responses(house: OpenHouse, store: ResponseStore) -> list[Route]:
    path = "/v1/responses/{response_id}"
    return [
        Route(path, StoredEndpoint(house, store.show), methods=["GET"]),
        Route(path, StoredEndpoint(house, store.delete_everywhere), methods=["DELETE"]),
        _post(f"{path}/cancel", StoredEndpoint(house, store.cancel_anywhere)),
    ]


def _about_text(house: OpenHouse) -> list[Route]:
    def tokenize(house: House, body: bytes, caller: str, path: Mapping[str, str]) -> Answer:
        request = parse_tokenize(body)
        _check_model(request.model, house.config)
        return request.answer(house.tokenizer, house.config)

    def detokenize(house: House, body: bytes, caller: str, path: Mapping[str, str]) -> Answer:
        request = parse_detokenize(body)
        _check_model(request.model, house.config)
        return request.answer(house.tokenizer, house.config)

    def count(house: House, body: bytes, caller: str, path: Mapping[str, str]) -> Answer:
        request = anthropic.parse_counted(body)
        check_model(request.model, house.config)
        return {"input_tokens": anthropic.count_tokens(request, house.tokenizer)}

    counting = PlainEndpoint(house, count, has_body=True, error_body=anthropic_error)
    return [
        _post("/tokenize", PlainEndpoint(house, tokenize, has_body=True)),
        _post("/detokenize", PlainEndpoint(house, detokenize, has_body=True)),
        _post("/v1/messages/count_tokens", counting),
    ]


def _about_models(house: OpenHouse, created: int) -> list[Route]:
    def described(config: GatewayConfig) -> Answer:
        return {
            "id": config.model_name,
            "object": "model",
            "created": created,
            "owned_by": "tandem",
            "max_model_len": config.max_model_len,
        }

    def models(house: House, body: bytes, caller: str, path: Mapping[str, str]) -> Answer:
        return {"object": "list", "data": [described(house.config)]}

    def model(house: House, body: bytes, caller: str, path: Mapping[str, str]) -> Answer:
        check_model(path["model"], house.config)
        return described(house.config)

    def release(house: House, body: bytes, caller: str, path: Mapping[str, str]) -> Answer:
        return {"version": version("tandem-serve")}

    return [
        Route("/v1/models", PlainEndpoint(house, models, has_body=False), methods=["GET"]),
        Route("/v1/models/{model:path}", PlainEndpoint(house, model, has_body=False), methods=["GET"]),
        Route("/version", PlainEndpoint(house, release, has_body=False), methods=["GET"]),
    ]


def _post(path: str, endpoint: Any) -> Route:
    return Route(path, endpoint, methods=["POST"])


def _check_model(model: str | None, config: GatewayConfig) -> None:
    if model is not None:
        check_model(model, config)
