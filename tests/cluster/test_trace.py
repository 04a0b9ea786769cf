"""`tandem trace`: a request's life in lines, from whichever gateway knows it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tandem.cluster import trace
from tandem.cluster.observe import log_request
from tandem.cluster.trace import find_trace, trace_lines
from tandem.router.journey import Journey
from tandem.workers.errors import UserError

JOURNEY: dict[str, Any] = {
    "request_id": "r-1",
    "trace_id": "t",
    "path": "/v1/completions",
    "arrived_at": 1_700_000_000.5,
    "outcome": None,
    "num_tokens": 3,
    "edges": [
        {"name": "arrived", "at_s": 0.0},
        {"name": "routed", "at_s": 0.0105, "prefill": None, "decode": "decode-0", "predicted_s": 0.25, "queue_s": None},
    ],
}


def test_each_edge_has_its_time_and_what_it_took() -> None:
    lines = trace_lines(JOURNEY)
    assert lines[0] == "r-1  /v1/completions  still running"
    assert "2023-11-14 22:13:20.500" in lines[1]
    assert " ".join(lines[-1].split()) == "10.5 +10.5 routed prefill - decode decode-0 predicted 250.0 ms queue -"


def test_the_gateway_that_knows_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(url: str, timeout: float, trust_env: bool) -> httpx.Response:
        if "away" in url:
            raise httpx.ConnectError("refused")
        return httpx.Response(200 if "second" in url else 404, json=JOURNEY)

    monkeypatch.setattr(trace.httpx, "get", get)
    assert find_trace("r-1", ["http://first", "http://away", "http://second/"]) == JOURNEY
    with pytest.raises(UserError, match="no request r-1 is remembered"):
        find_trace("r-1", ["http://first"])
    with pytest.raises(UserError, match="no gateway answers at http://away"):
        find_trace("r-1", ["http://first", "http://away"])


def test_an_id_is_not_a_path_and_an_answer_may_be_anybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def get(url: str, timeout: float, trust_env: bool) -> httpx.Response:
        asked.append(url)
        return httpx.Response(200, text="<html>")

    monkeypatch.setattr(trace.httpx, "get", get)
    with pytest.raises(UserError, match="no gateway answers at http://first"):
        find_trace("../metrics", ["http://first"])
    assert asked == ["http://first/trace/..%2Fmetrics"]


def test_one_log_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    journey = Journey("r-1", "/v1/completions", "t", None)
    journey.count_tokens(3)
    journey.mark("ended")
    journey.outcome = "ok"
    with caplog.at_level("INFO", logger="tandem.requests"):
        log_request(journey)
    (record,) = caplog.records
    fields = record.__dict__["fields"]
    assert (fields["request_id"], fields["outcome"], fields["num_tokens"]) == ("r-1", "ok", 3)
    assert fields["time_to_first_token_s"] is not None
