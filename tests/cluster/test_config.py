"""What `tandem serve` may be asked for, and what follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.cluster import resolve as resolve_module
from tandem.cluster.app import with_absolute_paths
from tandem.cluster.config import ClusterConfig, load_config
from tandem.cluster.model_source import ResolvedModel
from tandem.cluster.resolve import gateway_config, reserve_configs, resolve, worker_configs
from tandem.workers.errors import UserError
from tandem.workers.kv_cache import num_blocks_for
from tandem.workers.models.config import ModelConfig, RopeConfig
from tandem.workers.transfer.base import NUM_PROBE_BLOCKS

GIB = 1 << 30
TOKEN_BYTES = 30 * 2 * 3 * 64 * 2  # of the model below in bfloat16


def model() -> ResolvedModel:
    config = ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope=RopeConfig(theta=1e5),
    )
    return ResolvedModel(folder=Path("/models/small"), name="small", dtype="bfloat16", config=config, revision="1")


def resolved(**fields: Any) -> Any:
    return resolve(ClusterConfig(model="small", **fields), model(), memory_bytes=24 * GIB, num_cores=4)


@pytest.mark.parametrize(
    ("asked", "workers"),
    [
        ({}, (1, 1, 0)),
        ({"prefill": 2}, (2, 1, 0)),
        ({"decode": 3}, (1, 3, 0)),
        ({"prefill": 0, "decode": 2}, (0, 2, 0)),
        ({"aggregated": 2}, (0, 0, 2)),
        ({"aggregated": 1, "prefill": 1, "decode": 1}, (1, 1, 1)),
    ],
)
def test_how_many_workers_are_started(asked: dict[str, int], workers: tuple[int, int, int]) -> None:
    assert ClusterConfig(model="small", **asked).num_workers == workers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefill": -1}, "--prefill must not be negative, but is -1"),
        ({"prefill": 0, "decode": 0}, "--prefill, --decode and --aggregated are all 0"),
        ({"prefill": 1, "decode": 0, "aggregated": 1}, "--prefill 1 needs --decode"),
        ({"port": 70000}, "--port must be between 0"),
        ({"admin_port": 8000}, "--admin-port must differ from --port"),
        ({"gateways": 0}, "--gateways must be from 1 to 256, but is 0"),
        ({"block_size": 24}, "--block-size must be a power of two"),
        ({"block_size": 1}, "--block-size must be a power of two"),
        ({"max_num_batched_tokens": 48}, "--max-num-batched-tokens must be a positive multiple of --block-size (32)"),
        ({"max_num_seqs": 0}, "--max-num-seqs must be at least 1"),
        ({"max_model_len": 1}, "--max-model-len must be at least 2"),
        ({"kv_cache_memory_bytes": 0}, "--kv-cache-memory-bytes must be positive"),
        ({"gpu_memory_utilization": 90.0}, "--gpu-memory-utilization must be above 0, at most 1, but is 90.0"),
        ({"kv_host_memory_bytes": -1}, "--kv-host-memory-bytes must not be negative, but is -1"),
        ({"kv_disk_path": "/somewhere"}, "--kv-disk-path needs --kv-disk-bytes"),
        ({"kv_disk_bytes": 1000}, "--kv-disk-bytes needs --kv-disk-path"),
        ({"kv_disk_path": "/somewhere", "kv_disk_bytes": 0}, "--kv-disk-bytes must be positive"),
        ({"kv_disk_path": "", "kv_disk_bytes": 1}, "--kv-disk-path must not be empty"),
        ({"redis_url": "http://u:secret@somewhere"}, "--redis-url must start with"),
        ({"decode_resources": {"GPU": float("inf")}}, "--decode-resources must be positive amounts"),
        ({"api_key": ("good", "")}, "--api-key must not be empty"),
        ({"transfer": "local"}, "--transfer local"),
        ({"transfer": "local", "aggregated": 2}, "--transfer local"),
        ({"decode": 3, "decode_max": 2}, "--decode-max 2 must be at least --decode, which is 3"),
        ({"aggregated": 1, "prefill_max": 2}, "--prefill-max 2 must be at least --prefill, which is 0"),
        ({"decode": 1, "decode_max": 9, "worker_ports": "7400-7405"}, "--worker-ports must hold a port for each of 10"),
    ],
)
def test_a_mistake_is_named_by_its_flag(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        ClusterConfig(model="small", **fields)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_workers_share_cores_memory_and_key() -> None:
    configs = worker_configs(resolved(prefill=1, decode=2), b"key")
    assert [worker.worker_id for worker in configs] == ["prefill-0", "decode-0", "decode-1"]
    assert {worker.num_threads for worker in configs} == {1}
    assert {worker.kv_cache_memory_bytes for worker in configs} == {GIB}
    assert {worker.cluster_key for worker in configs} == {b"key"}
    assert {worker.max_model_len for worker in configs} == {8192}


@pytest.mark.parametrize(
    ("asked", "shares"),
    [({}, False), ({"gateways": 2}, True), ({"redis_url": "redis://elsewhere"}, True)],
)
def test_gateways_that_are_not_alone_share_stored_responses(asked: dict[str, Any], shares: bool) -> None:
    gateway = gateway_config(resolved(**asked), b"key", redis_url="unix:///somewhere", namespace="n")
    assert gateway.share_responses == shares


def test_a_single_worker_gets_all_cores() -> None:
    (worker,) = worker_configs(resolved(aggregated=1), b"key")
    assert (worker.role, worker.num_threads) == ("aggregated", 4)
    assert worker.transfer == "local", "nobody to exchange KV with"


def test_workers_that_may_come_have_names_and_ports_of_their_own() -> None:
    growing = resolved(prefill=1, decode=2, prefill_max=2, decode_max=4, worker_ports="7400-7405")
    first, later = worker_configs(growing, b"key"), reserve_configs(growing, b"key")
    assert [worker.worker_id for worker in first] == ["prefill-0", "decode-0", "decode-1"]
    assert [worker.worker_id for worker in later] == ["prefill-1", "decode-2", "decode-3"]
    assert [worker.port for worker in first + later] == list(range(7400, 7406))
    assert reserve_configs(resolved(prefill=1, decode=2), b"key") == []


def test_several_aggregated_workers_can_fetch_from_each_other() -> None:
    assert [worker.transfer for worker in worker_configs(resolved(aggregated=2), b"key")] == ["nixl", "nixl"]


def test_a_small_machine_gives_a_share_of_its_memory() -> None:
    small = resolve(ClusterConfig(model="small"), model(), memory_bytes=2 * GIB, num_cores=1)
    assert small.kv_cache_memory_bytes == GIB // 4
    assert small.num_threads == 1


def test_the_context_is_cut_to_what_the_cache_holds() -> None:
    """As the worker counts, whose transfer probes with some blocks of its own."""
    memory = (100 + NUM_PROBE_BLOCKS) * 32 * TOKEN_BYTES
    assert num_blocks_for(memory, model().config, 32, torch.bfloat16) == 100
    assert resolved(kv_cache_memory_bytes=memory).max_model_len == 3200
    with pytest.raises(UserError, match=r"--max-model-len 3201 needs \d+ bytes of KV per worker"):
        resolved(kv_cache_memory_bytes=memory, max_model_len=3201)
    with pytest.raises(UserError, match="--max-model-len 9000 exceeds the 8192 tokens"):
        resolved(max_model_len=9000)
    with pytest.raises(UserError, match="--kv-cache-memory-bytes 1000 does not hold one block"):
        resolved(kv_cache_memory_bytes=1000)


def test_the_caches_must_fit_into_the_machine() -> None:
    assert resolved(kv_cache_memory_bytes=12 * GIB).kv_cache_memory_bytes == 12 * GIB
    with pytest.raises(UserError, match=r"--kv-cache-memory-bytes \d+ for 2 workers exceeds this machine's memory"):
        resolved(kv_cache_memory_bytes=13 * GIB)


def test_tiers_must_hold_a_block_and_fit_into_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match="--kv-host-memory-bytes 1000 is too little: a block of 32 tokens"):
        resolved(kv_host_memory_bytes=1000)
    with pytest.raises(UserError, match=r"--kv-host-memory-bytes \d+ and the KV cache for 2 workers exceed"):
        resolved(kv_host_memory_bytes=12 * GIB)
    with pytest.raises(UserError, match=r"--kv-disk-bytes \d+ for 2 workers exceeds the \d+ bytes of the file system"):
        resolved(kv_disk_path=str(tmp_path), kv_disk_bytes=1 << 60)
    with pytest.raises(UserError, match=r"--kv-disk-path \S+file cannot be written"):
        resolved(kv_disk_path=str(file), kv_disk_bytes=GIB)
    new = tmp_path / "new"
    configs = worker_configs(resolved(kv_host_memory_bytes=GIB, kv_disk_path=str(new), kv_disk_bytes=2 * GIB), b"key")
    assert {(w.kv_host_memory_bytes, w.kv_disk_path, w.kv_disk_bytes) for w in configs} == {(GIB, new, 2 * GIB)}
    assert new.stat().st_mode & 0o777 == 0o700
    assert list(new.iterdir()) == []


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_module, "count_gpus", lambda: 0)
    with pytest.raises(UserError, match="--device cuda: this machine has no CUDA device"):
        resolve_module.resolve_device("cuda")
    assert resolve_module.resolve_device("auto") == "cpu"
    monkeypatch.setattr(resolve_module, "count_gpus", lambda: 1)
    assert resolve_module.resolve_device("auto") == "cuda"
    assert resolve_module.resolve_device("cpu") == "cpu"


def test_a_level_of_the_cpu_is_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = worker_configs(resolved(cpu_level="avx2", decode=2), b"key")
    assert {worker.cpu_level for worker in configs} == {"avx2"}
    assert {worker.cpu_level for worker in worker_configs(resolved(), b"key")} == {None}
    monkeypatch.setattr(resolve_module, "count_gpus", lambda: 1)
    with pytest.raises(UserError, match="--cpu-level avx2 is for CPUs, but workers compute on cuda: see --device"):
        resolved(cpu_level="avx2")
    assert resolved(cpu_level="avx2", device="cpu").device == "cpu"


def test_the_gateway_knows_what_to_wait_for() -> None:
    gateway = gateway_config(resolved(prefill=2, api_key=("k",)), b"key", redis_url=None, namespace="n")
    assert (gateway.num_prefill, gateway.num_decode, gateway.num_aggregated) == (2, 1, 0)
    assert gateway.api_keys == ("k",)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('decode = 2\nmax-model-len = 512\napi_key = ["a", "b"]\n')
    loaded = load_config({"model": "small", "decode": 3}, file)
    assert (loaded.decode, loaded.max_model_len, loaded.api_key) == (3, 512, ("a", "b"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("decodes = 2", "unknown decodes; did you mean decode?"),
        ("decode = ", "is not valid TOML"),
        ('decode = "two"', "Expected `int | null`, got `str`"),
        ("decode = -2", "--decode must not be negative"),
        ('device = "tpu"', "Invalid enum value 'tpu'"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(content)
    with pytest.raises(UserError) as raised:
        load_config({"model": "small"}, file)
    assert message in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        load_config({"model": "small"}, tmp_path / "absent.toml")


def test_keys_and_templates_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, template = tmp_path / "keys", tmp_path / "template.jinja"
    keys.write_text("# ours\none\n\n  two  \n")
    template.write_text("{{ messages }}")
    given = resolved(
        api_key=("flag",), api_key_file=str(keys), chat_template=str(template), tool_call_parser="mistral",
        reasoning_parser="none",
    )  # fmt: skip
    gateway = gateway_config(given, b"key", redis_url=None, namespace="n")
    assert gateway.api_keys == ("flag", "one", "two")
    assert gateway.chat_template == template
    assert (gateway.tool_call_parser, gateway.reasoning_parser) == ("mistral", "none")
    keys.write_text("# none\n")
    with pytest.raises(UserError, match=r"--api-key-file .* holds no key: the server would be open"):
        ClusterConfig(model="m", api_key_file=str(keys))
    with pytest.raises(UserError, match=r"--api-key-file .* cannot be read"):
        ClusterConfig(model="m", api_key_file=str(tmp_path / "nothing"))
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = resolved(chat_template="~/template.jinja")
    assert gateway_config(at_home, b"key", redis_url=None, namespace="n").chat_template == template
    with pytest.raises(UserError, match="--chat-template must be a file"):
        ClusterConfig(model="m", chat_template=str(tmp_path / "nothing"))


def test_paths_are_those_of_the_folder_in_which_the_command_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of what is not there yet: the launcher leaves that folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    given = with_absolute_paths(ClusterConfig(model="absent.gguf", kv_disk_path="kv", kv_disk_bytes=1))
    assert given.kv_disk_path == str(tmp_path / "kv")
    assert given.model == str(tmp_path / "absent.gguf")
    at_home = with_absolute_paths(ClusterConfig(model="owner/name", kv_disk_path="~/kv", kv_disk_bytes=1))
    assert (at_home.model, at_home.kv_disk_path) == ("owner/name", "/home/somebody/kv")
