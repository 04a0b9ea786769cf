"""Traces of requests for an OpenTelemetry collector: OTLP over HTTP as JSON, in batches, never in anybody's way.

One trace per request, under the client's span if it sent a traceparent:

    chat m  (gateway)  ├─ prepare            validate, render, tokenise
                       ├─ route              look-up and policy
                       ├─ prefill            on P or D, from the first word to it to the end of the prompt; queue within
                       │    └─ queue
                       ├─ kv_transfer        what the handover took beyond prefill
                       └─ decode             until the last token

Attributes follow the semantic conventions for generative AI where there is one. A queue that is full drops traces, and
says how many.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from typing import Any

import httpx

from tandem.router.journey import Edge, Journey

logger = logging.getLogger(__name__)

MAX_WAITING = 4096
MAX_BATCH = 512
INTERVAL_S = 1.0
TIMEOUT_S = 5.0
SERVER, INTERNAL = 2, 1
STATUS = {"ok": 1, "failed": 2}
"""Of OpenTelemetry: 0 unset, 1 ok, 2 error. What the client gave up or asked wrongly is no error of ours."""

Span = dict[str, Any]


def spans(journey: Journey, model: str) -> list[Span]:
    """One request as spans, the root first."""
    operation = "chat" if "chat" in journey.path or "messages" in journey.path else "text_completion"
    prepared, routed, started = (journey.first(name) for name in ("prepared", "routed", "started"))
    first_token = journey.first("first token")
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
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
    root = _span(journey, f"{operation} {model}", 0.0, journey.duration_s, journey.parent_id, attributes, kind=SERVER)
    root["status"] = {"code": STATUS.get(journey.outcome or "", 0)}
    root["events"] = [_event(journey, edge) for edge in journey.edges]
    found = [root]
    if prepared is not None:
        found.append(_span(journey, "prepare", 0.0, prepared.at_s, root["spanId"], {}))
    if prepared is not None and routed is not None:
        found.append(_span(journey, "route", prepared.at_s, routed.at_s, root["spanId"], dict(routed.details)))
    if routed is not None and started is not None:
        found += _after_routing(journey, routed, started, root["spanId"])
    return found


def _after_routing(journey: Journey, routed: Edge, started: Edge, root: str) -> list[Span]:
    handover_s = float(started.details["handover_s"] or 0.0)
    prompt_read = max(routed.at_s, started.at_s - handover_s)
    worker = {"tandem.worker": started.details["prefill"]}
    prefill = _span(journey, "prefill", routed.at_s, prompt_read, root, worker)
    queued = min(prompt_read, routed.at_s + float(started.details["queue_s"] or 0.0))
    found = [prefill, _span(journey, "queue", routed.at_s, queued, prefill["spanId"], worker)]
    if started.details["handover_s"] is not None:
        both = worker | {"tandem.peer": started.details["decode"]}
        found.append(_span(journey, "kv_transfer", prompt_read, started.at_s, root, both))
    decode = {"tandem.worker": started.details["decode"]}
    return [*found, _span(journey, "decode", started.at_s, journey.duration_s, root, decode)]


def _span(
    journey: Journey,
    name: str,
    begin_s: float,
    end_s: float,
    parent: str | None,
    attributes: dict[str, Any],
    *,
    kind: int = INTERNAL,
) -> Span:
    span: Span = {
        "traceId": journey.trace_id,
        "spanId": secrets.token_hex(8),
        "name": name,
        "kind": kind,
        "startTimeUnixNano": _nanoseconds(journey, begin_s),
        "endTimeUnixNano": _nanoseconds(journey, end_s),
        "attributes": _attributes(attributes),
    }
    return span if parent is None else span | {"parentSpanId": parent}


def _event(journey: Journey, edge: Edge) -> dict[str, Any]:
    return {
        "name": edge.name,
        "timeUnixNano": _nanoseconds(journey, edge.at_s),
        "attributes": _attributes(edge.details),
    }


def _nanoseconds(journey: Journey, at_s: float) -> str:
    return str(int((journey.arrived_at + at_s) * 1e9))  # a 64-bit number is a string in JSON


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}


class TraceExporter:
    """Sends what `add` was given to `{endpoint}/v1/traces`, once a second. `start` and `stop` on the event loop."""

    def __init__(self, endpoint: str, model: str, *, interval_s: float = INTERVAL_S) -> None:
        self._url = endpoint.rstrip("/") + "/v1/traces"
        self._model = model
        self._interval_s = interval_s
        self._waiting: deque[Journey] = deque(maxlen=MAX_WAITING)
        self._num_dropped = 0
        self._client = httpx.AsyncClient(timeout=TIMEOUT_S)
        self._task: asyncio.Task[None] | None = None

    def add(self, journey: Journey) -> None:
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
            answer = await self._client.post(self._url, json=self._body(batch))
            answer.raise_for_status()
        except httpx.HTTPError as error:
            logger.warning("the collector did not take %d traces: %s", len(batch), type(error).__name__)
            return False
        return True

    def _body(self, batch: list[Journey]) -> dict[str, Any]:
        resource = {"service.name": "tandem", "gen_ai.request.model": self._model}
        scope = {"scope": {"name": "tandem.router"}, "spans": [s for each in batch for s in spans(each, self._model)]}
        return {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]}
