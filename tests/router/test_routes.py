"""The plain routes of the public port, who may ask for what, and the pages that describe it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.routing import Route

from tandem.router import docs
from tandem.router.auth import POLICIES, KeyCheck
from tandem.router.config import GatewayConfig
from tandem.router.errors import ApiError
from tandem.router.gateway import Gateway
from tandem.router.http import encode_json


def routes(gateway: Gateway) -> list[Route]:
    assert isinstance(gateway.app, KeyCheck)
    app: Any = gateway.app._app
    return [route for route in app.routes if isinstance(route, Route)]


async def test_every_route_has_a_policy(doorstep: Any) -> None:
    """Whoever adds a route says in auth.py who may ask for it."""
    assert {route.path for route in routes(doorstep.gateway)} == set(POLICIES)
    assert {path for path, policy in POLICIES.items() if policy == "open"} == {"/health", "/live", "/ready"}


async def test_every_route_is_closed_without_a_key(tokenizer_folder: Any) -> None:
    gateway = Gateway(
        GatewayConfig(model_name="tiny", tokenizer_folder=tokenizer_folder, max_model_len=512, api_keys=("secret",))
    )
    transport = httpx.ASGITransport(gateway.app)
    async with httpx.AsyncClient(base_url="http://gateway", transport=transport, verify=False) as http:
        for route in routes(gateway):
            for method in route.methods or ():
                response = await http.request(method, route.path)
                assert (response.status_code == 401) == (POLICIES[route.path] == "key"), route.path
        for path in ("/health/", "//health", "/HEALTH", "/health%2f", "/live/../v1/models", "/nothing"):
            assert (await http.get(path)).status_code == 401
        for headers in ({"x-api-key": "secre"}, {"x-api-key": "secret", "authorization": "Bearer other"}):
            assert (await http.get("/version", headers=headers)).status_code == 401


async def test_every_route_is_described(doorstep: Any) -> None:
    described = (await doorstep.http.get("/openapi.json")).json()
    assert set(described["paths"]) == {path.replace(":path", "") for path in POLICIES}
    assert set(docs.BODIES) <= set(described["paths"])
    chat = described["paths"]["/v1/chat/completions"]["post"]
    name = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert {"messages", "tools", "logit_bias"} <= set(described["components"]["schemas"][name]["properties"])
    references = [part.split('"')[0] for part in encode_json(described).decode().split('"#/components/schemas/')[1:]]
    assert set(references) <= set(described["components"]["schemas"])


async def test_the_page(doorstep: Any) -> None:
    response = await doorstep.http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    for word in ("/v1/chat/completions", "<code>logit_bias</code>", "<b>messages</b>", "number 0..2"):
        assert word in response.text
    assert "http" not in response.text.replace("utf-8", "")  # nothing from elsewhere


async def test_tokenize_and_back(doorstep: Any, tokenizer: Any) -> None:
    post = doorstep.http.post
    text = "Grüße 🙂 <|im_end|>"
    body = (await post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert body["tokens"] == tokenizer.encode_plain(text, add_special_tokens=True)
    assert (body["count"], body["max_model_len"], len(body["token_strs"])) == (len(body["tokens"]), 512, body["count"])
    assert (await post("/detokenize", json={"tokens": body["tokens"]})).json() == {"prompt": text}
    messages = [{"role": "user", "content": text}]
    chat = (await post("/tokenize", json={"model": "tiny", "messages": messages})).json()
    assert chat["tokens"] == tokenizer.encode_chat(messages).token_ids
    assert chat["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "param", "status"),
    [
        ("/tokenize", {}, "prompt", 400),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, "prompt", 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model", 404),
        ("/tokenize", {"prompt": "a", "x": 1}, "x", 400),
        ("/tokenize", {"messages": []}, "messages", 400),
        ("/detokenize", {}, "tokens", 400),
        ("/detokenize", {"tokens": [400]}, "tokens", 400),
        ("/detokenize", {"tokens": ["1"]}, "tokens[0]", 400),
    ],
)
async def test_refusals(doorstep: Any, path: str, body: Any, param: str, status: int) -> None:
    response = await doorstep.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_version(doorstep: Any) -> None:
    assert (await doorstep.http.get("/version")).json()["version"].count(".") == 2


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
@pytest.mark.parametrize("path", list(docs.BODIES))
async def test_only_json_is_taken(doorstep: Any, path: str, kind: str) -> None:
    response = await doorstep.http.post(path, content=b"{}", headers={"content-type": kind})
    assert response.status_code == 415
    response = await doorstep.http.post(
        path, content=b"{}", headers={"content-type": "Application/JSON; charset=utf-8"}
    )
    assert response.status_code == 400


async def test_an_error_repeats_little_of_what_was_sent(doorstep: Any) -> None:
    for long in ("\x00" * 100_000, "🙂" * 100_000):
        for body in ({"model": long, "prompt": "x"}, {"model": "tiny", "prompt": "x", long: 1}):
            response = await doorstep.http.post("/v1/completions", json=body)
            assert response.status_code in (400, 404)
            assert len(response.content) <= 4096


def test_errors_are_at_most_four_kilobytes() -> None:
    error = ApiError(400, "\x00" * 10_000, param="\x00" * 10_000, code="invalid_value")
    assert len(encode_json(error.body())) <= 4096
