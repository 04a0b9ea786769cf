"""`tandem status`: the answer of /cluster as a table."""

from __future__ import annotations

import json
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from tandem.workers.errors import UserError

MIN_WIDTH = 120
STATES = {"ready": "green", "connecting": "yellow", "refused": "red", "lost": "red"}
INDEX = {True: "[green]up[/]", False: "[red]down[/] (requests are served without its hints)", None: "not configured"}


def show_status(url: str, *, as_json: bool) -> None:
    """Print the workers of the cluster whose admin port is `url`. Raises `UserError` if there is none."""
    cluster, console = fetch_cluster(url), wide_console()
    if as_json:
        console.print_json(json.dumps(cluster))
    else:
        console.print(status_table(cluster))
        for line in (*pair_lines(cluster), *gateway_lines(cluster)):
            console.print(line, highlight=False)
        if cluster.get("draining"):
            console.print("[yellow]draining[/]: no request is taken any more")
        for reason in cluster.get("degraded", ()):
            console.print(f"[red]degraded[/]: {reason}")
        console.print(f"model {cluster['model']}   prefix index {INDEX[cluster['redis']['up']]}")


def wide_console() -> Console:
    """For tables: a wrapped line can be read, a cut one cannot."""
    console = Console()
    return console if console.width >= MIN_WIDTH else Console(width=MIN_WIDTH)


def fetch_cluster(url: str) -> dict[str, Any]:
    """GET /cluster. Raises `UserError`."""
    try:
        # an admin port is never behind the proxy of the environment
        answer = httpx.get(f"{url.rstrip('/')}/cluster", timeout=5.0, trust_env=False).raise_for_status()
        cluster: dict[str, Any] = answer.json()
    except httpx.HTTPStatusError as error:
        raise UserError(f"{url} is not the admin port of a Tandem cluster: {error.response.status_code}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(
            f"no Tandem cluster answers at {url} ({type(error).__name__}); is --url the admin port?"
        ) from error
    except ValueError as error:
        raise UserError(f"{url} is not the admin port of a Tandem cluster") from error
    if not isinstance(cluster, dict) or "workers" not in cluster:
        raise UserError(f"{url} is not the admin port of a Tandem cluster")
    return cluster


def status_table(cluster: dict[str, Any]) -> Table:
    """One row per worker. Blocks by state; `running` and `waiting` are sequences."""
    columns = ("used", "cached", "incoming", "free", "quarantined", "total")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("worker", "role", "state"):
        table.add_column(name)
    for name in ("pid", "epoch", "running", "waiting", *columns):
        table.add_column(name, justify="right")
    for worker in cluster["workers"]:
        color = STATES.get(worker["state"], "white")
        numbers = [worker[name] for name in ("pid", "epoch", "running", "waiting")]
        numbers += [worker["blocks"][name] for name in columns]
        cells = ["-" if number is None else str(number) for number in numbers]
        table.add_row(worker["id"], worker["role"], f"[{color}]{worker['state']}[/]", *cells)
    return table


def gateway_lines(cluster: dict[str, Any]) -> list[str]:
    """The processes behind the public port, where they are several."""
    return [
        f"gateway {gateway['id']}: {gateway['state']}, process {gateway['pid']}, restarted {gateway['restarts']} times"
        for gateway in cluster.get("gateways", ())
    ]


def pair_lines(cluster: dict[str, Any]) -> list[str]:
    """Who pulls KV from whom, over what, and how fast the first measured pull was."""
    lines = []
    for worker in cluster["workers"]:
        for pair in worker.get("pairs", ()):
            path = (
                f"{pair['transport']}, {pair['gigabytes_per_s']:.1f} GB/s" if pair["error"] is None else pair["error"]
            )
            lines.append(f"{worker['id']} pulls from {pair['prefill']}: {path}")
    return lines
