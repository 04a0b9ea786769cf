"""What a configuration comes to for one model on these machines: numbers where it says "auto", and each one's share.

resolve(config, model) -> ResolvedConfig -> worker_configs(...), gateway_config(...)
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from tandem.cluster.config import ClusterConfig, DeviceChoice, keys_in
from tandem.cluster.config_sources import flag
from tandem.cluster.gpus import count_gpus, gpu_share
from tandem.cluster.model_cache import cache_folder
from tandem.cluster.model_source import Device, ResolvedModel
from tandem.cluster.network import LOOPBACK, port_range
from tandem.kernels.tuning_cache import TUNING_FILE
from tandem.router.config import GatewayConfig
from tandem.workers.config import WorkerConfig
from tandem.workers.errors import UserError
from tandem.workers.models.checkpoint import DtypeName
from tandem.workers.transfer.base import NUM_PROBE_BLOCKS
from tandem.workers.types import Role

ROLES: tuple[Role, ...] = ("prefill", "decode", "aggregated")

KV_MEMORY_SHARE = 0.25
"""Of the machine's memory, for the KV of all workers together: people have other programs open."""
KV_MEMORY_CAP_BYTES = 1 << 30
"""Per worker, unless told otherwise. Holds 46,000 tokens of the demo model."""
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class ResolvedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A `ClusterConfig` with nothing left open: model found, sizes fixed."""

    cluster: ClusterConfig
    model_path: Path
    model_name: str
    device: Device
    dtype: DtypeName
    max_model_len: int
    kv_cache_memory_bytes: int | None
    """None: what is left of a worker's share of its GPU."""
    num_threads: int


def resolve_device(choice: DeviceChoice, *, is_elsewhere: bool = False) -> Device:
    """CUDA, if the machine has such a device. Looks for its file: asking torch takes seconds.

    `is_elsewhere`: the workers run on other machines, and a choice of CUDA is taken on trust.
    """
    has_cuda = count_gpus() > 0
    if choice == "cuda" and is_elsewhere:
        return "cuda"
    if choice == "cuda" and not has_cuda:
        raise UserError("--device cuda: this machine has no CUDA device")
    return "cuda" if has_cuda and choice != "cpu" else "cpu"


