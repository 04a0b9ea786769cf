"""Traces of requests for an OpenTelemetry collector: OTLP over HTTP, in batches, never in anybody's way.

One trace per request, under the client's span if it sent a traceparent, and whoever works for it:

    chat m  (gateway)  ├─ prepare            validate, render, tokenise
                       ├─ route              look-up and policy
                       ├─ prefill            on P or D, from the first word to it to the end of the prompt; queue within
                       │    └─ queue
                       ├─ kv_transfer        what the handover took beyond prefill
                       └─ decode             until the last token

When a worker dies the last four come once more for the next one, with `tandem.attempt` 1, 2, ...; what the lost one was
doing has the status error. Attributes follow the semantic conventions for generative AI where there is one. A queue
that is full drops traces, and says how many.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from tandem.router.journey import Edge, Journey

logger = logging.getLogger(__name__)

MAX_WAITING = 4096
MAX_BATCH = 512
INTERVAL_S = 1.0
TIMEOUT_S = 5.0
HEADERS = {"content-type": "application/x-protobuf"}
STATUS = {"ok": Status.STATUS_CODE_OK, "failed": Status.STATUS_CODE_ERROR}
"""What the client gave up or asked wrongly is no error of ours: unset."""
HAS_REMOTE, IS_REMOTE = 0x100, 0x200
"""Flags of a span: whether its parent is in another process is known, and so it is."""


@dataclass(slots=True)
class _Attempt:
    """One prompt on one pair of workers."""

    routed: Edge
    began_s: float
    """When the decision began."""
    started: Edge | None = None
    moved: Edge | None = None


def spans(journey: Journey, model: str) -> list[Span]:
    """One request as spans, the root first."""
    operation = "chat" if "chat" in journey.path or "messages" in journey.path else "text_completion"
    if journey.path.endswith("embeddings"):
        operation = "embeddings"
    parent = journey.parent
    root = _span(journey, f"{operation} {model}", 0.0, journey.duration_s, None, _root_attributes(journey, model))
    root.attributes.insert(0, KeyValue(key="gen_ai.operation.name", value=_value(operation)))
    root.span_id = bytes.fromhex(journey.span_id)
    root.kind = Span.SPAN_KIND_SERVER
    root.status.code = STATUS.get(journey.outcome or "", Status.STATUS_CODE_UNSET)
    root.events.extend(_event(journey, edge) for edge in journey.edges)
    if parent is not None:
        root.parent_span_id = bytes.fromhex(parent.span_id)
        root.flags |= IS_REMOTE
    found = [root]
    prepared = journey.first("prepared")
    if prepared is not None:
        found.append(_span(journey, "prepare", 0.0, prepared.at_s, root, {}))
    for number, attempt in enumerate(_attempts(journey)):
        found += _attempt_spans(journey, attempt, root, {"tandem.attempt": number} if number else {})
    return found


def _root_attributes(journey: Journey, model: str) -> dict[str, Any]:
    prepared, started, first_token = (journey.first(name) for name in ("prepared", "started", "first token"))
    attributes: dict[str, Any] = {
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": model,
        "gen_ai.usage.output_tokens": journey.num_tokens,
        "url.path": journey.path,
        "tandem.request_id": journey.request_id,
        "tandem.outcome": journey.outcome,
    }
    if prepared is not None:
        attributes["gen_ai.usage.input_tokens"] = prepared.details["num_prompt_tokens"]
    if first_token is not None:
        attributes["gen_ai.server.time_to_first_token"] = first_token.at_s
    if started is not None:
        attributes |= {f"tandem.{name}": started.details[name] for name in ("path", "prefill", "decode")}
        attributes["tandem.cached_tokens"] = started.details["num_cached_tokens"]
    return attributes


def _attempts(journey: Journey) -> list[_Attempt]:
    """What was tried, in order. Prompts of one request are told apart by their workers, as far as that goes."""
    attempts: list[_Attempt] = []
    prepared = journey.first("prepared")
    began_s = 0.0 if prepared is None else prepared.at_s
    for edge in journey.edges:
        if edge.name == "routed":
            attempts.append(_Attempt(edge, began_s))
        elif edge.name in ("started", "moved"):
            decode = edge.details["decode" if edge.name == "started" else "worker"]
            found = next((each for each in attempts if _is_next(each, edge.name, decode)), None)
            if found is not None and edge.name == "started":
                found.started = edge
            elif found is not None:
                found.moved, began_s = edge, edge.at_s
    return attempts


def _is_next(attempt: _Attempt, name: str, decode: Any) -> bool:
    is_waiting = attempt.moved is None and (name == "moved" or attempt.started is None)
    return is_waiting and attempt.routed.details["decode"] == decode


def _attempt_spans(journey: Journey, attempt: _Attempt, root: Span, more: Mapping[str, Any]) -> list[Span]:
    routed, started, moved = attempt.routed, attempt.started, attempt.moved
    found = [_span(journey, "route", min(attempt.began_s, routed.at_s), routed.at_s, root, {**routed.details, **more})]
    end_s = journey.duration_s if moved is None else moved.at_s
    if started is None:
        if moved is not None:
            reader = {"tandem.worker": routed.details["prefill"] or routed.details["decode"], **more}
            found.append(_span(journey, "prefill", routed.at_s, end_s, root, reader))
    else:
        found += _reading_spans(journey, routed, started, root, more)
        decode = {"tandem.worker": started.details["decode"], **more}
        found.append(_span(journey, "decode", started.at_s, end_s, root, decode))
    if moved is not None:
        found[-1].status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=str(moved.details["reason"])))
    return found


def _reading_spans(journey: Journey, routed: Edge, started: Edge, root: Span, more: Mapping[str, Any]) -> list[Span]:
    handover_s = float(started.details["handover_s"] or 0.0)
    prompt_read = max(routed.at_s, started.at_s - handover_s)
    worker = {"tandem.worker": started.details["prefill"], **more}
    prefill = _span(journey, "prefill", routed.at_s, prompt_read, root, worker)
    queued = min(prompt_read, routed.at_s + float(started.details["queue_s"] or 0.0))
    found = [prefill, _span(journey, "queue", routed.at_s, queued, prefill, worker)]
    if started.details["handover_s"] is not None:
        both = worker | {"tandem.peer": started.details["decode"]}
        found.append(_span(journey, "kv_transfer", prompt_read, started.at_s, root, both))
    return found


def _span(
    journey: Journey, name: str, begin_s: float, end_s: float, parent: Span | None, attributes: Mapping[str, Any]
) -> Span:
    return Span(
        trace_id=bytes.fromhex(journey.trace_id),
        span_id=secrets.token_bytes(8),
        parent_span_id=b"" if parent is None else parent.span_id,
        trace_state="" if journey.parent is None else journey.parent.state,
        flags=HAS_REMOTE | int(journey.trace_response[-2:], 16),
        name=name,
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=_nanoseconds(journey, begin_s),
        end_time_unix_nano=_nanoseconds(journey, end_s),
        attributes=_attributes(attributes),
    )


def _event(journey: Journey, edge: Edge) -> Span.Event:
    time_unix_nano = _nanoseconds(journey, edge.at_s)
    return Span.Event(name=edge.name, time_unix_nano=time_unix_nano, attributes=_attributes(edge.details))


def _nanoseconds(journey: Journey, at_s: float) -> int:
    return int((journey.arrived_at + at_s) * 1e9)


def _attributes(values: Mapping[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in values.items() if value is not None]


def _value(value: Any) -> AnyValue:
    if isinstance(value, int):
        return AnyValue(int_value=value)
    return AnyValue(double_value=value) if isinstance(value, float) else AnyValue(string_value=str(value))


class TraceExporter:
    """Sends what `add` was given to `{endpoint}/v1/traces`, once a second. `start` and `stop` on the event loop."""

    def __init__(self, endpoint: str, model: str, *, interval_s: float = INTERVAL_S) -> None:
        self._url = endpoint.rstrip("/") + "/v1/traces"
        self._model = model
        self._interval_s = interval_s
        self._waiting: deque[Journey] = deque(maxlen=MAX_WAITING)
        self._num_dropped = 0
        self._client = httpx.AsyncClient(timeout=TIMEOUT_S, headers=HEADERS)
        self._task: asyncio.Task[None] | None = None

    def add(self, journey: Journey) -> None:
        """Nothing, if its client has said that the trace is not recorded."""
        if not journey.is_sampled:
            return
        if len(self._waiting) == MAX_WAITING:
            self._num_dropped += 1
        self._waiting.append(journey)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="trace exporter")

    async def stop(self) -> None:
        """Send what waits, once, then end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._send()
        await self._client.aclose()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            while self._waiting and await self._send():
                pass

    async def _send(self) -> bool:
        """One batch. False when the collector did not take it: the batch is lost, requests are not held up for it."""
        batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
        if not batch:
            return True
        if self._num_dropped:
            logger.warning("%d traces were dropped: the collector is too slow", self._num_dropped)
            self._num_dropped = 0
        try:
            body = await asyncio.to_thread(self._body, batch)
            answer = await self._client.post(self._url, content=body)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            logger.warning("the collector did not take %d traces: %s", len(batch), type(error).__name__)
            return False
        except Exception:  # an endpoint that is no URL, or a bug of ours: it must not be the last batch
            logger.exception("%d traces could not be sent", len(batch))
            return False
        return True

    def _body(self, batch: Iterable[Journey]) -> bytes:
        resource = Resource(attributes=_attributes({"service.name": "tandem", "gen_ai.request.model": self._model}))
        found = [span for journey in batch for span in spans(journey, self._model)]
        scope = ScopeSpans(scope=InstrumentationScope(name="tandem.router"), spans=found)
        request = ExportTraceServiceRequest(
            resource_spans=[ResourceSpans(resource=resource, scope_spans=[scope])],
        )
        body: bytes = request.SerializeToString()
        return body
