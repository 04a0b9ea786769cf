"""A Ray of our own: local, on loopback only, with a token that nobody else has, gone when we are gone. Or one that runs
already, on several machines, which we join and leave.

Ray places and starts processes; no token, KV byte or heartbeat goes through it.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from functools import partial
from pathlib import Path

from tandem.cluster.guard import end_processes, this_family
from tandem.workers.errors import TandemError, UserError

logger = logging.getLogger(__name__)

CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Where `ray start` writes the address of the head."""
CONNECT_TIMEOUT_S = 5.0
HEAD_TIMEOUT_S = "86400"
"""Of Ray's own patience with a head that is away."""
OBJECT_STORE_BYTES = 80 << 20
"""Ray refuses less than 75 MiB, and we store nothing in it."""


class RayNotStarted(TandemError):
    """Twice, on this machine."""


def prepare_environment() -> None:
    """What must be in the environment before `ray` is imported; its processes, and the workers, inherit it."""
    os.environ.update(
        # Always set: Ray 2.60 otherwise takes its mode and token from files in the user's home.
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        # Ray replaces a node address of 127.0.0.1 by that of the network card, and listens on all interfaces then.
        # With clusters of several machines declared unsupported it keeps the loopback, and every listener is on it.
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        # A folder named `kernels` in the user's current directory must not become a package in our processes.
        PYTHONSAFEPATH="1",
    )


def start_ray(folder: Path, *, num_cpus: int, num_gpus: int) -> None:
    """Start Ray's processes below `folder`. Blocks for 4 to 12 s. Raises `RayNotStarted`.

    The thread that calls this must live as long as Ray is needed: its processes end with the thread that started them.
    """
    begin = partial(_start_node, folder, num_cpus=num_cpus, num_gpus=num_gpus)
    before = this_family()
    try:
        begin()
    except Exception:  # noqa: BLE001 Ray has no type of its own for a node that is late
        # It waits 30 s, which the first start after an installation can miss on a busy machine. Then all is compiled.
        logger.warning("Ray did not start in its time: once more")
        stop_ray()
        end_processes(str(folder), spared=before)
        try:
            begin()
        except Exception as error:
            raise RayNotStarted(f"Ray did not start, twice: {error} Is the machine very busy?") from error


def _start_node(folder: Path, *, num_cpus: int, num_gpus: int) -> None:
    import ray

    ray.init(
        address="local",
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        configure_logging=True,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder / "ray"),  # Ray lets everybody write here; `folder` itself stays ours
    )


def prepare_to_join() -> None:
    """The same for a Ray that runs already. Its mode and token are the user's: RAY_AUTH_MODE, RAY_AUTH_TOKEN."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", PYTHONSAFEPATH="1")
    # A driver that misses its head for a minute aborts, in the middle of everybody's streams. We decide: ray_watch.py.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", HEAD_TIMEOUT_S)


def join_ray(address: str) -> None:
    """Become a driver of the Ray at `address` ("auto", or host:port of its head). Raises `UserError`.

    There must be a node of it on this machine: a driver talks to the raylet beside it.
    """
    found = find_head(address)  # before Ray is asked: it would try for a quarter of an hour, deaf to signals
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(
            address=found,
            namespace="tandem",
            log_to_driver=False,
            configure_logging=True,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"--address {address}: no Ray to join ({reason}); is `ray start` done on this machine, and are "
            f"RAY_AUTH_MODE and RAY_AUTH_TOKEN those of its head?"
        ) from error


def find_head(address: str) -> str:
    """HOST:PORT of the head, where something listens. "auto" is RAY_ADDRESS, or the cluster that `ray start` joined on
    this machine. Raises `UserError`."""
    wanted = address
    if address == "auto":
        written = CURRENT_CLUSTER.read_text().strip() if CURRENT_CLUSTER.exists() else ""
        wanted = os.environ.get("RAY_ADDRESS") or written
        if not wanted:
            raise UserError("--address auto: there is no Ray on this machine; run `ray start` first, or name its head")
    host, _, port = wanted.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--address {wanted!r} is not of the form HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"--address {wanted}: no head of a Ray cluster listens there") from error
    return wanted


def stop_ray() -> None:
    """Stop the Ray that `start_ray` started, and no other; or leave the one that was joined."""
    import ray

    ray.shutdown()
