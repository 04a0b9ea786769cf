"""Each op of the reference backend against its formula, and its bits at other row counts, splits and neighbours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.ops import QKNorm, StepLayout, load_ops

OPS = load_ops("reference")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# (in, out): the demo model's own, and odd ones
SHAPES = [(576, 960), (576, 3072), (1536, 576), (40, 24), (100, 70), (17, 33)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows_stand_alone(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The bits of a row are the same alone, in any slice, and among other neighbours."""
    whole = op(x)
    for start, stop in [(0, 1), (1, 2), (3, 10), (0, 31), (5, 69), (64, 65), (63, 150), (0, 2)]:
        part = op(x[start:stop].clone())
        assert torch.equal(part, whole[start:stop]), (start, stop)
    neighbours = torch.full_like(x[:100], 3e4)
    neighbours[40] = x[7]
    neighbours[41:] = float("nan")
    assert torch.equal(op(neighbours)[40], whole[7])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "has_bias"), [(dtype, False) for dtype in DTYPES] + [(torch.bfloat16, True)])
def test_linear(shape: tuple[int, int], dtype: torch.dtype, has_bias: bool, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    in_features, out_features = shape
    weight = random(out_features, in_features, dtype=dtype) * in_features**-0.5
    bias = random(out_features, dtype=dtype, seed=1) if has_bias else None
    packed = OPS.pack_linear(weight, bias)
    x = random(200, in_features, dtype=dtype, seed=2)
    assert (packed.in_features, packed.out_features) == shape
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    result = OPS.linear(x, packed)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCE[dtype] * 4, rtol=TOLERANCE[dtype])
    assert_rows_stand_alone(lambda rows: OPS.linear(rows, packed), x)
    out = torch.empty_like(result)
    assert OPS.linear(x, packed, out=out) is out
    assert torch.equal(out, result)


