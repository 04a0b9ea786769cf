"""One request's life with the time of each edge, kept for those who ask why it was slow.

    arrived -> prepared -> routed -> started -> first token -> ended
                              ^         |
                              └─ moved ─┘  a worker died

Whoever works for a request marks an edge with `mark`; which request that is, the context knows: tasks inherit it. The
last few thousand are kept, and told to whoever wants to hear of them (a log, a collector of traces).
"""

from __future__ import annotations

import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

MAX_KEPT = 4096
MAX_EDGES = 256
"""Of one journey: a request of many prompts has many edges."""

_current: ContextVar[Journey | None] = ContextVar("journey", default=None)
_TRACE_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACE_STATE = re.compile(r"[\x20-\x7e\t]{1,512}")
_NOWHERE = {"0" * 32, "0" * 16}
SAMPLED, RANDOM = 1, 2
"""Flags of W3C Trace Context: somebody records this trace; the right half of its id was drawn at random."""

Detail = str | int | float | None


@dataclass(frozen=True, slots=True)
class Edge:
    """Something that happened, `at_s` seconds after the request arrived."""

    name: str
    at_s: float
    details: dict[str, Detail]


@dataclass(frozen=True, slots=True)
class TraceParent:
    """What a client said of its trace: the request is a part of that."""

    trace_id: str
    span_id: str
    flags: int = SAMPLED
    state: str = ""
    """`tracestate`, passed on as it came."""


@dataclass(slots=True)
class Journey:
    """One request. Times are seconds; `arrived_at` is of the wall clock, all others count from there."""

    request_id: str
    path: str
    trace_id: str
    parent: TraceParent | None = None
    is_sampled: bool = True
    """Whether its trace is sent to a collector."""
    span_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Of the span that is all of this request."""
    arrived_at: float = field(default_factory=time.time)
    edges: list[Edge] = field(default_factory=list)
    outcome: str | None = None
    num_tokens: int = 0
    _began: float = field(default_factory=time.perf_counter)

    def mark(self, name: str, **details: Detail) -> None:
        if len(self.edges) < MAX_EDGES or name == "ended":
            self.edges.append(Edge(name, time.perf_counter() - self._began, details))

    def count_tokens(self, num_tokens: int) -> None:
        if self.num_tokens == 0 and num_tokens > 0:
            self.mark("first token")
        self.num_tokens += num_tokens

    def first(self, name: str) -> Edge | None:
        return next((edge for edge in self.edges if edge.name == name), None)

    @property
    def duration_s(self) -> float:
        return self.edges[-1].at_s if self.edges else 0.0

    @property
    def trace_response(self) -> str:
        """The header `traceresponse` of W3C Trace Context: where a collector has this request."""
        flags = RANDOM if self.parent is None else self.parent.flags & RANDOM
        return f"00-{self.trace_id}-{self.span_id}-{flags | (SAMPLED if self.is_sampled else 0):02x}"

    def described(self) -> dict[str, Any]:
        """The body of GET /trace/{request_id}."""
        return {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "path": self.path,
            "arrived_at": self.arrived_at,
            "outcome": self.outcome,
            "num_tokens": self.num_tokens,
            "edges": [{"name": edge.name, "at_s": edge.at_s, **edge.details} for edge in self.edges],
        }


def mark(name: str, **details: Detail) -> None:
    """Note an edge of the request that this task works for, if it works for one."""
    journey = _current.get()
    if journey is not None:
        journey.mark(name, **details)


def current_journey() -> Journey | None:
    """Of the request that this task works for, if it works for one."""
    return _current.get()


def trace_headers() -> list[tuple[str, str]]:
    """What a response says of the trace of the request that this task works for."""
    journey = _current.get()
    return [] if journey is None else [("traceresponse", journey.trace_response)]


class JourneyLog:
    """The latest journeys by request id; `on_end` hears of each when it has ended. `is_tracing`: there is a collector
    for those whose client has not said that its trace is not recorded."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self.is_tracing = False
        self._max_kept = max_kept
        self._kept: OrderedDict[str, Journey] = OrderedDict()
        self.on_end: list[Callable[[Journey], None]] = []

    @contextmanager
    def following(
        self, request_id: str, path: str, trace_parent: str | None = None, trace_state: str | None = None
    ) -> Iterator[Journey]:
        """While this lasts, what this task and those it starts mark belongs to this request."""
        parent = parse_trace_parent(trace_parent, trace_state)
        is_sampled = self.is_tracing and (parent is None or bool(parent.flags & SAMPLED))
        trace_id = secrets.token_hex(16) if parent is None else parent.trace_id
        journey = Journey(request_id, path, trace_id, parent, is_sampled)
        self._keep(journey)
        token = _current.set(journey)
        journey.mark("arrived")
        try:
            yield journey
        finally:
            _current.reset(token)
            journey.mark("ended", outcome=journey.outcome)
            for tell in self.on_end:
                tell(journey)

    def find(self, request_id: str) -> Journey | None:
        """The latest request of this id."""
        return self._kept.get(request_id)

    def _keep(self, journey: Journey) -> None:
        self._kept.pop(journey.request_id, None)
        self._kept[journey.request_id] = journey
        if len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)


def parse_trace_parent(header: str | None, state: str | None = None) -> TraceParent | None:
    """Of the W3C headers traceparent and tracestate; None if the first is absent, or not valid. Later versions of it
    begin as this one does."""
    match = _TRACE_PARENT.fullmatch((header or "").strip())
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    if match[2] in _NOWHERE or match[3] in _NOWHERE:
        return None
    state = (state or "").strip()
    return TraceParent(match[2], match[3], int(match[4], 16), state if _TRACE_STATE.fullmatch(state) else "")
