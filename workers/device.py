"""The GPU of one worker: whether it can be used, and how much of its memory is for KV.

total * utilization * share ─┬─ weights, workspaces, graphs, CUDA's own     measured when all of them are there
                             └─ KV                                          what is left
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass

import torch

from tandem.kernels.triton.device import architecture_of
from tandem.workers.errors import UserError

CONTEXT_BYTES = 768 << 20
"""What CUDA takes of a GPU for one process, loaded kernels included, beside torch's memory. A guess, needed only where
several workers share a GPU: one that has it to itself can tell from what is free."""
_GIB = 1 << 30


def check_cuda() -> None:
    """Raises `UserError` in place of what torch would raise in the middle of loading a model."""
    if torch.version.cuda is None:
        raise UserError(f"--device cuda: torch {torch.__version__} is built without CUDA; install one with, or use cpu")
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise UserError(
            f"--device cuda: torch finds no GPU; does the driver serve CUDA {torch.version.cuda}, and is "
            f"CUDA_VISIBLE_DEVICES ({visible}) right?"
        )
    try:
        architecture_of(torch.device("cuda", torch.cuda.current_device()))
    except ValueError as error:
        raise UserError(f"--device cuda: {error}") from error


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device."""

    total: int
    free: int
    """Whatever anybody has taken is not in it."""
    reserved: int
    """Taken by torch in this process."""

    @classmethod
    def of(cls, device: torch.device) -> DeviceMemory:
        """As it is now. What torch has cached counts as taken: later steps need again what dry ones needed."""
        gc.collect()
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device))


def kv_memory_bytes(memory: DeviceMemory, utilization: float, share: float) -> int:
    """What is left for KV of `share` of the device, if all of its workers together take `utilization` of it.

    Others on the same device may be loading at this moment, so what is free says nothing about this worker's own share
    unless that is the whole. Raises `UserError` when nothing is left.
    """
    taken = memory.total - memory.free if share >= 1 else memory.reserved + CONTEXT_BYTES
    allowed = int(memory.total * utilization * share)
    left = min(allowed - taken, memory.free)
    if left > 0:
        return left
    of_share = "" if share >= 1 else f" and a share of {share:g} of it"
    raise UserError(
        f"no GPU memory is left for KV: of {_gib(memory.total)} this worker may take {_gib(allowed)} "
        f"(--gpu-memory-utilization {utilization:g}{of_share}), {_gib(taken)} are taken by weights, workspaces, graphs "
        f"and others, and {_gib(memory.free)} are free"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
