"""One trace per request reaches a collector, as a collector reads it; nothing of it is ever in anybody's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tandem.router.journey import Edge, Journey, TraceParent
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
ROUTED = {"prefill": "p0", "decode": "d0", "predicted_s": 1.0}
PROMPT = "Tell me of everything that a fox may do to a dog. " * 6


def journey(outcome: str = "ok", *edges: tuple[str, float, dict[str, Any]], flags: int = 1) -> Journey:
    parent = TraceParent(TRACE, PARENT, flags, "vendor=1")
    made = Journey("r", "/v1/chat/completions", TRACE, parent, bool(flags & 1), arrived_at=1000.0)
    prepared = {"num_prompts": 1, "num_prompt_tokens": 64}
    middle = edges or (("routed", 0.75, ROUTED), ("started", 2.0, STARTED), ("first token", 2.0, {}))
    told = (("arrived", 0.0, {}), ("prepared", 0.5, prepared), *middle, ("ended", 4.0, {"outcome": outcome}))
    made.edges += [Edge(name, at_s, details) for name, at_s, details in told]
    made.outcome, made.num_tokens = outcome, 9
    return made


def times(span: Span) -> tuple[str, float, float]:
    begin, end = span.start_time_unix_nano / 1e9 - 1000, span.end_time_unix_nano / 1e9 - 1000
    return span.name, round(begin, 3), round(end, 3)


def attributes(span: Span) -> dict[str, Any]:
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes}


def test_spans_divide_the_request() -> None:
    made = journey()
    found = spans(made, "m")
    assert [times(span) for span in found] == [
        ("chat m", 0, 4),
        ("prepare", 0, 0.5),
        ("route", 0.5, 0.75),
        ("prefill", 0.75, 1.8),
        ("queue", 0.75, 0.85),
        ("kv_transfer", 1.8, 2),
        ("decode", 2, 4),
    ]
    root, by_name = found[0], {span.name: span for span in found}
    assert {span.trace_id.hex() for span in found} == {TRACE}
    assert {span.trace_state for span in found} == {"vendor=1"}
    assert len({span.span_id for span in found}) == len(found)
    assert (root.span_id.hex(), root.parent_span_id.hex()) == (made.span_id, PARENT)
    assert root.kind == Span.SPAN_KIND_SERVER
    assert root.flags == 0x301, "sampled, and its parent is another process"
    assert {span.parent_span_id for span in found[1:] if span.name != "queue"} == {root.span_id}
    assert by_name["queue"].parent_span_id == by_name["prefill"].span_id
    assert attributes(root)["gen_ai.operation.name"] == "chat"
    assert attributes(root)["gen_ai.usage.input_tokens"] == 64
    assert attributes(root)["gen_ai.usage.output_tokens"] == 9
    assert attributes(root)["gen_ai.server.time_to_first_token"] == 2.0
    assert [event.name for event in root.events] == [edge.name for edge in made.edges]


def test_a_move_to_another_worker_stays_in_the_trace() -> None:
    moved = {"worker": "d0", "reason": "decode_lost"}
    found = spans(
        journey(
            "ok",
            ("routed", 0.75, ROUTED),
            ("started", 1.5, STARTED),
            ("first token", 1.5, {}),
            ("moved", 2.0, moved),
            ("routed", 2.25, ROUTED | {"decode": "d1"}),
            ("moved", 2.5, moved | {"worker": "d1"}),
            ("routed", 2.5, ROUTED | {"decode": "d2", "prefill": None}),
            ("started", 3.0, STARTED | {"decode": "d2", "prefill": "d2", "handover_s": None}),
        ),
        "m",
    )
    assert [times(span) for span in found[2:]] == [
        ("route", 0.5, 0.75),
        ("prefill", 0.75, 1.3),
        ("queue", 0.75, 0.85),
        ("kv_transfer", 1.3, 1.5),
        ("decode", 1.5, 2.0),
        ("route", 2.0, 2.25),
        ("prefill", 2.25, 2.5),
        ("route", 2.5, 2.5),
        ("prefill", 2.5, 3.0),
        ("queue", 2.5, 2.6),
        ("decode", 3.0, 4.0),
    ]
    lost = [(span.name, span.status.message) for span in found if span.status.code == 2]
    assert lost == [("decode", "decode_lost"), ("prefill", "decode_lost")]
    numbers = [attributes(span).get("tandem.attempt", 0) for span in found[2:]]
    assert numbers == [0] * 5 + [1] * 2 + [2] * 4
    assert {span.trace_id.hex() for span in found} == {TRACE}


def test_what_the_client_did_is_no_error_of_ours() -> None:
    codes = {outcome: spans(journey(outcome), "m")[0].status.code for outcome in ("ok", "failed", "cancelled")}
    assert codes == {"ok": 1, "failed": 2, "cancelled": 0}
    rejected = Journey("r", "/v1/completions", TRACE)
    rejected.mark("arrived")
    assert [span.name for span in spans(rejected, "m")] == ["text_completion m"]


class Collector:
    """One that listens: OTLP over HTTP, bodies in protobuf."""

    def __init__(self) -> None:
        self.url = ""
        self.batches: list[list[Span]] = []
        self.services: set[str] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/traces ")
        headers = dict(line.lower().split(b": ") for line in head.splitlines()[1:-1])
        assert headers[b"content-type"] == b"application/x-protobuf"
        request = ExportTraceServiceRequest.FromString(await reader.readexactly(int(headers[b"content-length"])))
        (resource,) = request.resource_spans
        self.services.add(resource.resource.attributes[0].value.string_value)
        self.batches.append([span for scope in resource.scope_spans for span in scope.spans])
        answer = ExportTraceServiceResponse().SerializeToString()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\nconnection: close\r\n")
        writer.write(b"content-length: %d\r\n\r\n%s" % (len(answer), answer))
        await writer.drain()
        writer.close()

    async def until_sent(self) -> None:
        async with asyncio.timeout(5):
            while not self.batches:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    made = Collector()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield made
    server.close()
    await server.wait_closed()


async def test_traces_reach_a_collector(collector: Collector) -> None:
    exporter = TraceExporter(collector.url, "m", interval_s=0.01)
    exporter.start()
    exporter.add(journey())
    await collector.until_sent()
    exporter.add(journey())
    exporter.add(journey(flags=0))  # its client does not record it
    await exporter.stop()  # what still waits is sent
    assert [len(batch) for batch in collector.batches] == [7, 7]
    assert collector.services == {"tandem"}


async def test_a_collector_that_is_away_costs_traces_only() -> None:
    exporter = TraceExporter("http://127.0.0.1:1", "m", interval_s=0.01)
    exporter.start()
    for _ in range(5000):
        exporter.add(journey())
    await asyncio.sleep(0.05)
    await exporter.stop()


async def test_an_endpoint_that_is_no_url_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    exporter = TraceExporter("http://collector:port", "m", interval_s=60.0)
    for _ in range(2):
        exporter.add(journey())
        assert not await exporter._send()
    assert caplog.text.count("could not be sent") == 2
    await exporter.stop()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_finds_its_request_also_after_a_worker_died(
    open_house: Any, saying: Any, collector: Collector, stream: bool
) -> None:
    house = await open_house(saying("A long answer, which the other worker ends.", die_after=3), decode=2)
    exporter = TraceExporter(collector.url, "tiny", interval_s=60.0)
    house.gateway.journeys.is_tracing = True
    house.gateway.journeys.on_end.append(exporter.add)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "stream": stream}
    answer = await house.http.post("/v1/chat/completions", json=body, headers=headers)
    refused = await house.http.post("/v1/chat/completions", json={"model": "tiny"}, headers=headers)
    await house.outcomes()
    await exporter.stop()
    ((*found,),) = collector.batches
    assert {span.trace_id.hex() for span in found} == {TRACE}
    roots = [span for span in found if span.parent_span_id.hex() == PARENT]
    assert [f"00-{TRACE}-{root.span_id.hex()}-01" for root in roots] == [
        each.headers["traceresponse"] for each in (answer, refused)
    ]
    workers = [attributes(span)["tandem.worker"] for span in found if span.name == "decode"]
    assert sorted(workers) == ["decode-0", "decode-1"]
