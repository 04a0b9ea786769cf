"""A request's life is noted by whoever works for it, found again by its id, and sent to a collector of traces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tandem.router.journey import Journey, JourneyLog, current_journey, mark, parse_trace_parent
from tandem.router.otlp import TraceExporter, spans

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STARTED = {
    "path": "remote",
    "prefill": "p0",
    "decode": "d0",
    "num_cached_tokens": 32,
    "queue_s": 0.1,
    "handover_s": 0.2,
}


async def test_edges_belong_to_the_request_whose_task_marks_them() -> None:
    log = JourneyLog()

    async def serve(name: str) -> None:
        with log.following(name, "/v1/completions") as journey:
            await asyncio.gather(asyncio.create_task(work(name)))
            journey.outcome = "ok"

    async def work(name: str) -> None:
        await asyncio.sleep(0)
        mark("routed", prefill=name)
        journey = current_journey()
        assert journey is not None
        journey.count_tokens(2)
        await asyncio.sleep(0)
        journey.count_tokens(3)

    await asyncio.gather(serve("a"), serve("b"))
    mark("nobody's")  # outside of any request: no harm
    for name in ("a", "b"):
        journey = log.find(name)
        assert journey is not None
        assert [edge.name for edge in journey.edges] == ["arrived", "routed", "first token", "ended"]
        assert journey.edges[1].details == {"prefill": name}
        assert (journey.num_tokens, journey.outcome) == (5, "ok")
        assert sorted(edge.at_s for edge in journey.edges) == [edge.at_s for edge in journey.edges]


def test_only_the_latest_are_kept() -> None:
    log = JourneyLog(max_kept=2)
    for name in ("a", "b", "a", "c"):
        with log.following(name, "/"):
            pass
    assert log.find("b") is None
    assert log.find("a") is not None
    assert log.find("c") is not None


def test_a_journey_is_bounded_and_still_ends() -> None:
    log = JourneyLog()
    with log.following("a", "/") as journey:
        for _ in range(10_000):
            mark("routed")
    assert len(journey.edges) < 300
    assert journey.edges[-1].name == "ended"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (f"00-{TRACE}-{PARENT}-01", (TRACE, PARENT)),
        (f" 00-{TRACE}-{PARENT}-00 ", (TRACE, PARENT)),
        (f"00-{'0' * 32}-{PARENT}-01", (None, None)),
        (f"01-{TRACE}-{PARENT}-01-more", (None, None)),
        ("", (None, None)),
        (None, (None, None)),
    ],
)
def test_trace_parents(header: str | None, expected: tuple[str | None, str | None]) -> None:
    assert parse_trace_parent(header) == expected


def journey(outcome: str = "ok") -> Journey:
    made = Journey("r", "/v1/chat/completions", TRACE, PARENT, arrived_at=1000.0)
    told: tuple[tuple[str, float, dict[str, Any]], ...] = (
        ("arrived", 0.0, {}),
        ("prepared", 0.5, {"num_prompts": 1, "num_prompt_tokens": 64}),
        ("routed", 0.75, {"prefill": "p0", "decode": "d0", "predicted_s": 1.0}),
        ("started", 2.0, STARTED),
        ("first token", 2.0, {}),
        ("ended", 4.0, {"outcome": outcome}),
    )
    for name, at_s, details in told:
        made.mark(name, **details)
        made.edges[-1] = type(made.edges[-1])(name, at_s, details)
    made.outcome, made.num_tokens = outcome, 9
    return made


def times(span: dict[str, Any]) -> tuple[float, float]:
    begin, end = int(span["startTimeUnixNano"]) / 1e9 - 1000, int(span["endTimeUnixNano"]) / 1e9 - 1000
    return round(begin, 3), round(end, 3)


def test_spans_divide_the_request() -> None:
    found = {span["name"]: span for span in spans(journey(), "m")}
    assert {name: times(span) for name, span in found.items()} == {
        "chat m": (0, 4),
        "prepare": (0, 0.5),
        "route": (0.5, 0.75),
        "prefill": (0.75, 1.8),
        "queue": (0.75, 0.85),
        "kv_transfer": (1.8, 2),
        "decode": (2, 4),
    }
    root = found["chat m"]
    assert (root["traceId"], root["parentSpanId"], root["kind"]) == (TRACE, PARENT, 2)
    assert {span["parentSpanId"] for name, span in found.items() if name not in ("chat m", "queue")} == {root["spanId"]}
    assert found["queue"]["parentSpanId"] == found["prefill"]["spanId"]
    attributes = {each["key"]: next(iter(each["value"].values())) for each in root["attributes"]}
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.usage.input_tokens"] == "64"
    assert attributes["gen_ai.usage.output_tokens"] == "9"
    assert attributes["gen_ai.server.time_to_first_token"] == 2.0


def test_what_the_client_did_is_no_error_of_ours() -> None:
    codes = {outcome: spans(journey(outcome), "m")[0]["status"]["code"] for outcome in ("ok", "failed", "cancelled")}
    assert codes == {"ok": 1, "failed": 2, "cancelled": 0}
    rejected = Journey("r", "/v1/completions", TRACE, None)
    rejected.mark("arrived")
    assert [span["name"] for span in spans(rejected, "m")] == ["text_completion m"]


@pytest.fixture
async def collector() -> AsyncIterator[tuple[str, list[Any]]]:
    """A collector that listens: OTLP over HTTP, as far as JSON goes."""
    bodies: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/traces ")
        length = next(
            int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length")
        )
        bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", bodies
    server.close()
    await server.wait_closed()


async def test_traces_reach_a_collector(collector: tuple[str, list[Any]]) -> None:
    url, bodies = collector
    exporter = TraceExporter(url, "m", interval_s=0.01)
    exporter.start()
    exporter.add(journey())
    async with asyncio.timeout(5):
        while not bodies:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    exporter.add(journey())
    await exporter.stop()  # what still waits is sent
    assert len(bodies) == 2
    (resource,) = bodies[0]["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "tandem"}} in resource["resource"]["attributes"]
    assert len(resource["scopeSpans"][0]["spans"]) == 7


async def test_a_collector_that_is_away_costs_traces_only() -> None:
    exporter = TraceExporter("http://127.0.0.1:1", "m", interval_s=0.01)
    exporter.start()
    for _ in range(5000):
        exporter.add(journey())
    await asyncio.sleep(0.05)
    await exporter.stop()


async def test_the_gateway_remembers_what_it_served(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes, indeed."))
    headers = {"x-request-id": "my-request", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    messages = [{"role": "user", "content": "Tell me of everything that a fox may do to a dog. " * 6}]
    await house.client.chat.completions.create(model="tiny", messages=messages, extra_headers=headers)
    await house.outcomes()
    shown = (await house.admin.get("/trace/my-request")).json()
    names = [edge["name"] for edge in shown["edges"]]
    assert names == ["arrived", "prepared", "routed", "started", "first token", "ended"]
    assert (shown["outcome"], shown["trace_id"], shown["path"]) == ("ok", TRACE, "/v1/chat/completions")
    assert shown["edges"][3]["decode"] == "decode-0"
    assert shown["num_tokens"] > 0
    assert (await house.admin.get("/trace/another")).status_code == 404
