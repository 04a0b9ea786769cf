"""How much KV a GPU worker has: what is left when all else is there, shared fairly, and a word when it is nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import CONFIG, random_weights

from tandem.kernels.ops import load_ops
from tandem.workers import device as device_module
from tandem.workers import load
from tandem.workers.batch import Batch, BatchItem, SampledToken, SampleSpec
from tandem.workers.config import WorkerConfig
from tandem.workers.device import CONTEXT_BYTES, DeviceMemory, check_cuda, kv_memory_bytes
from tandem.workers.errors import UserError
from tandem.workers.kv_cache import KVCache, block_bytes
from tandem.workers.kv_sizing import first_num_blocks, full_cache
from tandem.workers.model_runner import ModelRunner
from tandem.workers.models.weights import ModelWeights
from tandem.workers.transfer.base import NUM_PROBE_BLOCKS
from tandem.workers.types import SamplingParams

GIB = 1 << 30


def config(**fields: Any) -> WorkerConfig:
    settings: dict[str, Any] = {
        "model_path": Path("/m"), "model_name": "m", "role": "decode", "worker_id": "d0", "device": "cuda",
        "dtype": "float32", "block_size": 16, "max_model_len": 128, "kv_cache_memory_bytes": None,
    }  # fmt: skip
    return WorkerConfig(**settings | fields)


def test_a_worker_by_itself_leaves_a_tenth_of_the_device() -> None:
    """Whatever has taken the rest: a screen, or a program of somebody else."""
    memory = DeviceMemory(total=100 * GIB, free=70 * GIB, reserved=20 * GIB)
    assert kv_memory_bytes(memory, 0.9, 1.0) == 60 * GIB
    assert kv_memory_bytes(memory, 0.5, 1.0) == 20 * GIB


def test_workers_of_one_device_come_to_the_same_whoever_is_first() -> None:
    """While the first one measures the second has nothing yet, or everything: neither changes what the first gets."""
    own = 20 * GIB
    left = 45 * GIB - own - CONTEXT_BYTES
    for free in (100 * GIB - own, 100 * GIB - own - 45 * GIB):
        assert kv_memory_bytes(DeviceMemory(100 * GIB, free, own), 0.9, 0.5) == left
    assert 2 * (own + CONTEXT_BYTES + left) == 90 * GIB


def test_nobody_is_promised_what_is_not_free() -> None:
    assert kv_memory_bytes(DeviceMemory(100 * GIB, 3 * GIB, 20 * GIB), 0.9, 0.5) == 3 * GIB


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_when_nothing_is_left_it_says_what_there_was(share: float) -> None:
    with pytest.raises(
        UserError, match=r"no GPU memory is left for KV: of 24.0 GiB .*--gpu-memory-utilization 0.9"
    ) as told:
        kv_memory_bytes(DeviceMemory(24 * GIB, 1 * GIB, 23 * GIB), 0.9, share)
    assert "\n" not in str(told.value)
    assert ("share of 0.5" in str(told.value)) == (share < 1)


def test_a_trial_cache_holds_the_largest_step_and_the_full_one_what_is_left() -> None:
    asked = config(max_num_batched_tokens=64)
    trial = KVCache(CONFIG, first_num_blocks(asked, CONFIG), 16, torch.float32, "cpu")
    assert trial.num_blocks == 4
    size = block_bytes(CONFIG, 16, torch.float32)
    memory = DeviceMemory(total=10_000 * size, free=9_000 * size, reserved=0)
    full = full_cache(asked, CONFIG, trial, lambda device: memory)
    assert full.num_blocks + NUM_PROBE_BLOCKS == 8_000
    assert full.tensor.device == trial.tensor.device
    half = config(gpu_share=0.5, gpu_memory_utilization=1.0)
    memory = DeviceMemory(total=2 * (CONTEXT_BYTES + 100 * size), free=CONTEXT_BYTES, reserved=0)
    assert full_cache(half, CONFIG, trial, lambda device: memory).num_blocks + NUM_PROBE_BLOCKS == 100


def test_a_context_that_does_not_fit_is_refused_with_the_one_that_does() -> None:
    asked = config(max_model_len=5000)
    trial = KVCache(CONFIG, 4, 16, torch.float32, "cpu")
    size = block_bytes(CONFIG, 16, torch.float32)
    memory = DeviceMemory(total=200 * size, free=200 * size, reserved=0)
    with pytest.raises(UserError, match=f"holds {(180 - NUM_PROBE_BLOCKS) * 16} tokens, but max_model_len is 5000"):
        full_cache(asked, CONFIG, trial, lambda device: memory)
    with pytest.raises(UserError, match="kv_cache_memory_bytes holds"):
        first_num_blocks(config(kv_cache_memory_bytes=20 * size, max_model_len=5000), CONFIG)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "cpu"}, "kv_cache_memory_bytes must be given"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes must be positive"),
        ({"gpu_share": 0.0}, "gpu_share must be above 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be above 0 and at most 1"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**fields)


@dataclass
class OnThisMachine:
    """A GPU worker's configuration whose device is the CPU."""

    config: WorkerConfig
    device: str = "cpu"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


