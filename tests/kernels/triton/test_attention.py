"""Paged attention of the GPU backend: beside the reference, and bit for bit between its two kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.kernels.ops import Ops, StepLayout

NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS = 6, 2, 2
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random_cache(layout: StepLayout, block_size: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Random K and V in the sequences' slots, NaN everywhere else."""
    shape = (int(layout.block_tables.max()) + 1, NUM_KV_HEADS, NUM_LAYERS, 2, block_size, head_dim)
    cache = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    used = torch.zeros(shape[0] * block_size, dtype=torch.bool)
    for table, context in zip(layout.block_tables.tolist(), layout.context_lens.tolist(), strict=True):
        for position in range(context):
            used[table[position // block_size] * block_size + position % block_size] = True
    unused = ~used.view(shape[0], 1, 1, 1, block_size, 1)
    return cache.masked_fill_(unused, float("nan"))


def attend(
    ops: Ops, query: Tensor, cache: Tensor, layout: StepLayout, window: int | None, softcap: float | None
) -> Tensor:
    plan = ops.plan_step(layout, cache, NUM_HEADS)
    return ops.paged_attention(query, cache, 1, plan, cache.shape[-1] ** -0.5, window, softcap)


def random_query(num_tokens: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(num_tokens, NUM_HEADS, head_dim, generator=torch.Generator().manual_seed(4)) * 2).to(dtype)


DECODE = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 65)]
CHUNKS = [(5, 5), (1, 33), (17, 40), (2, 66)]


HEADS = [
    *[(head_dim, torch.float32) for head_dim in (32, 64, 80, 96, 128, 256)],
    *[(64, torch.float16), (80, torch.bfloat16), (256, torch.float16)],
]


@pytest.mark.parametrize(("head_dim", "dtype"), HEADS)
@pytest.mark.parametrize("sequences", [DECODE, CHUNKS], ids=["decode", "chunks"])
def test_attention_follows_the_reference(
    ops: Ops,
    reference: Ops,
    make_layout: Callable[..., StepLayout],
    sequences: list[tuple[int, int]],
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    layout = make_layout(sequences, 16)
    cache = random_cache(layout, 16, head_dim, dtype)
    query = random_query(layout.slots.shape[0], head_dim, dtype)
    actual, expected = (attend(each, query, cache, layout, None, None) for each in (ops, reference))
    assert float((actual.float() - expected.float()).abs().max()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("sequences", [[(1, 1100), (1, 70)], [(3, 1100), (2, 514)]], ids=["decode", "chunks"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 5.0), (600, 5.0)])
def test_windows_softcap_and_several_splits_follow_the_reference(
    ops: Ops,
    reference: Ops,
    make_layout: Callable[..., StepLayout],
    sequences: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
) -> None:
    layout = make_layout(sequences, 32)
    cache = random_cache(layout, 32, 32, torch.float16)
    query = random_query(layout.slots.shape[0], 32, torch.float16)
    actual, expected = (attend(each, query, cache, layout, window, softcap) for each in (ops, reference))
    assert float((actual - expected).abs().max()) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize(
    ("head_dim", "context", "dtype"),
    [(64, 70, torch.float32), (80, 70, torch.bfloat16), (32, 1030, torch.float16), (256, 70, torch.float16)],
)
@pytest.mark.parametrize("window", [None, 33])
def test_a_token_has_the_same_bits_in_any_step(
    ops: Ops,
    make_layout: Callable[..., StepLayout],
    head_dim: int,
    context: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    """As part of a chunk of one sequence or of several, alone, and in decode steps with and without padding."""
    layout = make_layout([(4, 20), (5, context)], 16)
    cache = random_cache(layout, 16, head_dim, dtype)
    query = random_query(9, head_dim, dtype)
    whole = attend(ops, query, cache, layout, window, None)

    def step(rows: slice, contexts: list[int], table_rows: list[int], starts: list[int], padding: int = 0) -> Tensor:
        part = replace(
            layout,
            positions=torch.cat((layout.positions[rows], torch.zeros(padding, dtype=torch.int64))),
            slots=torch.cat((layout.slots[rows], torch.zeros(padding, dtype=torch.int64))),
            query_starts=torch.tensor(starts + starts[-1:] * padding),
            context_lens=torch.tensor(contexts + [0] * padding),
            block_tables=layout.block_tables[table_rows + [0] * padding],
        )
        rows_of = torch.cat((query[rows], query.new_full((padding, NUM_HEADS, head_dim), float("nan"))))
        return attend(ops, rows_of, cache, part, window, None)[: len(layout.positions[rows])]

    assert torch.equal(step(slice(8, 9), [context], [1], [0, 1]), whole[8:9])  # a decode step
    assert torch.equal(step(slice(3, 5), [20, context - 4], [0, 1], [0, 1, 2], padding=2), whole[3:5])
    assert torch.equal(step(slice(6, 9), [context], [1], [0, 3]), whole[6:9])  # a smaller chunk


def test_spreading_splits_over_programs_changes_no_bit(
    ops: Ops, make_layout: Callable[..., StepLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.kernels.triton import attention

    layout = make_layout([(1, 1100), (1, 600), (1, 30)], 32)
    cache = random_cache(layout, 32, 32, torch.float16)
    query = random_query(3, 32, torch.float16)
    results = []
    for wanted in (1, 12, 256):
        monkeypatch.setattr(attention, "_WANTED_PROGRAMS", wanted)
        results += [attend(ops, query, cache, layout, None, None) for _ in range(2)]  # counters are reset
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_cache_that_kernels_do_not_read_is_refused(ops: Ops, make_layout: Callable[..., StepLayout]) -> None:
    layout = make_layout([(1, 3)], 4)
    for shape, message in [
        ((1, 2, 1, 2, 4, 24), "head_dim"),
        ((1, 4, 1, 2, 4, 64), "divide"),
        ((1, 2, 1, 2, 3, 64), "power"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.plan_step(layout, torch.zeros(shape), NUM_HEADS)


def test_softcap_is_a_tanh(ops: Ops, reference: Ops, make_layout: Callable[..., StepLayout]) -> None:
    """Literally, for one token: both backends share the way they compute it."""
    layout = make_layout([(1, 20)], 16)
    cache, query = random_cache(layout, 16, 32, torch.float32), random_query(1, 32, torch.float32)
    slots = [int(layout.block_tables[0, place // 16]) * 16 + place % 16 for place in range(20)]
    rows = cache[:, :, 1].permute(0, 3, 1, 2, 4).reshape(-1, NUM_KV_HEADS, 2, 32)[slots]  # [20, KVH, 2, D]
    for head in range(NUM_HEADS):
        keys, values = rows[:, head // 3, 0], rows[:, head // 3, 1]
        weights = torch.softmax(5.0 * torch.tanh(keys @ query[0, head] * 32**-0.5 / 5.0), 0)
        for each in (ops, reference):
            actual = attend(each, query, cache, layout, None, 5.0).view(NUM_HEADS, 32)[head]
            assert torch.allclose(actual, weights @ values, atol=1e-5)