def resolve(
    config: ClusterConfig,
    model: ResolvedModel,
    *,
    memory_bytes: int | None = None,
    num_cores: int | None = None,
) -> ResolvedConfig:
    """Fix what depends on the model and the machine. Raises `UserError` when the KV cache cannot hold one request."""
    total_workers = sum(config.num_workers)
    machine_bytes = psutil.virtual_memory().total if memory_bytes is None else memory_bytes
    cores = available_cores() if num_cores is None else num_cores
    device = resolve_device(config.device, is_elsewhere=config.address is not None)
    kv_bytes = config.kv_cache_memory_bytes
    if kv_bytes is None and device == "cpu":
        kv_bytes = min(int(machine_bytes * KV_MEMORY_SHARE / total_workers), KV_MEMORY_CAP_BYTES)
    host_bytes = 0 if kv_bytes is None or device == "cuda" else kv_bytes
    if config.address is None and host_bytes * total_workers > machine_bytes:
        raise UserError(
            f"--kv-cache-memory-bytes {kv_bytes} for {total_workers} workers exceeds this machine's memory of "
            f"{machine_bytes} bytes"
        )
    if device != "cpu" and config.cpu_level != "auto":
        raise UserError(f"--cpu-level {config.cpu_level} is for CPUs, but workers compute on {device}: see --device")
    _check_tiers(config, model, host_bytes, machine_bytes)
    return ResolvedConfig(
        cluster=config,
        model_path=model.folder,
        model_name=model.name,
        device=device,
        dtype=model.dtype,
        max_model_len=_max_model_len(config, model, kv_bytes),
        kv_cache_memory_bytes=kv_bytes,
        num_threads=config.worker_threads or max(1, cores // total_workers),
    )


def _check_tiers(config: ClusterConfig, model: ResolvedModel, cache_bytes: int, machine_bytes: int) -> None:
    """Each tier holds a block at least, and there is room for all of them. `cache_bytes` of host memory per worker are
    taken already. Raises `UserError`."""
    block_bytes, num_workers = _block_bytes(config, model), sum(config.num_workers)
    for field, size in (("kv_host_memory_bytes", config.kv_host_memory_bytes), ("kv_disk_bytes", config.kv_disk_bytes)):
        if size and size < 2 * block_bytes:
            raise UserError(
                f"{flag(field)} {size} is too little: a block of {config.block_size} tokens of {model.name} takes "
                f"{block_bytes} bytes"
            )
    if config.address is not None:
        return  # other machines have other memories and disks
    if config.kv_host_memory_bytes and (config.kv_host_memory_bytes + cache_bytes) * num_workers > machine_bytes:
        raise UserError(
            f"--kv-host-memory-bytes {config.kv_host_memory_bytes} and the KV cache for {num_workers} workers exceed "
            f"this machine's memory of {machine_bytes} bytes"
        )
    if config.kv_disk_path is not None and config.kv_disk_bytes is not None:
        total = _prepare_folder(Path(config.kv_disk_path))
        if config.kv_disk_bytes * num_workers > total:
            raise UserError(
                f"--kv-disk-bytes {config.kv_disk_bytes} for {num_workers} workers exceeds the {total} bytes of the "
                f"file system that holds {config.kv_disk_path}"
            )


def _prepare_folder(folder: Path) -> int:
    """Make the folder, and see that something can be written there. The bytes of its file system, free or not."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return shutil.disk_usage(folder).total
    except OSError as error:
        raise UserError(f"--kv-disk-path {folder} cannot be written: {error.strerror}") from error


def _block_bytes(config: ClusterConfig, model: ResolvedModel) -> int:
    return model.config.kv_elements_per_token * ELEMENT_BYTES[model.dtype] * config.block_size


def _max_model_len(config: ClusterConfig, model: ResolvedModel, kv_bytes: int | None) -> int:
    """The model's context, or what was asked for; never more than the KV cache of one worker can hold, as far as that
    is known here."""
    block_bytes = _block_bytes(config, model)
    context = model.config.max_position_embeddings
    wanted = config.max_model_len
    room = context
    if kv_bytes is not None:
        room = max(0, kv_bytes // block_bytes - NUM_PROBE_BLOCKS) * config.block_size
    if room < 2:
        raise UserError(
            f"--kv-cache-memory-bytes {kv_bytes} does not hold one block beside the {NUM_PROBE_BLOCKS} that workers "
            f"probe each other with: {config.block_size} tokens of {model.name} take {block_bytes} bytes"
        )
    if wanted is None:
        return min(context, room)
    if wanted > context:
        raise UserError(f"--max-model-len {wanted} exceeds the {context} tokens that {model.name} was made for")
    if wanted > room:
        num_blocks = -(-wanted // config.block_size) + NUM_PROBE_BLOCKS
        raise UserError(
            f"--max-model-len {wanted} needs {num_blocks * block_bytes} bytes of KV per worker, "
            f"but --kv-cache-memory-bytes is {kv_bytes}"
        )
    return wanted


def available_cores() -> int:
    """Cores that this process may use."""
    return len(psutil.Process().cpu_affinity() or ()) or 1


def worker_configs(resolved: ResolvedConfig, cluster_key: bytes, *, epoch: int = 0) -> list[WorkerConfig]:
    """One per worker, in the order prefill, decode, aggregated; all of this epoch."""
    counts = zip(ROLES, resolved.cluster.num_workers, strict=True)
    names = [(role, number) for role, count in counts for number in range(count)]
    return _configs_of(resolved, cluster_key, names, epoch=epoch, first_port=0)


def reserve_configs(resolved: ResolvedConfig, cluster_key: bytes, *, epoch: int = 0) -> list[WorkerConfig]:
    """Of the workers that pools may grow by, in the order in which they come."""
    counts = list(zip(ROLES, resolved.cluster.num_workers, resolved.cluster.most_workers, strict=True))
    names = [(role, number) for role, least, most in counts for number in range(least, most)]
    first_port = sum(resolved.cluster.num_workers)
    return _configs_of(resolved, cluster_key, names, epoch=epoch, first_port=first_port)


def _configs_of(
    resolved: ResolvedConfig, cluster_key: bytes, names: Sequence[tuple[Role, int]], *, epoch: int, first_port: int
) -> list[WorkerConfig]:
    ports = port_range(resolved.cluster.worker_ports, "--worker-ports")
    return [
        # a port of its own for each, also where several share a machine; 0 is any
        _worker_config(
            resolved, cluster_key, role, f"{role}-{number}", epoch=epoch, port=ports[index] if ports.start else 0
        )
        for index, (role, number) in enumerate(names, first_port)
    ]


def _worker_config(
    resolved: ResolvedConfig, cluster_key: bytes, role: Role, worker_id: str, *, epoch: int, port: int
) -> WorkerConfig:
    cluster = resolved.cluster
    return WorkerConfig(
        model_path=resolved.model_path,
        model_name=resolved.model_name,
        role=role,
        worker_id=worker_id,
        epoch=epoch,
        host=cluster.worker_host or LOOPBACK,
        port=port,
        device=resolved.device,
        cpu_level=None if cluster.cpu_level == "auto" else cluster.cpu_level,
        dtype=resolved.dtype,
        block_size=cluster.block_size,
        max_model_len=resolved.max_model_len,
        max_num_seqs=cluster.max_num_seqs,
        max_num_batched_tokens=cluster.max_num_batched_tokens,
        kv_cache_memory_bytes=resolved.kv_cache_memory_bytes,
        gpu_memory_utilization=cluster.gpu_memory_utilization,
        gpu_share=gpu_share(cluster, role),
        kv_host_memory_bytes=cluster.kv_host_memory_bytes,
        kv_disk_path=None if cluster.kv_disk_path is None else Path(cluster.kv_disk_path).absolute(),
        kv_disk_bytes=cluster.kv_disk_bytes or 0,
        # alone it has nobody to exchange KV with
        transfer="local" if sum(cluster.most_workers) == 1 else cluster.transfer,
        num_threads=resolved.num_threads,
        tuning_file=cache_folder() / TUNING_FILE,
        tuning_deadline_s=cluster.tuning_deadline,
        cluster_key=cluster_key,
    )


def gateway_config(
    resolved: ResolvedConfig, cluster_key: bytes, *, redis_url: str | None, namespace: str
) -> GatewayConfig:
    """The gateway's share."""
    template = resolved.cluster.chat_template
    prefill, decode, aggregated = resolved.cluster.num_workers
    return GatewayConfig(
        model_name=resolved.model_name,
        tokenizer_folder=resolved.model_path,
        max_model_len=resolved.max_model_len,
        cluster_key=cluster_key,
        api_keys=(*resolved.cluster.api_key, *keys_in(resolved.cluster.api_key_file)),
        chat_template=None if template is None else Path(template).expanduser(),
        tool_call_parser=resolved.cluster.tool_call_parser,
        reasoning_parser=resolved.cluster.reasoning_parser,
        redis_url=redis_url,
        share_responses=resolved.cluster.gateways > 1 or resolved.cluster.redis_url is not None,
        index_namespace=namespace,
        num_prefill=prefill,
        num_decode=decode,
        num_aggregated=aggregated,
        router_policy=resolved.cluster.router_policy,
        slo_ttft_s=resolved.cluster.slo_ttft,
        slo_itl_s=resolved.cluster.slo_itl,
        max_queue=resolved.cluster.max_queue,
        seed=resolved.cluster.seed,
        max_in_flight=resolved.cluster.max_in_flight,
        slow_reader_timeout_s=resolved.cluster.slow_reader_timeout,
    )
