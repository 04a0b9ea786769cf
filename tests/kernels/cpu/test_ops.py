"""Native linears, norms and rotation: beside the reference, and to the bit in any company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.kernels.cpu.backend import CpuOps
from tandem.kernels.cpu.packing import CpuLinear
from tandem.kernels.cpu.tunables import linear_candidates
from tandem.kernels.ops import PackedLinear, QKNorm, StepLayout, load_ops

REFERENCE = load_ops("reference")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# (in, out): the demo model's own, and odd ones
SHAPES = [(576, 960), (1536, 576), (40, 24), (100, 70), (17, 33), (1, 1)]
PARTS = [(0, 1), (1, 2), (3, 10), (0, 31), (5, 69), (64, 65), (0, 16), (15, 48)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.float(), theirs.float(), atol=tolerance, rtol=tolerance)


def assert_rows_stand_alone(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The bits of a row are the same alone, in any slice, among NaN, and on two threads."""
    whole = op(x)
    for start, stop in PARTS:
        assert torch.equal(op(x[start:stop].clone()), whole[start:stop]), (start, stop)
    neighbours = torch.full_like(x, float("nan"))
    neighbours[40] = x[7]
    assert torch.equal(op(neighbours)[40], whole[7])
    torch.set_num_threads(2)
    assert torch.equal(op(x), whole)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(level_ops: CpuOps, shape: tuple[int, int], dtype: torch.dtype, has_bias: bool) -> None:
    in_features, out_features = shape
    weight = random(out_features, in_features, dtype=dtype) * in_features**-0.5
    bias = random(out_features, dtype=dtype, seed=1) if has_bias else None
    packed = level_ops.pack_linear(weight, bias)
    assert (packed.in_features, packed.out_features) == shape
    x = random(100, in_features, dtype=dtype, seed=2)
    assert_close(level_ops.linear(x, packed), REFERENCE.linear(x, REFERENCE.pack_linear(weight, bias)))
    assert_rows_stand_alone(lambda rows: level_ops.linear(rows, packed), x)


@pytest.mark.parametrize("shape", [(576, 1536), (40, 24), (17, 33)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gate_up_silu(level_ops: CpuOps, shape: tuple[int, int], dtype: torch.dtype, has_bias: bool) -> None:
    in_features, width = shape
    weight = random(2 * width, in_features, dtype=dtype) * in_features**-0.5
    bias = random(2 * width, dtype=dtype, seed=1) if has_bias else None
    packed = level_ops.pack_gate_up(weight, bias)
    assert (packed.in_features, packed.out_features) == shape
    x = random(100, in_features, dtype=dtype, seed=2)
    assert_close(level_ops.gate_up_silu(x, packed), REFERENCE.gate_up_silu(x, REFERENCE.pack_gate_up(weight, bias)))
    assert_rows_stand_alone(lambda rows: level_ops.gate_up_silu(rows, packed), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 17, 70, 300])
def test_no_candidate_changes_a_bit(dtype: torch.dtype, num_rows: int) -> None:
    ops = CpuOps()
    packed = ops.pack_linear(random(100, 96, dtype=dtype), None)
    assert isinstance(packed, CpuLinear)
    x = random(num_rows, 96, dtype=dtype, seed=1)
    expected = ops.linear(x, packed)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for candidate in linear_candidates(num_rows):
            out = torch.full_like(expected, float("nan"))
            ops.submit_linear(x, packed, out, candidate)
            assert torch.equal(out, expected), candidate


@pytest.mark.parametrize("width", [1, 16, 40, 100, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(level_ops: CpuOps, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (random(100, width, dtype=dtype, seed=seed) for seed in range(3))
    weight = weight[0].contiguous()
    ours, theirs = residual.clone(), residual.clone()
    result = level_ops.add_rms_norm(x, ours, weight, 1e-5)
    assert_close(result, REFERENCE.add_rms_norm(x, theirs, weight, 1e-5))
    assert torch.equal(ours, theirs)
    assert torch.equal(level_ops.rms_norm(theirs, weight, 1e-5), result)
    assert_rows_stand_alone(lambda rows: level_ops.rms_norm(rows, weight, 1e-5), x)


@pytest.mark.parametrize("head_dim", [8, 24, 64, 96])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_write_kv(level_ops: CpuOps, head_dim: int, has_norm: bool, dtype: torch.dtype) -> None:
    """Two sequences, then two rows of padding whose slots are somebody's."""
    num_tokens, num_padding = 37, 2
    rows = num_tokens + num_padding
    qkv = random(rows, (6 + 2 * 3) * head_dim, dtype=dtype)
    cos, sin = random(rows, head_dim // 2, seed=1), random(rows, head_dim // 2, seed=2)
    norm = QKNorm(random(head_dim, dtype=dtype, seed=3), random(head_dim, dtype=dtype, seed=4), 1e-6)
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(0))[:num_tokens]
    caches, queries = [], []
    for ops, count in ((level_ops, rows), (REFERENCE, num_tokens)):
        layout = StepLayout(
            positions=torch.arange(count),
            slots=torch.cat((slots, slots[:num_padding]))[:count],
            query_starts=torch.tensor([0, 20, num_tokens, num_tokens] if count == rows else [0, 20, num_tokens]),
            context_lens=torch.tensor([20, 17, 0] if count == rows else [20, 17]),
            block_tables=torch.zeros(3 if count == rows else 2, 2, dtype=torch.int64),
        )
        cache = torch.zeros(8, 3, 2, 2, 16, head_dim, dtype=dtype)
        plan = ops.plan_step(layout, cache, 6)
        queries.append(
            ops.rope_and_write_kv(qkv[:count], cos[:count], sin[:count], norm if has_norm else None, cache, 1, plan)[
                :num_tokens
            ]
        )
        caches.append(cache)
    assert_close(queries[0], queries[1])
    assert_close(caches[0], caches[1])
    assert not caches[0][:, :, 0].any()


def test_embedding_keeps_to_its_table() -> None:
    """An id that no table has is a bug of ours, but must not read somebody else's memory."""
    ops, table = CpuOps(), random(50, 12, dtype=torch.bfloat16)
    ids = torch.tensor([3, 49, 3, -1, 50])
    assert torch.equal(ops.embedding(ids, table), table[[3, 49, 3, 0, 49]])


def test_a_recording_runs_only_when_replayed() -> None:
    ops = CpuOps()
    x, weight = random(4, 32), random(32, seed=1)
    out = torch.zeros_like(x)
    captured = ops.capture(lambda: ops.rms_norm(ops.rms_norm(x, weight, 1e-5), weight, 1e-5, out=out))
    assert captured.num_ops == 2
    assert not out.any()
    captured.replay()
    assert torch.equal(captured.result, out)
    first = out.clone()
    x += 1
    captured.replay()
    assert not torch.equal(out, first)
    assert torch.equal(out, ops.rms_norm(ops.rms_norm(x, weight, 1e-5), weight, 1e-5))


def test_a_step_that_fails_while_it_is_recorded_leaves_no_recording() -> None:
    ops = CpuOps()

    def broken() -> None:
        raise RuntimeError("no such step")

    with pytest.raises(RuntimeError, match="no such step"):
        ops.capture(broken)
    assert torch.equal(ops.embedding(torch.tensor([1]), torch.tensor([[1.0], [2.0]])), torch.tensor([[2.0]]))


def test_weights_of_another_backend_are_not_taken() -> None:
    with pytest.raises(AssertionError):
        CpuOps().linear(random(1, 4), PackedLinear(4, 4))
