"""Finding and preparing the NIXL library: everything that has to happen before the first agent exists."""

from __future__ import annotations

import importlib
import ipaddress
import os
from pathlib import Path
from types import ModuleType

import psutil

from tandem.workers.errors import UserError

_MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
"""The CUDA 12 and 13 wheels both serve host memory without CUDA. The plain name comes last: it imports torch."""
_GPU_SETTINGS = {
    # Otherwise UCX knows of GPU memory what its hooks into the CUDA runtime told it, and they need the runtime of the
    # wheel's own CUDA. Asked, the driver always knows.
    "UCX_MEMTYPE_CACHE": "n",
    # A pull is a read. Without NVLink UCX would send the bytes by TCP, even from one process to another on one GPU.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
}


_RDMA_DEVICES = Path("/sys/class/infiniband")


def load_nixl(host: str, device: str = "cpu") -> tuple[ModuleType, ModuleType]:
    """Prepare the environment for a worker listening on `host`, then import NIXL: its API module and its bindings.

    UCX reads its environment when the first agent is made, so this comes before. Raises `UserError`.
    """
    _prepare_environment(host, device)
    for name in _module_names(device):
        try:
            return importlib.import_module(f"{name}._api"), importlib.import_module(f"{name}._bindings")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise UserError(f"--transfer nixl: {name} is installed but does not load: {error}") from error
    raise UserError("--transfer nixl needs the NIXL library: pip install nixl-cu12, or choose another --transfer")


def _module_names(device: str) -> tuple[str, ...]:
    """On a GPU the wheel for torch's CUDA comes first."""
    if device == "cuda":
        import torch

        if (torch.version.cuda or "").startswith("13."):
            return ("nixl_cu13", "nixl_cu12", "nixl")
    return _MODULES


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def interface_of(host: str) -> str | None:
    """The name of the network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return name
    return None


def allowed_transports() -> set[str] | None:
    """What the user allows UCX to use by UCX_TLS; None when that is everything, or a list of exclusions."""
    setting = os.environ.get("UCX_TLS", "all").strip().lower()
    if setting in ("", "all") or setting.startswith("^"):
        return None
    return {name.strip() for name in setting.split(",")}


def _prepare_environment(host: str, device: str) -> None:
    for name, value in _GPU_SETTINGS.items() if device == "cuda" else ():
        os.environ.setdefault(name, value)
    if is_loopback(host):
        # Otherwise UCX listens on, and stripes over, every interface of the machine.
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    elif not any(_RDMA_DEVICES.glob("*")):
        # Only the interface that peers were told of: UCX takes another's address, and loopback's, for reachable.
        interface = interface_of(host)
        if interface is not None:
            os.environ.setdefault("UCX_NET_DEVICES", interface)
    # NIXL's own logger announces every agent at INFO.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    allowed = allowed_transports()
    excluded = os.environ.get("UCX_TLS", "").lower().removeprefix("^").split(",") if allowed is None else []
    if "tcp" in excluded or (allowed is not None and not allowed & {"tcp", "all"}):
        raise UserError(
            f"UCX_TLS={os.environ['UCX_TLS']}: must allow tcp, which UCX needs to notice that a peer has died"
        )
