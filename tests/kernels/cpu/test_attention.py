"""Native paged attention: beside the reference, and to the bit in any batch, chunk, cut of the queries, and threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.kernels.cpu.backend import CpuOps
from tandem.kernels.ops import StepLayout, load_ops
from tandem.kernels.tuning import Candidate

REFERENCE = load_ops("reference")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
# (heads, KV heads, head_dim): groups of 1, 3, 7 and 8, and each head size
HEADS = [(9, 3, 64), (7, 1, 32), (8, 1, 80), (3, 3, 96), (3, 1, 128), (2, 2, 256), (4, 4, 10)]
LAYERS, LAYER = 2, 1
Part = tuple[int, int, int]
"""Sequence, first position, end."""


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Scene:
    """Sequences with random q, k and v in scattered blocks. All slots and blocks that they do not use hold NaN."""

    def __init__(self, lens: list[int], heads: tuple[int, int, int], dtype: torch.dtype, block_size: int = 32) -> None:
        self.lens = lens
        num_heads, num_kv_heads, head_dim = heads
        self.scale = head_dim**-0.5
        # Scores of a wide range, so that maxima rise from tile to tile.
        self.queries = [
            random(length, num_heads, head_dim, dtype=dtype, seed=seq) * 3 for seq, length in enumerate(lens)
        ]
        num_blocks = [-(-length // block_size) for length in lens]
        free = torch.randperm(sum(num_blocks) + 2, generator=torch.Generator().manual_seed(7)).tolist()
        self.tables = [[free.pop() for _ in range(count)] for count in num_blocks]
        self.unused = free[0]
        shape = (len(free) + sum(num_blocks), num_kv_heads, LAYERS, 2, block_size, head_dim)
        self.cache = torch.full(shape, float("nan"), dtype=dtype)
        for seq, (length, table) in enumerate(zip(lens, self.tables)):
            kv = random(len(table), num_kv_heads, LAYERS, 2, block_size, head_dim, dtype=dtype, seed=100 + seq)
            behind = torch.arange(len(table) * block_size).view(-1, block_size) >= length
            self.cache[table] = kv.masked_fill(behind[:, None, None, None, :, None], float("nan"))

    def everything(self) -> list[Part]:
        return [(seq, 0, length) for seq, length in enumerate(self.lens)]

    def layout(self, parts: list[Part]) -> StepLayout:
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in parts])
        width = max(len(table) for table in self.tables)
        lens = torch.tensor([stop - start for _, start, stop in parts])
        return StepLayout(
            positions=positions,
            slots=torch.zeros_like(positions),
            query_starts=torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0))),
            context_lens=torch.tensor([stop for _, _, stop in parts]),
            block_tables=torch.tensor(
                [self.tables[seq] + [self.unused] * (width - len(self.tables[seq])) for seq, _, _ in parts]
            ),
        )

    def attend(
        self,
        ops: CpuOps,
        parts: list[Part],
        window: int | None = None,
        softcap: float | None = None,
        query_block: int = 32,
    ) -> list[Tensor]:
        """What `ops` makes of these parts in one call, one [stop - start, H * D] each."""
        query = torch.cat([self.queries[seq][start:stop] for seq, start, stop in parts])
        out = query.new_full((query.shape[0], query.shape[1] * query.shape[2]), float("nan"))
        plan = ops.plan_step(self.layout(parts), self.cache, query.shape[1])
        how = Candidate.of(query_block=query_block)
        ops.submit_attention(query, self.cache, LAYER, plan, self.scale, window, softcap, out, how)
        return list(torch.split(out, [stop - start for _, start, stop in parts]))

    def expected(self, parts: list[Part], window: int | None = None, softcap: float | None = None) -> list[Tensor]:
        """What the reference backend makes of them."""
        query = torch.cat([self.queries[seq][start:stop] for seq, start, stop in parts])
        plan = REFERENCE.plan_step(self.layout(parts), self.cache, query.shape[1])
        result = REFERENCE.paged_attention(query, self.cache, LAYER, plan, self.scale, window, softcap)
        return list(torch.split(result, [stop - start for _, start, stop in parts]))


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        tolerance = TOLERANCE[one.dtype]
        torch.testing.assert_close(one.float(), other.float(), atol=tolerance, rtol=tolerance)


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other), index


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_prompts(level_ops: CpuOps, dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    scene = Scene([97, 1, 32, 33], heads, dtype)
    parts = scene.everything()
    assert_close(scene.attend(level_ops, parts), scene.expected(parts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3, 17])
def test_decode_steps(level_ops: CpuOps, dtype: torch.dtype, batch: int) -> None:
    lens = [(31, 32, 33, 63, 64, 65, 1, 150)[seq % 8] for seq in range(batch)]
    scene = Scene(lens, (9, 3, 64), dtype)
    parts = [(seq, length - 1, length) for seq, length in enumerate(lens)]
    assert_close(scene.attend(level_ops, parts), scene.expected(parts))


@pytest.mark.parametrize("block_size", [2, 16, 64, 256])
def test_blocks_of_other_sizes(level_ops: CpuOps, block_size: int) -> None:
    scene = Scene([130, 20], (9, 3, 64), torch.bfloat16, block_size)
    parts = scene.everything()
    results = scene.attend(level_ops, parts)
    assert_close(results, scene.expected(parts))
    assert_equal(results, Scene([130, 20], (9, 3, 64), torch.bfloat16, block_size).attend(level_ops, parts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (40, None), (None, 4.0), (70, 4.0)])
def test_window_and_softcap(level_ops: CpuOps, dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    scene = Scene([150, 40, 1], (6, 2, 64), dtype)
    parts = scene.everything()
    assert_close(scene.attend(level_ops, parts, window, softcap), scene.expected(parts, window, softcap))


@pytest.mark.parametrize("heads", [(9, 3, 64), (7, 1, 80), (2, 2, 128)])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_company(
    level_ops: CpuOps, dtype: torch.dtype, window: int | None, heads: tuple[int, int, int]
) -> None:
    lens = [200, 1, 37, 65]
    scene = Scene(lens, heads, dtype)
    whole = scene.attend(level_ops, scene.everything(), window)
    for query_block, num_threads in [(1, 1), (5, 2), (128, 2)]:
        torch.set_num_threads(num_threads)
        again = scene.attend(level_ops, scene.everything()[::-1], window, query_block=query_block)
        assert_equal(again[::-1], whole)
    # Chunks of a prompt beside another's and beside decode steps; cut at and around the borders of tiles.
    for start, stop in [(0, 7), (7, 64), (64, 129), (129, 130), (130, 200), (199, 200)]:
        parts = [(1, 0, 1), (0, start, stop), (3, 64, 65), (2, 3, 37)]
        results = scene.attend(level_ops, parts, window)
        assert_equal(results, [whole[seq][first:last] for seq, first, last in parts])


def test_padding_sequences_are_left_out(level_ops: CpuOps) -> None:
    scene = Scene([40, 70], (9, 3, 64), torch.bfloat16)
    parts = [(0, 40, 40), (0, 39, 40), (1, 0, 0), (1, 60, 70), (1, 0, 0)]
    results = scene.attend(level_ops, parts)
    assert_equal(results[1::2], scene.attend(level_ops, [parts[1], parts[3]]))


def test_rows_of_nobody_are_left_alone(level_ops: CpuOps) -> None:
    scene = Scene([40], (9, 3, 64), torch.bfloat16)
    query = scene.queries[0][:3]
    out = query.new_full((3, 9 * 64), 5.0)
    plan = level_ops.plan_step(scene.layout([(0, 39, 40)]), scene.cache, 9)
    level_ops.paged_attention(query, scene.cache, LAYER, plan, scene.scale, out=out)
    assert torch.isfinite(out[0]).all()
    assert (out[1:] == 5.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(9, 3, 64), (2, 2, 10)])
def test_what_a_spoilt_sequence_leaves_behind(
    level_ops: CpuOps, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """A thread's memory is kept: NaN from one call must not reach the next."""
    scene, spoilt = Scene([40, 3], heads, dtype), Scene([130], heads, dtype)
    before = scene.attend(level_ops, scene.everything())
    spoilt.cache.fill_(float("nan"))
    assert spoilt.attend(level_ops, spoilt.everything())[0].isnan().all()
    assert_equal(scene.attend(level_ops, scene.everything()), before)


