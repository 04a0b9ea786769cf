"""Writes the Grafana boards beside this file: `python deploy/dashboards/make_dashboards.py`.

A board is a few rows of panels; a panel is a title, a unit and one expression per line drawn. What gateways count is
summed over them. What workers count, every gateway shows: there the largest is taken, so that two gateways do not
make it twice as much.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
COLUMNS = 24
HEIGHT = 8


@dataclass(frozen=True)
class Panel:
    """`lines` is (legend, expression)."""

    title: str
    unit: str
    lines: Sequence[tuple[str, str]]


def quantiles(metric: str, *labels: str) -> list[tuple[str, str]]:
    """p50, p90 and p99 of a histogram."""
    by = ", ".join(("le", *labels))
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    return [
        (
            f"p{percent} {legend}".strip(),
            f"histogram_quantile({percent / 100}, sum by ({by}) (rate({metric}_bucket[5m])))",
        )
        for percent in (50, 90, 99)
    ]


def per_second(metric: str, label: str = "") -> list[tuple[str, str]]:
    """Of a counter of the gateways."""
    by = f" by ({label})" if label else ""
    return [(f"{{{{{label}}}}}" if label else "all", f"sum{by} (rate({metric}[5m]))")]


def of_workers(metric: str, *labels: str, selector: str = "", is_rate: bool = False) -> list[tuple[str, str]]:
    """Of something that workers count and every gateway shows."""
    by = ", ".join(labels)
    value = f"rate({metric}{selector}[5m])" if is_rate else f"{metric}{selector}"
    return [(" ".join(f"{{{{{label}}}}}" for label in labels) or "all", f"max by ({by}) ({value})")]


CACHED = (
    "sum by (source) (rate(tandem_cached_tokens_total[5m])) / on() group_left sum(rate(tandem_prompt_tokens_total[5m]))"
)
BLOCKS = "sum by (state) (max by (role, worker, state) (tandem_kv_blocks))"
IN_FLIGHT = [("in flight", "sum(tandem_requests_in_flight)"), ("held back", "sum(tandem_requests_held_back)")]
UP = [("index, {{pod}}", "tandem_prefix_index_up"), ("Ray, {{pod}}", "tandem_control_plane_up")]
ODDS = [
    ("embeddings", "sum(rate(tandem_embeddings_total[5m]))"),
    ("pauses", "sum(rate(tandem_slow_reader_pauses_total[5m]))"),
]
STEPS = [
    ("{{role}} {{how}}", "max by (role, how) (rate(tandem_steps_total[5m]))"),
    ("{{role}} {{order}}", "max by (role, order) (rate(tandem_steps_decided_total[5m]))"),
]
LOST_OF_TIERS = [
    ("{{tier}} dropped", "max by (tier) (rate(tandem_kv_tier_dropped_blocks_total[5m]))"),
    ("{{tier}} evicted", "max by (tier) (rate(tandem_kv_tier_evicted_blocks_total[5m]))"),
    ("{{tier}} {{reason}}", "max by (tier, reason) (rate(tandem_kv_tier_failures_total[5m]))"),
]
QUARANTINED = '{state="quarantined"}'

OVERVIEW = [
    [
        Panel("Requests that ended", "reqps", per_second("tandem_requests_total", "outcome")),
        Panel("Requests in flight", "short", IN_FLIGHT),
        Panel("Failed, of all that ended", "percentunit", [("failed", "tandem:requests_failed:ratio5m")]),
    ],
    [
        Panel("Time to first token", "s", quantiles("tandem_time_to_first_token_seconds")),
        Panel("Between tokens", "s", quantiles("tandem_inter_token_latency_seconds")),
        Panel("Whole request", "s", quantiles("tandem_request_duration_seconds")),
    ],
    [
        Panel("Prompt tokens", "short", per_second("tandem_prompt_tokens_total")),
        Panel("Generated tokens", "short", per_second("tandem_generation_tokens_total")),
        Panel("Prompt tokens served from a cache", "percentunit", [("{{source}}", CACHED)]),
    ],
    [
        Panel("Where prompts are read", "reqps", per_second("tandem_prefills_total", "path")),
        Panel("Requests moved off a worker", "reqps", per_second("tandem_migrations_total", "reason")),
        Panel("Prefix index and Ray answer", "short", UP),
    ],
    [
        Panel(
            "First token, of what was predicted", "percentunit", quantiles("tandem_time_to_first_token_over_predicted")
        ),
        Panel("Predicted time to first token", "s", quantiles("tandem_predicted_time_to_first_token_seconds")),
        Panel("Embeddings, and clients that read too slowly", "reqps", ODDS),
    ],
]

WORKERS = [
    [
        Panel("Sequences in the batch", "short", of_workers("tandem_requests_running", "role", "worker")),
        Panel("Sequences that wait", "short", of_workers("tandem_requests_waiting", "role", "worker")),
        Panel("Time in the queue", "s", quantiles("tandem_queue_seconds", "role")),
    ],
    [
        Panel("KV blocks in use", "percentunit", [("{{role}}", "tandem:kv_use:ratio")]),
        Panel("KV blocks by state", "short", [("{{state}}", BLOCKS)]),
        Panel("Quarantined blocks", "short", of_workers("tandem_kv_blocks", "role", "worker", selector=QUARANTINED)),
    ],
    [
        Panel("One step", "s", quantiles("tandem_step_seconds", "role")),
        Panel("Handover", "s", quantiles("tandem_handover_seconds")),
        Panel("One pull of KV", "s", quantiles("tandem_kv_transfer_seconds")),
    ],
    [
        Panel("KV that travels", "Bps", of_workers("tandem_kv_transfer_bytes_total", is_rate=True)),
        Panel(
            "Transfers that failed", "short", of_workers("tandem_kv_transfer_failures_total", "reason", is_rate=True)
        ),
        Panel("Router's decision", "s", quantiles("tandem_router_decision_seconds")),
    ],
    [
        Panel("Blocks below the pool", "short", of_workers("tandem_kv_tier_blocks", "tier", "worker")),
        Panel(
            "KV to and from tiers", "Bps", of_workers("tandem_kv_tier_bytes_total", "tier", "direction", is_rate=True)
        ),
        Panel("Blocks that tiers lost", "short", LOST_OF_TIERS),
    ],
    [
        Panel("Fetches from peers", "reqps", of_workers("tandem_kv_fetches_total", "outcome", is_rate=True)),
        Panel("Promises that nobody ended", "short", of_workers("tandem_leases_expired_total", is_rate=True)),
        Panel("Steps, by how they ran, and were decided", "short", STEPS),
    ],
]

BOARDS = {
    "tandem-overview": ("Tandem: what clients get", OVERVIEW),
    "tandem-workers": ("Tandem: workers and KV", WORKERS),
}


def board(name: str, title: str, rows: Sequence[Sequence[Panel]]) -> dict[str, Any]:
    panels = []
    for row, members in enumerate(rows):
        width = COLUMNS // len(members)
        for column, panel in enumerate(members):
            place = {"x": column * width, "y": row * HEIGHT, "w": width, "h": HEIGHT}
            panels.append(_panel(len(panels) + 1, panel, place))
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "uid": name,
        "title": title,
        "tags": ["tandem"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(panel.lines)
        ],
    }


def render(name: str) -> str:
    return json.dumps(board(name, *BOARDS[name]), indent=1) + "\n"


if __name__ == "__main__":
    for each in BOARDS:
        (FOLDER / f"{each}.json").write_text(render(each))
