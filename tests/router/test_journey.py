"""A request's life is noted by whoever works for it, and found again by its id; trace headers come and go."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.router.journey import JourneyLog, current_journey, mark, parse_trace_parent, trace_headers

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


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
        (f"00-{TRACE}-{PARENT}-01", (TRACE, PARENT, 1)),
        (f" 00-{TRACE}-{PARENT}-00 ", (TRACE, PARENT, 0)),
        (f"00-{TRACE}-{PARENT}-03", (TRACE, PARENT, 3)),
        (f"01-{TRACE}-{PARENT}-01-more", (TRACE, PARENT, 1)),
        (f"00-{TRACE}-{PARENT}-01-more", None),
        (f"ff-{TRACE}-{PARENT}-01", None),
        (f"00-{TRACE.upper()}-{PARENT}-01", None),
        (f"00-{'0' * 32}-{PARENT}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        ("", None),
        (None, None),
    ],
)
def test_trace_parents(header: str | None, expected: tuple[str, str, int] | None) -> None:
    found = parse_trace_parent(header)
    assert (found and (found.trace_id, found.span_id, found.flags)) == expected


@pytest.mark.parametrize(
    ("state", "kept"), [("a=1,b=2", "a=1,b=2"), ("x" * 513, ""), ("k\u00e4se=1", ""), ("a=1\r\nb: 2", ""), (None, "")]
)
def test_trace_states(state: str | None, kept: str) -> None:
    found = parse_trace_parent(f"00-{TRACE}-{PARENT}-01", state)
    assert found is not None
    assert found.state == kept


@pytest.mark.parametrize(("flags", "answered"), [(None, "03"), (0, "00"), (1, "01"), (2, "02"), (3, "03")])
def test_a_response_says_whether_its_trace_is_recorded(flags: int | None, answered: str) -> None:
    log = JourneyLog()
    log.is_tracing = True
    with log.following("a", "/", None if flags is None else f"00-{TRACE}-{PARENT}-{flags:02x}") as journey:
        ((name, value),) = trace_headers()
    assert name == "traceresponse"
    assert value == f"00-{journey.trace_id}-{journey.span_id}-{answered}"
    assert journey.is_sampled == bool(int(answered) & 1)
    assert trace_headers() == []


def test_without_a_collector_nothing_is_recorded() -> None:
    with JourneyLog().following("a", "/", f"00-{TRACE}-{PARENT}-01") as journey:
        assert journey.trace_response == f"00-{TRACE}-{journey.span_id}-00"


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