def test_scores_may_rise_and_fall_by_hundreds(level_ops: CpuOps) -> None:
    """Running maxima are replaced in most tiles, or overtaken by far in the first."""
    scene = Scene([300, 300], (3, 1, 64), torch.bfloat16)
    ramp = torch.linspace(0, 30, 300).view(-1, 1, 1)
    scene.queries = [(query / 3 * ramp).to(torch.bfloat16) for query in scene.queries]
    parts = scene.everything()
    results = scene.attend(level_ops, parts)
    assert all(torch.isfinite(result).all() for result in results)
    assert_close(results, scene.expected(parts))
    assert_equal(scene.attend(level_ops, [(0, 150, 300)]), [results[0][150:]])


@pytest.mark.parametrize(
    ("heads", "block_size", "message"), [((2, 1, 32), 24, "power of two"), ((7, 3, 32), 32, "divide")]
)
def test_a_cache_that_the_kernels_do_not_read_is_refused(
    heads: tuple[int, int, int], block_size: int, message: str
) -> None:
    """They would read past its end."""
    num_heads, num_kv_heads, head_dim = heads
    cache = torch.zeros(4, num_kv_heads, LAYERS, 2, block_size, head_dim)
    with pytest.raises(ValueError, match=message):
        CpuOps().plan_step(Scene([3], (1, 1, head_dim), torch.float32).layout([(0, 0, 3)]), cache, num_heads)