@pytest.mark.parametrize("width", [16, 40, 100, 576, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (random(200, width, dtype=dtype, seed=seed) for seed in range(3))
    weight = weight[0].contiguous()
    total = residual + x
    scaled = total.float() * torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    kept = residual.clone()
    result = OPS.add_rms_norm(x, kept, weight, 1e-5)
    assert torch.equal(kept, total)
    torch.testing.assert_close(result, scaled.to(dtype) * weight, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(OPS.rms_norm(total, weight, 1e-5), result)
    assert_rows_stand_alone(lambda rows: OPS.rms_norm(rows, weight, 1e-5), x)


@pytest.mark.parametrize("width", [7, 100, 1536])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_up_silu(width: int, dtype: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    weight, bias = random(2 * width, 40, dtype=dtype), random(2 * width, dtype=dtype, seed=1)
    packed = OPS.pack_gate_up(weight, bias)
    assert (packed.in_features, packed.out_features) == (40, width)
    x = random(200, 40, dtype=dtype, seed=2) / 4
    gate, up = F.linear(x.float(), weight.float(), bias.float()).to(dtype).double().chunk(2, -1)
    expected = gate * torch.sigmoid(gate) * up
    result = OPS.gate_up_silu(x, packed).double()
    torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype] * 8, rtol=TOLERANCE[dtype] * 4)
    assert_rows_stand_alone(lambda rows: OPS.gate_up_silu(rows, packed), x)


def test_embedding() -> None:
    table, ids = random(50, 12, dtype=torch.bfloat16), torch.tensor([3, 49, 3])
    assert torch.equal(OPS.embedding(ids, table), table[ids])


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="reference"):
        load_ops("abacus")


# Attention


class Text:
    """Sequences with random q, k and v, run through the two attention ops in whatever pieces a test likes."""

    def __init__(
        self, lens: list[int], dtype: torch.dtype, heads: tuple[int, int, int], block_size: int, num_layers: int = 2
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = heads
        self.block_size, self.dtype, self.lens = block_size, dtype, lens
        self.qkv = [
            random(length, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, dtype=dtype, seed=seed)
            for seed, length in enumerate(lens)
        ]
        blocks = torch.randperm(sum(-(-length // block_size) for length in lens), generator=torch.Generator()).tolist()
        self.blocks = [[blocks.pop() for _ in range(-(-length // block_size))] for length in lens]
        num_blocks = sum(len(table) for table in self.blocks)
        shape = (num_blocks, self.num_kv_heads, num_layers, 2, block_size, self.head_dim)
        self.cache = torch.full(shape, float("nan"), dtype=dtype)  # what earlier users left behind
        angles = torch.outer(torch.arange(max(lens)).double(), 10.0 ** -torch.arange(self.head_dim // 2).double())
        self.cos, self.sin = angles.cos().float(), angles.sin().float()

    def step(self, parts: list[tuple[int, int, int]], layer: int = 1, window: int | None = None) -> list[Tensor]:
        """Attention outputs of (sequence, start, stop), each [stop - start, H * D], computed in one step."""
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in parts])
        seq_of = [seq for seq, start, stop in parts for _ in range(start, stop)]
        slots = torch.tensor(
            [
                self.blocks[seq][position // self.block_size] * self.block_size + position % self.block_size
                for seq, position in zip(seq_of, positions.tolist(), strict=True)
            ]
        )
        lengths = torch.tensor([stop - start for _, start, stop in parts])
        width = max(len(self.blocks[seq]) for seq, _, _ in parts)
        layout = StepLayout(
            positions=positions,
            slots=slots,
            query_starts=torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))),
            context_lens=torch.tensor([stop for _, _, stop in parts]),
            block_tables=torch.tensor(
                [self.blocks[seq] + [0] * (width - len(self.blocks[seq])) for seq, _, _ in parts]
            ),
        )
        plan = OPS.plan_step(layout, self.cache, self.num_heads)
        qkv = torch.cat([self.qkv[seq][start:stop] for seq, start, stop in parts])
        query = OPS.rope_and_write_kv(qkv, self.cos[positions], self.sin[positions], None, self.cache, layer, plan)
        scale = self.head_dim**-0.5
        out = OPS.paged_attention(query, self.cache, layer, plan, scale, window)
        return list(out.split(lengths.tolist()))

    def expected(self, seq: int, window: int | None) -> Tensor:
        """Plain attention in float64 over the whole sequence."""
        heads = self.qkv[seq].double().view(self.lens[seq], -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        cos, sin = self.cos[: self.lens[seq], None].double(), self.sin[: self.lens[seq], None].double()

        def rotate(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        q, k = rotate(q), rotate(k)
        groups = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.head_dim**-0.5
        place = torch.arange(self.lens[seq])
        hidden = place[None] > place[:, None]
        if window is not None:
            hidden |= place[None] <= place[:, None] - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def split_at(length: int, sizes: list[int]) -> list[tuple[int, int]]:
    """Cut [0, length) into pieces of these sizes, over and over."""
    cuts, start, index = [], 0, 0
    while start < length:
        stop = min(length, start + sizes[index % len(sizes)])
        cuts.append((start, stop))
        start, index = stop, index + 1
    return cuts


HEADS = [(9, 3, 64), (4, 4, 16), (8, 1, 10), (14, 2, 64)]


@pytest.mark.parametrize("window", [None, 1, 40, 130])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_formula(dtype: torch.dtype, heads: tuple[int, int, int], window: int | None) -> None:
    text = Text([300, 1, 33, 129], dtype, heads, 32)
    results = text.step([(seq, 0, length) for seq, length in enumerate(text.lens)], window=window)
    for seq, result in enumerate(results):
        torch.testing.assert_close(
            result.double(), text.expected(seq, window), atol=TOLERANCE[dtype] * 3, rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize(
    ("heads", "window", "num_threads"),
    [
        (HEADS[0], None, 1),
        (HEADS[0], None, 2),
        (HEADS[0], 40, 1),
        (HEADS[1], None, 1),
        (HEADS[2], 40, 1),
        (HEADS[3], None, 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_bits_do_not_depend_on_chunks_or_company(
    dtype: torch.dtype, heads: tuple[int, int, int], window: int | None, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    lens = [290, 1, 37, 128, 129]
    text = Text(lens, dtype, heads, 32)
    whole = text.step([(seq, 0, length) for seq, length in enumerate(lens)], window=window)
    cache = text.cache.clone()
    for sizes in ([1], [7, 64, 3], [128, 1])[num_threads - 1 :]:
        text.cache.fill_(float("nan"))
        for start, stop in split_at(290, sizes):  # alone
            (part,) = text.step([(0, start, stop)], window=window)
            assert torch.equal(part, whole[0][start:stop]), (sizes, start)
    text.cache.fill_(float("inf"))
    for start, stop in split_at(290, [29]):  # in company, whose places and numbers change
        parts = [(0, start, stop)]
        parts += [(seq, start, min(stop, lens[seq])) for seq in (4, 2, 3) if start < lens[seq]]
        results = text.step(parts[::-1], window=window)[::-1]
        for (seq, first, last), result in zip(parts, results, strict=True):
            assert torch.equal(result, whole[seq][first:last]), (seq, first)
    text.step([(1, 0, 1)], window=window)
    for seq, length in enumerate(lens):
        for position in range(length):
            where = (text.blocks[seq][position // 32], slice(None), 1, slice(None), position % 32)
            assert torch.equal(text.cache[where], cache[where])


def test_attention_with_blocks_of_other_sizes() -> None:
    for block_size in (2, 16, 256):
        text = Text([300, 20], torch.bfloat16, (9, 3, 64), block_size)
        results = text.step([(0, 0, 300), (1, 0, 20)])
        torch.testing.assert_close(results[0].double(), text.expected(0, None), atol=5e-2, rtol=2e-2)
        again = Text([300, 20], torch.bfloat16, (9, 3, 64), block_size)
        again.step([(0, 0, 299)])
        assert torch.equal(again.step([(0, 299, 300)])[0], results[0][299:])


def test_only_the_steps_own_slots_of_its_layer_are_written() -> None:
    text = Text([70, 40], torch.bfloat16, (9, 3, 64), 32)
    text.cache.fill_(5.0)
    text.step([(0, 0, 33), (1, 0, 1)], layer=0)
    touched = (text.cache != 5.0).any(-1).any(1).any(2)  # [blocks, layers, block_size]
    assert not touched[:, 1].any()
    assert int(touched.sum()) == 34


def test_qk_norm_comes_before_the_rotation() -> None:
    text = Text([5], torch.float32, (4, 2, 16), 4, num_layers=1)
    norm = QKNorm(random(16, seed=8), random(16, seed=9), 1e-6)
    heads = text.qkv[0].view(5, 8, 16)
    q, k = OPS.rms_norm(heads[:, :4], norm.q_weight, 1e-6), OPS.rms_norm(heads[:, 4:6], norm.k_weight, 1e-6)
    layout = StepLayout(
        positions=torch.arange(5),
        slots=torch.tensor([text.blocks[0][p // 4] * 4 + p % 4 for p in range(5)]),
        query_starts=torch.tensor([0, 5]),
        context_lens=torch.tensor([5]),
        block_tables=torch.tensor(text.blocks),
    )
    plan = OPS.plan_step(layout, text.cache, 4)
    rotated = OPS.rope_and_write_kv(text.qkv[0], text.cos[:5], text.sin[:5], norm, text.cache, 0, plan)
    plain = torch.cat((q, k, heads[:, 6:]), 1).flatten(1)
    cache = text.cache.clone()
    expected = OPS.rope_and_write_kv(plain, text.cos[:5], text.sin[:5], None, text.cache, 0, plan)
    assert torch.equal(rotated, expected)
    assert torch.equal(cache.nan_to_num(), text.cache.nan_to_num())
