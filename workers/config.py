"""Configuration of one worker: frozen, validated once, torch-free. "auto" is resolved before it comes here."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tandem.workers.errors import UserError
from tandem.workers.types import Role

TransferName = Literal["nixl", "nccl", "local"]
CpuLevel = Literal["amx_bf16", "avx512_bf16", "avx512", "avx2", "plain"]
"""Instruction sets that the native ops are made for, best first. Each gives bits of its own."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one worker needs to know. Sizes in tokens, blocks or bytes as named; times in seconds.

    Raises `UserError` naming the field when a value cannot work.
    """

    model_path: Path
    """A folder in Hugging Face format (GGUF files are converted to one before a worker starts)."""
    model_name: str
    role: Role
    worker_id: str
    epoch: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    """0 lets the system choose."""
    device: Literal["cpu", "cuda"] = "cpu"
    cpu_level: CpuLevel | None = None
    """With device "cpu". None: the best that the machine runs."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    block_size: int = 32
    max_model_len: int = 8192
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    """Most tokens that one step computes; prefill chunks are cut to it, in multiples of the block."""
    kv_cache_memory_bytes: int | None = 1 << 30
    """None, on a GPU only: what is left of this worker's share of its memory."""
    gpu_memory_utilization: float = 0.9
    """Of a GPU's memory, what its workers take together: weights, workspaces, graphs and KV."""
    gpu_share: float = 1.0
    """Of one GPU and of that memory: what this worker has. Others may have the rest."""
    kv_host_memory_bytes: int = 0
    """Host memory for blocks that the KV cache evicts. 0: none."""
    kv_disk_path: Path | None = None
    """A folder, in which this worker makes one of its own, for blocks that host memory (or the cache) gives up."""
    kv_disk_bytes: int = 0
    """Most bytes that it may take there."""
    transfer: TransferName = "nixl"
    num_threads: int = 1
    tuning_file: Path | None = None
    """Where the autotuner's results are kept; None: nowhere."""
    tuning_deadline_s: float = 0.0
    """Most time to tune kernels at the start, when the file does not know them. 0: what is unknown keeps defaults."""
    cluster_key: bytes = b""
    """Authenticates connections and keys the block hashes. Must be the same on every worker and gateway."""
    lease_s: float = 30.0
    heartbeat_s: float = 1.0
    """Between a decode worker's renewals of its leases. A prefill worker that is silent for three of them is lost."""
    pull_timeout_s: float = 10.0
    local_prefill_tokens: int = 64
    """A decode worker prefills itself when at most this many prompt tokens are missing."""

    def __post_init__(self) -> None:
        def require(ok: bool, field: str, rule: str) -> None:
            if not ok:
                raise UserError(f"{field} {rule}, but is {getattr(self, field)!r}")

        size = self.block_size
        require(size >= 2 and size & (size - 1) == 0, "block_size", "must be a power of two greater than 1")
        require(self.max_model_len >= 1, "max_model_len", "must be at least 1")
        require(self.max_num_seqs >= 1, "max_num_seqs", "must be at least 1")
        require(
            self.max_num_batched_tokens >= size and self.max_num_batched_tokens % size == 0,
            "max_num_batched_tokens",
            f"must be a positive multiple of block_size ({size})",
        )
        require(self.num_threads >= 1, "num_threads", "must be at least 1")
        memory = self.kv_cache_memory_bytes
        require(memory is not None or self.device == "cuda", "kv_cache_memory_bytes", "must be given")
        require(memory is None or memory > 0, "kv_cache_memory_bytes", "must be positive")
        for field in ("gpu_memory_utilization", "gpu_share"):
            require(0 < getattr(self, field) <= 1, field, "must be above 0 and at most 1")
        require(self.kv_host_memory_bytes >= 0, "kv_host_memory_bytes", "must not be negative")
        require(self.kv_disk_bytes >= 0, "kv_disk_bytes", "must not be negative")
        require(
            (self.kv_disk_path is None) == (self.kv_disk_bytes == 0), "kv_disk_bytes", "and kv_disk_path go together"
        )
        require(self.tuning_deadline_s >= 0, "tuning_deadline_s", "must not be negative")
