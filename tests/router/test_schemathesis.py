"""The gateway against its own /openapi.json: schemathesis makes the requests, whole and broken ones, and compares the
answers with what is described. Over a real socket, with scripted workers behind it.

Whatever is sent: 2xx or 4xx, with a status, a content type and a body as the description has it.
"""

from __future__ import annotations

import asyncio
import collections
import copy
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tandem.router import docs

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
WHOLE, BROKEN = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
NUM_EXAMPLES = 8
"""Of each route, whole and broken each: 15 s. Sixty found no more."""
MESSAGES: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {"role": {"enum": ["user", "assistant"]}, "content": {"type": "string"}},
        "required": ["role", "content"],
        "additionalProperties": False,
    },
}
"""A conversation that any template takes."""
PLAIN = ("/openapi.json", "/docs", "/version", "/live", "/health", "/ready", "/v1/models")
"""Nothing about these can be varied: asked for once."""


def described(stored: list[str], mode: schemathesis.GenerationMode) -> Any:
    """The description, with what only a running server knows: its model and the responses that it holds. Whole bodies
    have few fields beyond what they must have, since most combinations are refused for one of them."""
    content = copy.deepcopy(docs.openapi())
    for schema in content["components"]["schemas"].values():
        if "model" in schema.get("properties", {}) and "additionalProperties" in schema:
            schema["properties"]["model"] = {"enum": ["tiny"]}
            if mode is WHOLE:
                schema["properties"] |= {"messages": MESSAGES} if "messages" in schema["properties"] else {}
                schema["maxProperties"] = len(schema.get("required", ["one"])) + 2
    for path, operations in content["paths"].items():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                names = ["tiny", "other"] if path == "/v1/models/{model}" else stored
                parameter["schema"] = {"enum": names}
    return schemathesis.openapi.from_dict(content)


def run_all(url: str, stored: list[str]) -> collections.Counter[tuple[str, int]]:
    """(route, status) -> how often. In a thread: it blocks."""
    counts: collections.Counter[tuple[str, int]] = collections.Counter()

    def try_one(case: schemathesis.Case) -> None:
        response = case.call(base_url=url, headers={"authorization": "Bearer secret"}, timeout=20)
        counts[f"{case.method} {case.operation.path}", response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    for mode in (WHOLE, BROKEN):
        for found in described(stored, mode).get_all_operations():
            operation = found.ok()
            num_examples = 1 if operation.path in PLAIN else NUM_EXAMPLES
            settings = hypothesis.settings(
                max_examples=num_examples,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[hypothesis.Phase.generate],
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            try:
                strategy = operation.as_strategy(mode)
                settings(hypothesis.given(case=strategy)(try_one))()
            except hypothesis.errors.Unsatisfiable:
                continue  # nothing to break in a route without parameters
    return counts


@pytest.mark.filterwarnings("ignore")  # its own libraries have some to give
async def test_answers_are_as_they_are_described(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes, indeed.", frame_len=50), max_model_len=4096, api_keys=("secret",))
    kept = await house.client.responses.create(model="tiny", input="Hi", max_output_tokens=20)
    counts = await asyncio.to_thread(run_all, house.url, [kept.id, "resp_unknown"])
    answered = {route for route, status in counts if status < 300}
    refused = {route for route, status in counts if status >= 400}
    everything = {
        f"{found.ok().method.upper()} {found.ok().path}" for found in described([], WHOLE).get_all_operations()
    }
    assert everything - answered == {"POST /v1/responses/{response_id}/cancel"}  # none is being written
    assert {"GET /health", "GET /live", "GET /ready"} == everything - refused
    assert set(await house.outcomes()) == {"ok", "rejected"}
    assert house.workers["decode-0"].num_running == 0
    assert house.gateway.workers.get("decode-0") is not None
