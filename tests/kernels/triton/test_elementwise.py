"""Embedding, norms, products and the rotation with its KV write, each beside its reference over odd shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.kernels.ops import Ops, QKNorm, StepLayout

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 3.2e-2}  # the interpreter rounds bfloat16 down
ALL_TYPES = (torch.float32, torch.float16, torch.bfloat16)
TWO_TYPES = (torch.float32, torch.bfloat16)
ROWS = (1, 3, 17)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """As close as the dtype's rounding of values of this size."""
    tolerance = TOLERANCE[expected.dtype]
    scale = max(1.0, float(expected.float().abs().max()))
    assert actual.dtype == expected.dtype
    assert float((actual.float() - expected.float()).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_embedding_copies_rows(ops: Ops, num_rows: int, dtype: torch.dtype) -> None:
    table = random(11, 1030, dtype=dtype)
    ids = torch.arange(num_rows) * 7 % 11
    assert torch.equal(ops.embedding(ids, table), table[ids])


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize("width", [64, 96, 577])
@pytest.mark.parametrize("num_rows", ROWS)
def test_norms_follow_the_reference(ops: Ops, reference: Ops, num_rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    ours, theirs = (random(num_rows, width, dtype=dtype, seed=2) for _ in range(2))
    out = torch.empty_like(x)
    assert ops.add_rms_norm(x, ours, weight, 1e-5, out=out) is out
    assert_close(out, reference.add_rms_norm(x, theirs, weight, 1e-5))
    assert_close(ours, theirs)  # the residual, in place


LINEAR_SHAPES = [(64, 64), (96, 70), (600, 33)]


@pytest.mark.parametrize("dtype", TWO_TYPES)
@pytest.mark.parametrize(("in_features", "out_features"), LINEAR_SHAPES)
@pytest.mark.parametrize("num_rows", [*ROWS, 70])
def test_linear_follows_the_reference(
    ops: Ops, reference: Ops, num_rows: int, in_features: int, out_features: int, dtype: torch.dtype
) -> None:
    weight = random(out_features, in_features, dtype=dtype) * in_features**-0.5
    x = random(num_rows, in_features, dtype=dtype, seed=1)
    for bias in (None, random(out_features, dtype=dtype, seed=2)):
        packed, expected = ops.pack_linear(weight, bias), reference.linear(x, reference.pack_linear(weight, bias))
        for _ in range(2):  # the second finds the counters as the first left them
            assert_close(ops.linear(x, packed), expected)


@pytest.mark.parametrize("dtype", TWO_TYPES)
@pytest.mark.parametrize(("in_features", "width"), [(64, 48), (100, 130)])
@pytest.mark.parametrize("num_rows", ROWS)
def test_gate_up_follows_the_reference(
    ops: Ops, reference: Ops, num_rows: int, in_features: int, width: int, dtype: torch.dtype
) -> None:
    weight = random(2 * width, in_features, dtype=dtype) * in_features**-0.5
    x = random(num_rows, in_features, dtype=dtype, seed=1)
    for bias in (None, random(2 * width, dtype=dtype, seed=2)):
        packed = ops.pack_gate_up(weight, bias)
        assert packed.out_features == width
        expected = reference.gate_up_silu(x, reference.pack_gate_up(weight, bias))
        assert_close(ops.gate_up_silu(x, packed), expected)


@pytest.mark.parametrize("dtype", TWO_TYPES)
def test_products_have_the_same_bits_at_any_number_of_rows(ops: Ops, dtype: torch.dtype) -> None:
    """Few rows have their splits spread over the grid, many do not."""
    weight, bias = random(40, 1040, dtype=dtype) * 0.05, random(40, dtype=dtype, seed=1)
    x = random(80, 1040, dtype=dtype, seed=2)
    packed, gate_up = ops.pack_linear(weight, bias), ops.pack_gate_up(weight, bias)
    whole, activated = ops.linear(x, packed), ops.gate_up_silu(x, gate_up)
    for start, stop in [(0, 1), (79, 80), (5, 8), (3, 67), (16, 80)]:
        assert torch.equal(ops.linear(x[start:stop].clone(), packed), whole[start:stop])
        assert torch.equal(ops.gate_up_silu(x[start:stop].clone(), gate_up), activated[start:stop])


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        *((head_dim, torch.float32) for head_dim in (32, 64, 80, 96, 128, 256)),
        (96, torch.float16),
        (64, torch.bfloat16),
    ],
)
def test_rotation_and_kv_write_follow_the_reference(
    ops: Ops,
    reference: Ops,
    make_layout: Callable[..., StepLayout],
    head_dim: int,
    has_norm: bool,
    dtype: torch.dtype,
) -> None:
    num_heads, num_kv_heads, num_layers, block_size = 6, 2, 2, 4
    layout = make_layout([(1, 9), (3, 5)], block_size)
    padded = make_layout([(1, 9), (3, 5)], block_size, padding=2, empty=2)
    shape = (6, num_kv_heads, num_layers, 2, block_size, head_dim)
    qkv = random(6, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    cos, sin = random(6, head_dim // 2, seed=1), random(6, head_dim // 2, seed=2)
    norm = QKNorm(random(head_dim, dtype=dtype, seed=3), random(head_dim, dtype=dtype, seed=4), 1e-6)
    qk_norm = norm if has_norm else None
    ours, theirs = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    plan = ops.plan_step(padded, ours, num_heads)
    query = ops.rope_and_write_kv(qkv, cos, sin, qk_norm, ours, 1, plan)
    plan = reference.plan_step(layout, theirs, num_heads)
    expected = reference.rope_and_write_kv(qkv[:4], cos[:4], sin[:4], qk_norm, theirs, 1, plan)
    assert_close(query[:4], expected)
    assert_close(ours, theirs)  # nothing of the padding rows, whose slot is 0
    assert torch.equal(ours[:, :, 0], torch.zeros_like(ours[:, :, 0]))


def test_layouts_that_a_kernel_would_misread_are_refused(ops: Ops) -> None:
    x, weight = random(3, 64), random(64)
    with pytest.raises(ValueError, match="weight must be"):
        ops.rms_norm(x, random(65), 1e-5)
    with pytest.raises(ValueError, match="out must be"):
        ops.rms_norm(x, weight, 1e-5, out=torch.empty(3, 64, dtype=torch.float16))
    with pytest.raises(ValueError, match="contiguous"):
        ops.rms_norm(random(64, 3).T, weight, 1e-5)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        ops.rms_norm(random(200)[1:193].view(3, 64), weight, 1e-5)
    with pytest.raises(ValueError, match="float16, bfloat16 or float32"):
        ops.embedding(torch.tensor([0]), random(3, 64).double())


def test_no_rows_are_no_work(ops: Ops) -> None:
    packed = ops.pack_linear(random(8, 64), None)
    assert ops.linear(torch.empty(0, 64), packed).shape == (0, 8)
    assert ops.rms_norm(torch.empty(0, 64), random(64), 1e-5).shape == (0, 64)
