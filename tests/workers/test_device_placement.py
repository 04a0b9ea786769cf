"""Nothing of a step is on the wrong device, and nobody waits for the device in it. Torch's "meta" stands for a GPU: its
tensors have no memory, so what mixes them with the host's, or reads one of their values, fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from tandem.kernels.capture import Captured
from tandem.kernels.triton.backend import TritonOps
from tandem.workers.batch import Batch, BatchItem, BlockCopy, PoolSpec, SampleSpec, ScoreSpec
from tandem.workers.constraint import Constraint
from tandem.workers.errors import DeviceLost
from tandem.workers.kv_cache import KVCache
from tandem.workers.model_runner import ModelRunner
from tandem.workers.models.config import ModelConfig, RopeConfig
from tandem.workers.models.weights import LayerWeights, ModelWeights
from tandem.workers.pooling import PoolingMode
from tandem.workers.types import SamplingParams

T = TypeVar("T")

CONFIG = ModelConfig("qwen3", 131, 64, 96, 2, 6, 2, 32, 1e-5, 512, True, RopeConfig(10000.0), qk_norm=True)
BLOCK_SIZE = 16


class CheckedLaunch:
    """Starts nothing. What a kernel is given must be on the device."""

    def __init__(self) -> None:
        self.num_launches = 0

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[object, ...], **meta: int) -> None:
        self.num_launches += 1
        elsewhere = [tuple(one.shape) for one in arguments if isinstance(one, Tensor) and not one.is_meta]
        assert not elsewhere, f"{kernel} was given host tensors of shapes {elsewhere}"


class RecordedOps(TritonOps):
    """Records by remembering nothing: there is nothing to compute."""

    def capture(self, step: Callable[[], T]) -> Captured[T] | None:
        return Captured(step(), lambda: None, 0)


class Mark:
    def wait(self) -> None:
        """It is over."""


class MetaQueue:
    """A `kernels.queue.Queue` to a device that is elsewhere."""

    shares_memory = False

    def __init__(self, *, is_alive: bool = True) -> None:
        self._is_alive = is_alive

    def send(self, host: Tensor) -> Tensor:
        assert host.device.type == "cpu"
        return host.to("meta")

    def fetch(self, tensor: Tensor) -> Tensor:
        assert tensor.is_meta
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def submit(self, work: Callable[[], object]) -> None:
        work()

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def mark(self) -> Mark:
        return Mark()

    def is_alive(self) -> bool:
        return self._is_alive


def weights() -> ModelWeights:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    layer = LayerWeights(
        *(empty(64), empty(10 * 32, 64), empty(10 * 32), empty(32), empty(32), empty(64, 6 * 32), None),
        *(empty(64), empty(192, 64), None, empty(64, 96), None),
    )
    embedding = empty(131, 64)
    return ModelWeights(embedding, (layer, layer), empty(64), embedding)


def make_runner(launch: Any, queue: MetaQueue | None = None) -> ModelRunner:
    cache = KVCache(CONFIG, 64, BLOCK_SIZE, torch.bfloat16, "meta")
    sizes = {"max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 64}
    return ModelRunner(CONFIG, weights(), cache, ops=RecordedOps(launch), queue=queue or MetaQueue(), **sizes)


def item(index: int, start: int, num: int, *, follows: int | None = None, **params: Any) -> BatchItem:
    """Of a sequence with blocks of its own; the next token is sampled."""
    end = start + num
    settings = SamplingParams(max_tokens=9, seed=index, **params)
    constraint = Constraint(settings, CONFIG.vocab_size) if settings.logit_bias else None
    sample = SampleSpec(settings, 0, end, list(range(end)), 4, constraint)
    return BatchItem(list(range(start, end)), start, range(4 * index, 4 * index + 4), sample, follows=follows)


WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 5},
    {"num_logprobs": 3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.1},
    {"logit_bias": ((7, 3.0),)},
    {"repetition_penalty": 1.3, "logit_bias": ((7, 3.0),), "num_logprobs": 0},
)


@pytest.mark.parametrize("way", WAYS)
def test_every_step_stays_on_its_device(way: dict[str, Any]) -> None:
    launch = CheckedLaunch()
    runner = make_runner(launch)
    assert runner.record()
    prompts = Batch(tuple(item(index, 0, 5 + index, **way) for index in range(3)), (BlockCopy(0, 40, 7),))
    collect = runner.launch(prompts)
    ahead = Batch(tuple(item(index, 5 + index, 1, follows=index, **way) for index in range(3)))
    assert runner.counts.eager == 1
    others = runner.launch(ahead)  # whose tokens only the device knows
    assert len(collect()) == len(others()) == 3
    assert runner.counts.replayed + runner.counts.replayed_to_logits == 1
    mixed = Batch((item(0, 6, 1, follows=0, **way), item(4, 0, 9, **way)))
    assert len(runner.execute(mixed)) == 2
    assert launch.num_launches > 0


def test_scores_and_pooled_rows_stay_there_too() -> None:
    runner = make_runner(CheckedLaunch())
    tokens = list(range(20))
    scored = BatchItem(tokens, 0, range(4), None, ScoreSpec(tuple(range(1, 20)), 3))
    modes: tuple[PoolingMode, ...] = ("mean", "first", "last")
    pooled = tuple(BatchItem(tokens, 0, range(4, 8), None, pool=PoolSpec(mode, 16)) for mode in modes)
    assert len(runner.execute(Batch((scored, *pooled)))) == 4


def test_dry_prompts_make_every_workspace_as_large_as_it_gets() -> None:
    runner = make_runner(CheckedLaunch())
    runner.record()
    runner.rehearse()
    ops = runner.ops
    assert isinstance(ops, TritonOps)
    before = {use: buffer.numel() for use, buffer in ops._buffers._current.items()}
    worst = Batch(tuple(item(index, 0, 8, **WAYS[3 + index % 3]) for index in range(8)))
    runner.execute(worst)
    assert {use: buffer.numel() for use, buffer in ops._buffers._current.items()} == before
    assert before["sampling counts"] >= 8 * CONFIG.vocab_size


class FailingLaunch(CheckedLaunch):
    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[object, ...], **meta: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_device_that_has_failed_for_good_is_told_from_a_step_that_failed(is_alive: bool) -> None:
    runner = make_runner(FailingLaunch(), MetaQueue(is_alive=is_alive))
    with pytest.raises(RuntimeError if is_alive else DeviceLost, match="an illegal memory access") as raised:
        runner.execute(Batch((item(0, 0, 5),)))
    assert ("\n" in str(raised.value)) == is_alive