def test_a_worker_starts_with_the_trial_and_computes_in_the_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded with both: what was recorded first has the addresses of blocks that are gone."""
    size = block_bytes(CONFIG, 16, torch.float32)
    memory = DeviceMemory(total=100 * size, free=100 * size, reserved=0)
    weights: ModelWeights = random_weights(torch.float32)
    monkeypatch.setattr(load, "check_model", lambda path: CONFIG)
    monkeypatch.setattr(load, "create_ops", lambda *_: load_ops("cpu"))
    monkeypatch.setattr(load, "load_weights", lambda *_: weights)
    monkeypatch.setattr(load, "full_cache", partial(full_cache, measure=lambda device: memory))
    asked: Any = OnThisMachine(config(max_num_seqs=2, max_num_batched_tokens=64))
    _, kv_cache, runner = load.load_runner(asked)
    assert kv_cache.num_blocks == 90 - NUM_PROBE_BLOCKS
    cache = KVCache(CONFIG, 90, 16, torch.float32, "cpu")
    with torch.inference_mode():
        cache.tensor.zero_()
        kv_cache.tensor.zero_()
    expected = ModelRunner(CONFIG, weights, cache, max_num_seqs=2, max_model_len=128, ops=load_ops("cpu"))
    assert tokens_of(runner) == tokens_of(expected)
    assert runner.counts.replayed > 0
    assert bool(kv_cache.tensor[70:72].any()), "somebody else's blocks were written"


def tokens_of(runner: ModelRunner) -> list[int]:
    """A prompt and some steps, in blocks that a trial cache does not have."""
    tokens, params = [5, 17, 99, 3], SamplingParams(max_tokens=9, seed=1)
    start = 0
    for _ in range(6):
        sample = SampleSpec(params, 0, len(tokens), tuple(tokens), 4)
        (token,) = runner.execute(Batch((BatchItem(tuple(tokens[start:]), start, (70, 71), sample),)))
        assert isinstance(token, SampledToken)
        start = len(tokens)
        tokens.append(token.token_id)
    return tokens


def test_a_torch_without_cuda_or_a_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match=r"--device cuda: torch .* is built without CUDA"):
        check_cuda()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(UserError, match=r"torch finds no GPU; .* CUDA 13.0, and is CUDA_VISIBLE_DEVICES \(7\) right"):
        check_cuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    device_module.architecture_of.cache_clear()
    with pytest.raises(UserError, match="needs sm_80 or newer, but cuda:0 is sm_75"):
        check_cuda()


def test_memory_that_is_too_small_for_the_weights_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> ModelWeights:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the manual")

    monkeypatch.setattr(load, "check_model", lambda path: CONFIG)
    monkeypatch.setattr(load, "create_ops", lambda *_: load_ops("reference"))
    monkeypatch.setattr(load, "load_weights", fail)
    with pytest.raises(UserError, match=r"^the GPU's memory does not hold this: CUDA out of memory[^\n]*$"):
        load.load_runner(config())
