"""Counting operations on models small enough to count by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.cluster.bench.count_ops import OpCounter, count_transformers, count_while
from tandem.cluster.bench.ops import OpCount, OpsReport, count_ours, narrow, to_markdown
from tandem.cluster.bench.random_models import SHAPES
from tandem.kernels.capture import Captured
from tandem.kernels.ops import StepLayout, StepPlan
from tandem.kernels.reference import ReferenceOps

T = TypeVar("T")

TWO_LAYERS = replace(narrow(SHAPES["qwen2.5-0.5b"]), layers=2, heads=2, kv_heads=1, hidden=64)


def test_views_do_not_count_and_writes_do() -> None:
    x = torch.zeros(4, 4)
    counts = count_while(lambda: (x.view(16).t(), x[0], x.transpose(0, 1), x.expand(2, 4, 4)))
    assert counts.total() == 0
    counts = count_while(lambda: (x.add_(1), x + 1, x.t() @ x))
    assert counts == {"aten.add_.Tensor": 1, "aten.add.Tensor": 1, "aten.mm.default": 1}


def test_as_one_counts_once_whatever_is_inside() -> None:
    counter = OpCounter()
    with counter:
        with counter.as_one("norm"):
            functional.layer_norm(torch.ones(2, 4) * 2, (4,)).sum()
        torch.ones(1).neg()
    assert counter.counts["norm"] == 1
    assert counter.counts["aten.neg.default"] == 1
    assert not any("layer_norm" in name for name in counter.counts)


def test_transformers_grows_by_the_same_number_per_layer_and_fusing_saves_what_it_should() -> None:
    def count(layers: int, *, fused: bool, dtype: torch.dtype = torch.float32) -> int:
        return count_transformers(replace(TWO_LAYERS, layers=layers), attention="sdpa", dtype=dtype, fused=fused)

    two, three = count(2, fused=False), count(3, fused=False)
    fused = count(2, fused=True)
    # RMSNorm is pow, mean, add, rsqrt, mul, mul: five saved for each of 2 x 2 + 1; SwiGLU is silu, mul.
    assert two - fused == 5 * 5 + 2
    # 2 norms of 6; 7 products and 4 copies out of them; rotation of q and k, 5 each; growing K and V; attention; 2
    # residuals; SwiGLU.
    assert three - two == 12 + 11 + 10 + 2 + 1 + 2 + 2
    # In bfloat16 the norm casts there and back: two more saved.
    assert count(2, fused=False, dtype=torch.bfloat16) - count(2, fused=True, dtype=torch.bfloat16) == 7 * 5 + 2


class RecordingOps(ReferenceOps):
    """Records by running all but attention, and says that it recorded so many ops."""

    def capture(self, step: Callable[[], T]) -> Captured[T]:
        return Captured(step(), lambda: None, 17)

    def plan_step(self, layout: StepLayout, kv_cache: Tensor, num_heads: int) -> StepPlan:
        return StepPlan(layout)

    def rope_and_write_kv(self, *arguments: Any, out: Tensor) -> Tensor:
        return out

    def paged_attention(self, *arguments: Any, out: Tensor) -> Tensor:
        return out


def test_ours_recorded_is_one_call_and_otherwise_what_torch_is_asked_for() -> None:
    eager, by_name = count_ours(TWO_LAYERS, ReferenceOps())
    assert eager.ops == eager.host_calls > 40
    assert by_name["paged_attention"] == 2
    recorded, by_name = count_ours(TWO_LAYERS, RecordingOps())
    assert recorded.ops == 17
    assert recorded.host_calls == 1
    assert by_name["sample"] == 1
    assert by_name["add_rms_norm"] == 4
    assert by_name["linear"] == 2 * 3 + 1


@pytest.mark.parametrize(("ops", "host_calls", "is_within"), [(24, 1, True), (25, 1, False), (24, 2, False)])
def test_the_bar(ops: int, host_calls: int, is_within: bool) -> None:
    theirs = (OpCount("transformers, eager", 100, 100),)
    report = OpsReport("two layers", 2, OpCount("tandem", ops, host_calls), {}, theirs)
    assert report.limit == 24
    assert report.is_within is is_within
    assert f"| tandem | {ops} | {host_calls} |" in to_markdown(report)
