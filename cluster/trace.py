"""`tandem trace REQUEST_ID`: one request's life, as the gateway that served it remembers it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import httpx
import typer

from tandem.workers.errors import UserError

SECONDS = ("queue_s", "handover_s", "predicted_s")


def show_trace(request_id: str, urls: Sequence[str], *, as_json: bool) -> None:
    """Print it. Raises `UserError` if none of the gateways knows it."""
    journey = find_trace(request_id, urls)
    typer.echo(json.dumps(journey, indent=1) if as_json else "\n".join(trace_lines(journey)))


def find_trace(request_id: str, urls: Sequence[str]) -> dict[str, Any]:
    """From the first gateway that knows it. Raises `UserError`."""
    silent = []
    for url in urls:
        try:
            answer = httpx.get(f"{url.rstrip('/')}/trace/{quote(request_id, safe='')}", timeout=5.0, trust_env=False)
            journey: dict[str, Any] = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):  # nobody, or somebody who is no gateway
            silent.append(url)
            continue
        if answer.status_code == 200:
            return journey
    if silent:
        raise UserError(f"no gateway answers at {', '.join(silent)}; is --url the admin port?")
    raise UserError(f"no request {request_id} is remembered: wrong id, another gateway's (--url), or long ago")


def trace_lines(journey: Mapping[str, Any]) -> list[str]:
    """For people: when, how long since the edge before, what."""
    edges = journey["edges"]
    arrived = datetime.fromtimestamp(journey["arrived_at"], UTC).isoformat(sep=" ", timespec="milliseconds")
    outcome = journey["outcome"] or "still running"
    total_ms = 1000 * edges[-1]["at_s"] if edges else 0.0
    lines = [
        f"{journey['request_id']}  {journey['path']}  {outcome}",
        f"arrived {arrived}, {journey['num_tokens']} tokens in {total_ms:.1f} ms, trace {journey['trace_id']}",
        "",
        f"{'at ms':>10} {'took':>9}  edge",
    ]
    before = 0.0
    for edge in edges:
        details = "  ".join(_detail(name, value) for name, value in edge.items() if name not in ("name", "at_s"))
        lines.append(
            f"{1000 * edge['at_s']:10.1f} {1000 * (edge['at_s'] - before):+9.1f}  {edge['name']:<12} {details}"
        )
        before = edge["at_s"]
    return [line.rstrip() for line in lines]


def _detail(name: str, value: Any) -> str:
    if name in SECONDS:
        return f"{name.removesuffix('_s')} {'-' if value is None else f'{1000 * value:.1f} ms'}"
    return f"{name} {'-' if value is None else value}"
