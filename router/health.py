"""Is the house in order? Three questions, from the live set alone.

live    the process answers
health  requests can be served: somebody can decode
ready   everything that the cluster was started with is there; a missing part is named
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.router.config import GatewayConfig
from tandem.router.workers import WorkerLink, WorkerSet


def can_serve(workers: WorkerSet) -> bool:
    return any(link.can_decode for link in workers.ready())


def is_idle(workers: WorkerSet) -> bool:
    """No worker does anything for anybody, as far as they have told: at each heartbeat."""
    told = [link.snapshot for link in workers.ready() if link.snapshot is not None]
    return not any(snapshot.num_running or snapshot.num_waiting for snapshot in told)


def missing_parts(config: GatewayConfig, workers: WorkerSet, *, is_draining: bool) -> list[str]:
    """One sentence per missing part; empty when ready."""
    ready = workers.ready()
    present = {role: sum(link.address.role == role for link in ready) for role in ("prefill", "decode", "aggregated")}
    wanted = {"prefill": config.num_prefill, "decode": config.num_decode, "aggregated": config.num_aggregated}
    missing = [
        f"no {role} worker is alive ({num_wanted} wanted)"
        for role, num_wanted in wanted.items()
        if num_wanted > 0 and present[role] == 0
    ]
    if not missing and not can_serve(workers):
        missing.append("no worker that decodes is alive")
    if missing:
        missing += refusals(workers)
    missing += refused_pairs(ready)
    if is_draining:
        missing.append("the gateway is draining")
    return missing


def refusals(workers: WorkerSet) -> list[str]:
    """One sentence per worker that is alive and must not serve beside the others."""
    return [f"{link.worker_id} gets no requests: {link.refusal}" for link in workers.links() if link.refusal]


def refused_pairs(links: Sequence[WorkerLink]) -> list[str]:
    return [
        f"{link.worker_id} cannot take KV from {prefill}: {paired.error}"
        for link in links
        for prefill, paired in link.pairs.items()
        if paired.error is not None
    ]


def is_complete(config: GatewayConfig, workers: WorkerSet) -> bool:
    """True once every worker of the start is alive and every decode worker has tried every prefill worker."""
    ready = workers.ready()
    prefill = [link for link in ready if link.address.role == "prefill"]
    decode = [link for link in ready if link.address.role == "decode"]
    num_aggregated = sum(link.address.role == "aggregated" for link in ready)
    if len(prefill) < config.num_prefill or len(decode) < config.num_decode or num_aggregated < config.num_aggregated:
        return False
    return can_serve(workers) and all(link.worker_id in other.pairs for link in prefill for other in decode)


def describe_cluster(config: GatewayConfig, workers: WorkerSet, *, redis_up: bool | None) -> dict[str, Any]:
    """The body of GET /cluster. `redis_up`: None where none is configured."""
    return {
        "workers": [_describe(link) for link in workers.links()],
        "redis": {"up": redis_up},
        "model": config.model_name,
        "max_model_len": config.max_model_len,
    }


def _describe(link: WorkerLink) -> dict[str, Any]:
    snapshot = link.snapshot
    states = ("total", "free", "cached", "used", "incoming", "quarantined")
    return {
        "id": link.worker_id,
        "role": link.address.role,
        "pid": None if snapshot is None else snapshot.pid,
        "epoch": link.address.epoch,
        "state": link.state,
        "numerics": None if link.identity is None else link.identity.numerics,
        "address": f"{link.address.host}:{link.address.port}",
        "blocks": {state: 0 if snapshot is None else getattr(snapshot.blocks, state) for state in states},
        "running": 0 if snapshot is None else snapshot.num_running,
        "waiting": 0 if snapshot is None else snapshot.num_waiting,
        "pairs": [
            {
                "prefill": prefill,
                "error": paired.error,
                "transport": paired.transport,
                "gigabytes_per_s": paired.gigabytes_per_s,
            }
            for prefill, paired in sorted(link.pairs.items())
        ],
    }
