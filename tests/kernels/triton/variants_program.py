"""What Triton would compile, through its own launcher but without a compiler or a GPU: run by test_variants.py.

Prints what a worker's start asks for, and what serving asks for beyond it: each of these would hold up everybody's
streams for seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tandem.kernels.capture import Captured
from tandem.kernels.triton.backend import TritonOps
from tandem.workers.batch import Batch, BatchItem, SampleSpec, ScoreSpec
from tandem.workers.constraint import Constraint
from tandem.workers.kv_cache import KVCache
from tandem.workers.model_runner import ModelRunner
from tandem.workers.models.config import ModelConfig, RopeConfig
from tandem.workers.models.weights import LayerWeights, ModelWeights
from tandem.workers.types import SamplingParams

T = TypeVar("T")

CONFIG = ModelConfig("qwen3", 1000, 256, 512, 2, 8, 2, 64, 1e-5, 512, True, RopeConfig(10000.0), qk_norm=True)
MAX_SEQS, MAX_LEN, BLOCK_SIZE = 16, 256, 32

compiled: list[str] = []


class StandInDriver:
    """As much of Triton's driver as a launch asks for. Compiles for an H100 or H200."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def remember(function: JITFunction, key: str, signature: Any, device: int, *_: Any) -> Any:
    """In the place of the compiler: the real binder, specialisation and options came before it."""
    compiled.append(f"{function.__name__} {key}")
    kernel = SimpleNamespace(launch_metadata=lambda *_: None, run=lambda *_: None, function=0, packed_metadata=None)
    function.device_caches[device][0][key] = kernel
    return kernel


class RecordedOps(TritonOps):
    def capture(self, step: Callable[[], T]) -> Captured[T] | None:
        return Captured(step(), lambda: None, 0)


def weights() -> ModelWeights:
    def empty(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    layer = LayerWeights(
        *(empty(256), empty(12 * 64, 256), None, empty(64), empty(64), empty(256, 8 * 64), None),
        *(empty(256), empty(1024, 256), None, empty(256, 512), None),
    )
    embedding = empty(1000, 256)
    return ModelWeights(embedding, (layer, layer), empty(256), embedding)


def item(index: int, start: int, num: int, **params: Any) -> BatchItem:
    end = start + num
    settings = SamplingParams(max_tokens=9, seed=index, **params)
    constraint = Constraint(settings, CONFIG.vocab_size) if settings.logit_bias else None
    sample = SampleSpec(settings, 0, end, list(range(end)), 4, constraint)
    return BatchItem(list(range(start, end)), start, range(8 * index, 8 * index + 8), sample)


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0, "num_logprobs": 5},
    {"num_logprobs": 0},
    {"presence_penalty": 0.5, "num_logprobs": 1},
    {"logit_bias": ((7, 3.0),)},
    {"repetition_penalty": 1.3, "logit_bias": ((7, 3.0), (8, 1.0)), "num_logprobs": 2},
)


def served() -> list[Batch]:
    """Steps of all kinds: odd numbers of sequences and tokens, alone and mixed, every way of sampling, scores."""
    batches = [Batch((item(0, 0, num),)) for num in (1, 3, 17, 33, 100, 128)]
    for way in WAYS:
        for num_seqs in (1, 2, 3, 7, 16):
            batches.append(Batch(tuple(item(index, 40 + index, 1, **way) for index in range(num_seqs))))
            batches.append(Batch(tuple(item(index, 32 * (index % 2), 1 + index, **way) for index in range(num_seqs))))
    tokens = list(range(40))
    batches.append(Batch((BatchItem(tokens, 0, range(8), None, ScoreSpec(tuple(range(1, 40)), 3)), item(9, 0, 5))))
    batches.append(Batch((BatchItem(tokens[:1], 0, range(8), None), BatchItem(tokens, 64, range(8, 16), None))))
    return batches


def main() -> None:
    driver.set_active(StandInDriver())
    JITFunction._do_compile = remember
    cache = KVCache(CONFIG, MAX_SEQS * 8, BLOCK_SIZE, torch.bfloat16, "cpu")
    sizes = {"max_num_seqs": MAX_SEQS, "max_model_len": MAX_LEN, "max_num_batched_tokens": 128}
    runner = ModelRunner(CONFIG, weights(), cache, ops=RecordedOps(), **sizes)
    runner.record()
    runner.rehearse()
    at_start = len(compiled)
    for batch in served():
        runner.execute(batch)
    sys.stdout.write(f"{at_start} at the start\n" + "".join(f"later: {one}\n" for one in compiled[at_start:]))


if __name__ == "__main__":
    main()
