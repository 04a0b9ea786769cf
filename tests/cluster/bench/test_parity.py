"""What `tandem bench parity` asks, and what it compares. The run itself needs servers (README.md)."""

from __future__ import annotations

from typing import Any

from tandem.cluster.bench.parity import KINDS, Way, _compare, make_requests
from tandem.router.http import encode_json
from tandem.router.openai.chat import parse as parse_chat
from tandem.router.openai.completions import parse as parse_completion
from tandem.router.openai.embeddings import parse as parse_embedding

PARSERS: dict[str, Any] = {
    "/v1/chat/completions": parse_chat,
    "/v1/completions": parse_completion,
    "/v1/embeddings": parse_embedding,
}
WAY = Way("aggregated", 64, 1, False)


def test_every_kind_is_asked_and_valid() -> None:
    asks = make_requests(40, "tiny", 1000, 3)
    assert asks == make_requests(40, "tiny", 1000, 3)
    assert {ask.path for ask in asks} == set(PARSERS)
    fields = {name for ask in asks for name in ask.body}
    assert fields >= {name for kind in KINDS for name in kind} - {"path"}
    for ask in asks:
        PARSERS[ask.path](encode_json(ask.body))


def answer(**changes: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    return {"id": "1", "created": 1, "choices": [{"text": "a"}], "usage": usage, **changes}


def calling(call_id: str, arguments: str) -> dict[str, Any]:
    return answer(choices=[{"message": {"tool_calls": [{"id": call_id, "function": {"arguments": arguments}}]}}])


def test_names_may_differ_and_nothing_else() -> None:
    for one, other in (
        (answer(), answer(id="2", created=2)),
        (answer(), answer(usage={"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}})),
        (calling("x", "1"), calling("y", "1")),
    ):
        assert _compare(WAY, [one], [other]).difference is None
    for one, other in (
        (answer(), answer(choices=[{"text": "b"}])),
        (answer(), answer(usage={"prompt_tokens": 4})),
        (answer(), answer(prompt_logprobs=[None])),
        (answer(data=[{"embedding": [0.5]}]), answer(data=[{"embedding": [0.25]}])),
        (calling("x", "1"), calling("x", "2")),
        ({"error": {}, "usage": {}}, {"error": {}, "usage": {}}),
    ):
        assert _compare(WAY, [one], [other]).difference is not None
