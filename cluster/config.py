"""Configuration of one cluster: what `tandem serve` was asked for, checked once.

    flags, environment, file -> ClusterConfig -> resolve(config, model) -> worker_configs(...), gateway_config(...)

"auto" values are None here and become numbers in `resolve` (resolve.py), which returns a new record.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_type_hints

import msgspec

from tandem.cluster.config_sources import Setting, flag, layer
from tandem.cluster.model_source import DtypeChoice
from tandem.cluster.network import check_worker_host, port_range
from tandem.router.index.client import check_redis_url
from tandem.router.parsers.select import CallParserChoice, ReasoningParserChoice
from tandem.router.policy import PolicyName
from tandem.workers.config import CpuLevel, TransferName
from tandem.workers.errors import UserError

DeviceChoice = Literal["auto", "cpu", "cuda"]
CpuLevelChoice = Literal["auto", CpuLevel]
Placement = Literal["pack", "spread", "strict-pack", "strict-spread"]
LogFormat = Literal["text", "json"]
MetricsCompat = Literal["none", "vllm"]

MIN_CLUSTER_KEY_LEN = 16
MAX_GATEWAYS = 256


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user may say. Each field is the flag of the same name; the messages of `UserError` name the flag.

    None stands for "auto", or for "not asked for".
    """

    model: str
    prefill: int | None = None
    decode: int | None = None
    aggregated: int = 0
    prefill_max: int | None = None
    decode_max: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    admin_port: int = 8001
    gateways: int = 1
    redis_url: str | None = None
    transfer: TransferName = "nixl"
    device: DeviceChoice = "auto"
    cpu_level: CpuLevelChoice = "auto"
    dtype: DtypeChoice = "auto"
    block_size: int = 32
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_host_memory_bytes: int = 0
    kv_disk_path: str | None = None
    kv_disk_bytes: int | None = None
    tuning_deadline: float = 60.0
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    chat_template: str | None = None
    tool_call_parser: CallParserChoice = "auto"
    reasoning_parser: ReasoningParserChoice = "auto"
    seed: int | None = None
    router_policy: PolicyName = "cost"
    slo_ttft: float | None = None
    slo_itl: float | None = None
    max_queue: int = 256
    max_in_flight: int = 1024
    slow_reader_timeout: float = 30.0
    address: str | None = None
    admin_host: str = "127.0.0.1"
    worker_host: str | None = None
    worker_ports: str | None = None
    transfer_ports: str | None = None
    worker_threads: int | None = None
    prefill_resources: dict[str, float] = {}
    decode_resources: dict[str, float] = {}
    aggregated_resources: dict[str, float] = {}
    placement: Placement = "pack"
    cluster_key: str | None = None
    drain_timeout: float = 5.0
    log_format: LogFormat = "text"
    metrics_compat: MetricsCompat = "none"
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        self._require(bool(self.model), "model", "must not be empty")
        self._check_ports()
        self._check_engine()
        self._check_tiers()
        self._check_requests()
        self._check_machines()
        self._check_operation()
        self._check_workers()

    def _require(self, ok: bool, field: str, rule: str) -> None:
        if not ok:
            raise UserError(f"{flag(field)} {rule}, but is {getattr(self, field)!r}")

    def _check_ports(self) -> None:
        for field in ("host", "admin_host"):
            self._require(bool(getattr(self, field)), field, "must not be empty")
        for field in ("port", "admin_port"):
            self._require(0 <= getattr(self, field) <= 65535, field, "must be between 0 (any free port) and 65535")
        self._require(self.port == 0 or self.port != self.admin_port, "admin_port", "must differ from --port")
        self._require(1 <= self.gateways <= MAX_GATEWAYS, "gateways", f"must be from 1 to {MAX_GATEWAYS}")
        if self.redis_url is not None:
            check_redis_url(self.redis_url, flag("redis_url"))

    def _check_engine(self) -> None:
        size, length, memory = self.block_size, self.max_model_len, self.kv_cache_memory_bytes
        is_power_of_two = size & (size - 1) == 0
        self._require(2 <= size <= 1024 and is_power_of_two, "block_size", "must be a power of two from 2 to 1024")
        self._require(length is None or length >= 2, "max_model_len", "must be at least 2")
        self._require(self.max_num_seqs >= 1, "max_num_seqs", "must be at least 1")
        self._require(
            self.max_num_batched_tokens >= size and self.max_num_batched_tokens % size == 0,
            "max_num_batched_tokens",
            f"must be a positive multiple of --block-size ({size})",
        )
        self._require(memory is None or memory > 0, "kv_cache_memory_bytes", "must be positive")
        self._require(0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", "must be above 0, at most 1")
        self._require(0 <= self.tuning_deadline <= 3600, "tuning_deadline", "must be from 0 to 3600 seconds")

    def _check_tiers(self) -> None:
        self._require(self.kv_host_memory_bytes >= 0, "kv_host_memory_bytes", "must not be negative")
        self._require(self.kv_disk_bytes is None or self.kv_disk_bytes > 0, "kv_disk_bytes", "must be positive")
        self._require(self.kv_disk_path != "", "kv_disk_path", "must not be empty")
        if self.kv_disk_path is not None and self.kv_disk_bytes is None:
            raise UserError("--kv-disk-path needs --kv-disk-bytes: how much of it each worker may take")
        if self.kv_disk_bytes is not None and self.kv_disk_path is None:
            raise UserError("--kv-disk-bytes needs --kv-disk-path: a folder to keep KV in")

    def _check_requests(self) -> None:
        """Who may ask, how chats are read, and how much is let in."""
        if not all(self.api_key):  # the value itself is never repeated: it is a secret
            raise UserError("--api-key must not be empty")
        keys_in(self.api_key_file)
        template = self.chat_template
        self._require(template is None or Path(template).expanduser().is_file(), "chat_template", "must be a file")
        for field in ("slo_ttft", "slo_itl", "slow_reader_timeout"):
            limit = getattr(self, field)
            self._require(limit is None or 0 < limit < float("inf"), field, "must be a positive number of seconds")
        self._require(self.max_queue >= 0, "max_queue", "must not be negative")
        self._require(self.max_in_flight >= 1, "max_in_flight", "must be at least 1")

    def _check_machines(self) -> None:
        if self.worker_host is not None:
            check_worker_host(self.worker_host)
        num_workers = sum(self.most_workers)
        self._require(
            self.worker_ports is None or len(port_range(self.worker_ports, "--worker-ports")) >= num_workers,
            "worker_ports",
            f"must hold a port for each of {num_workers} workers",
        )
        port_range(self.transfer_ports, "--transfer-ports")
        self._require(self.worker_threads is None or self.worker_threads >= 1, "worker_threads", "must be at least 1")
        for field in ("prefill_resources", "decode_resources", "aggregated_resources"):
            amounts = getattr(self, field).values()
            self._require(all(0 < amount < float("inf") for amount in amounts), field, "must be positive amounts")
        if self.cluster_key is not None and len(self.cluster_key) < MIN_CLUSTER_KEY_LEN:
            raise UserError(f"--cluster-key must have at least {MIN_CLUSTER_KEY_LEN} characters")  # not shown: a secret

    def _check_operation(self) -> None:
        self._require(0 <= self.drain_timeout <= 3600, "drain_timeout", "must be from 0 to 3600 seconds")
        endpoint = self.otlp_endpoint
        is_url = endpoint is None or endpoint.startswith(("http://", "https://"))
        self._require(is_url, "otlp_endpoint", "must be an http:// URL")

    def _check_workers(self) -> None:
        for field in ("prefill", "decode", "aggregated"):
            self._require((getattr(self, field) or 0) >= 0, field, "must not be negative")
        prefill, decode, aggregated = self.num_workers
        for field, least in (("prefill_max", prefill), ("decode_max", decode)):
            most = getattr(self, field)
            if most is not None and not 1 <= least <= most:
                raise UserError(
                    f"{flag(field)} {most} must be at least {flag(field[:-4])}, which is {least}, at least 1"
                )
        if prefill + decode + aggregated == 0:
            raise UserError("--prefill, --decode and --aggregated are all 0: a cluster needs a worker")
        if decode + aggregated == 0:
            raise UserError("--decode and --aggregated are both 0: nobody would write tokens")
        if prefill > 0 and decode == 0:
            raise UserError(
                f"--prefill {prefill} needs --decode of at least 1: aggregated workers read their prompts themselves"
            )
        if self.transfer == "local" and prefill + decode + aggregated > 1:
            raise UserError("--transfer local moves KV inside one process; workers here are processes of their own")

    @property
    def num_workers(self) -> tuple[int, int, int]:
        """(prefill, decode, aggregated). One of each of the first two, unless something was asked for."""
        is_default = self.prefill is None and self.decode is None and self.aggregated == 0
        absent = 1 if is_default else 0
        prefill = self.prefill if self.prefill is not None else (1 if self.decode else absent)
        decode = self.decode if self.decode is not None else (1 if self.prefill else absent)
        return prefill, decode, self.aggregated

    @property
    def most_workers(self) -> tuple[int, int, int]:
        """(prefill, decode, aggregated), where pools have grown as far as they may."""
        prefill, decode, aggregated = self.num_workers
        return self.prefill_max or prefill, self.decode_max or decode, aggregated


def load_config(
    flags: Mapping[str, Any], file: Path | None, environment: Mapping[str, str] | None = None
) -> ClusterConfig:
    """Flags over the environment over the file over the defaults. Raises `UserError`."""
    return load_settings(flags, file, environment)[0]


def load_settings(
    flags: Mapping[str, Any], file: Path | None, environment: Mapping[str, str] | None = None
) -> tuple[ClusterConfig, dict[str, Setting]]:
    """The same, with what was given by whom. `flags` holds only what was given. Raises `UserError`."""
    settings = layer(flags, environment or {}, file, get_type_hints(ClusterConfig))
    values = {field: setting.value for field, setting in settings.items()}
    if "model" not in values:
        raise UserError("MODEL is missing: give it as an argument, as TANDEM_MODEL, or as model in the file")
    try:
        return msgspec.convert(values, ClusterConfig), settings
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from error
        raise UserError(f"{file}: {error}" if file else str(error)) from error


def keys_in(file: str | None) -> tuple[str, ...]:
    """One key per line; empty lines and those that begin with # are none. Raises `UserError`."""
    if file is None:
        return ()
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--api-key-file {file} cannot be read") from error
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        raise UserError(f"--api-key-file {file} holds no key: the server would be open to everybody")
    return keys
