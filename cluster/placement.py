"""Where workers go: what each takes of a machine, how pools are laid over machines, what a machine finds out itself.

ClusterConfig -> placement_of(config) -> Placement -> bundle_of(worker), actor_options(bundle)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from tandem.cluster.config import ClusterConfig
from tandem.cluster.gpus import gpus_per_worker
from tandem.workers.config import WorkerConfig
from tandem.workers.types import Role

LOCAL_TIMEOUT_S = 30.0
JOINED_TIMEOUT_S = 1800.0
"""A cluster that scales itself needs minutes to bring a machine up."""

_BUILT_IN = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Resources that Ray takes as arguments of their own."""


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What only the machine of a worker can turn into an address or a folder. Goes to the actor."""

    model: str
    """MODEL as the user said it: looked for on the worker's machine when the launcher's folder is not there."""
    network: str | None = None
    """The network in which the worker's address lies; None: the machine's address in Ray."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The default is this machine alone."""

    strategy: str = "PACK"
    gpus_per_worker: float = 1.0
    """With device "cuda". Less than one: they share."""
    resources: dict[Role, dict[str, float]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """Added to that of every worker's process."""
    node: NodeSettings | None = None
    timeout_s: float = LOCAL_TIMEOUT_S

    def bundle_of(self, worker: WorkerConfig) -> dict[str, float]:
        """What one worker takes of a machine, in Ray's words."""
        bundle: dict[str, float] = {"CPU": worker.num_threads}
        if worker.device == "cuda":
            bundle["GPU"] = self.gpus_per_worker
        return bundle | self.resources.get(worker.role, {})


def placement_of(config: ClusterConfig) -> Placement:
    """As configured: of this machine alone, or of the machines of a Ray that was joined."""
    ports = config.transfer_ports
    return Placement(
        strategy=config.placement.upper().replace("-", "_"),
        gpus_per_worker=gpus_per_worker(config),
        resources={
            "prefill": config.prefill_resources,
            "decode": config.decode_resources,
            "aggregated": config.aggregated_resources,
        },
        environment={} if ports is None else {"UCX_TCP_PORT_RANGE": ports},
        node=None if config.address is None else NodeSettings(model=config.model, network=config.worker_host),
        timeout_s=LOCAL_TIMEOUT_S if config.address is None else JOINED_TIMEOUT_S,
    )


def actor_options(bundle: dict[str, float]) -> dict[str, Any]:
    """The same as arguments of an actor that fills the bundle."""
    options: dict[str, Any] = {_BUILT_IN[name]: amount for name, amount in bundle.items() if name in _BUILT_IN}
    options["num_gpus"] = options.get("num_gpus", 0)
    return options | {"resources": {name: amount for name, amount in bundle.items() if name not in _BUILT_IN}}
