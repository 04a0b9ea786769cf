"""The native sampler at every instruction set of this machine: beside the reference, at its edges, and to the bit."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tandem.kernels.cpu.backend import CpuOps
from tandem.kernels.cpu.build import LEVELS, levels
from tandem.kernels.ops import Constraints, Penalties, Sampled, SamplingInputs, load_ops

REFERENCE = load_ops("reference")
INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


runnable_levels = cache(levels)


@pytest.fixture(scope="module", params=list(LEVELS))
def ops(request: pytest.FixtureRequest) -> CpuOps:
    if request.param not in runnable_levels():
        pytest.skip("this machine lacks the instructions")
    return CpuOps(request.param)


def make_inputs(num_rows: int, **changes: object) -> SamplingInputs:
    """Neutral but for the changes: tensors, or a number for all rows."""
    values: dict[str, object] = {
        "temperature": torch.ones(num_rows),
        "top_k": torch.zeros(num_rows, dtype=torch.int64),
        "top_p": torch.ones(num_rows),
        "min_p": torch.zeros(num_rows),
        "seed": torch.arange(num_rows) * 7919 - 5,
        "choice": torch.arange(num_rows) % 3,
        "position": torch.arange(num_rows),
    }
    for name, value in changes.items():
        like = values.get(name)
        is_number = isinstance(like, Tensor) and isinstance(value, (int, float))
        values[name] = torch.full_like(like, value) if is_number else value  # type: ignore[arg-type]
    return SamplingInputs(**values)  # type: ignore[arg-type]


def rows_of(inputs: SamplingInputs, rows: slice, num_top: int) -> SamplingInputs:
    """The inputs of some rows, with logprobs of them all."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "position")
    penalties = inputs.penalties
    if penalties is not None:
        penalties = Penalties(*(getattr(penalties, field.name)[rows] for field in fields(Penalties)))
    picked = {name: getattr(inputs, name)[rows] for name in names}
    wanted = torch.arange(len(picked["seed"]))
    return SamplingInputs(**picked, penalties=penalties, logprob_rows=wanted, num_top_logprobs=num_top)


@cache
def mixed_case(num_rows: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, SamplingInputs, Sampled]:
    """Rows of all kinds, and what the reference makes of them."""
    generator = torch.Generator().manual_seed(vocab_size)

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (num_rows,), generator=generator)]

    logits = (torch.randn(num_rows, vocab_size, generator=generator) * pick(1.0, 4.0)[:, None]).to(dtype)
    lens = torch.randint(0, 40, (num_rows,), generator=generator)
    token_ids = torch.randint(vocab_size, (num_rows, 40), generator=generator)
    penalties = Penalties(token_ids, lens // 2, lens, pick(0.0, 0.5), pick(0.0, 0.3), pick(1.0, 1.3))
    inputs = make_inputs(
        num_rows,
        temperature=pick(0.0, 0.7, 1.0, 1.5),
        top_k=pick(0, 0, 1, 50, 300, 3000).long(),
        top_p=pick(1.0, 0.95, 0.5),
        min_p=pick(0.0, 0.0, 0.05, 1e-4),
        penalties=penalties,
        logprob_rows=torch.arange(0, num_rows, 2),
        num_top_logprobs=min(20, vocab_size),
    )
    return logits, inputs, REFERENCE.sample(logits, inputs)


def agreement(sampled: Sampled, expected: Sampled, inputs: SamplingInputs) -> float:
    """The share of equal tokens. Asserts that logprobs and alternatives are the same."""
    is_equal = sampled.token_ids == expected.token_ids
    assert is_equal[inputs.temperature < 1e-5].all()
    if inputs.logprob_rows is not None:
        assert sampled.logprobs is not None
        assert expected.logprobs is not None
        assert sampled.top_logprobs is not None
        assert expected.top_logprobs is not None
        same = is_equal[inputs.logprob_rows]
        torch.testing.assert_close(sampled.logprobs[same], expected.logprobs[same], rtol=0, atol=1e-5)
        torch.testing.assert_close(sampled.top_logprobs, expected.top_logprobs, rtol=0, atol=1e-5)
        assert sampled.top_token_ids is not None
        assert expected.top_token_ids is not None
        assert torch.equal(sampled.top_token_ids, expected.top_token_ids)
    return float(is_equal.double().mean())


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(3, 1), (50, 2), (300, 17), (1000, 1003), (16, 49_152)])
def test_rows_of_all_kinds_match_the_reference(ops: CpuOps, num_rows: int, vocab_size: int) -> None:
    for dtype in DTYPES:
        logits, inputs, expected = mixed_case(num_rows, vocab_size, dtype)
        assert agreement(ops.sample(logits, inputs), expected, inputs) >= 0.999


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(50, 2), (300, 17), (16, 49_152)])
def test_constrained_rows_match_the_reference(ops: CpuOps, num_rows: int, vocab_size: int) -> None:
    logits, inputs, _ = mixed_case(num_rows, vocab_size, torch.bfloat16)
    generator = torch.Generator().manual_seed(vocab_size)
    words = -(-vocab_size // 32)
    masks = torch.randint(-(1 << 31), 1 << 31, (num_rows, words), generator=generator).to(torch.int32)
    masks[::3] = torch.where(torch.rand(masks[::3].shape, generator=generator) < 0.5, 0, -1).to(torch.int32)
    lens = torch.randint(0, 2, (num_rows,), generator=generator)
    constraints = Constraints(
        torch.randint(vocab_size, (num_rows, 1), generator=generator),
        torch.randn(num_rows, 1, generator=generator) * 8,
        lens,
        torch.randint(-1, num_rows, (num_rows,), generator=generator),
        masks,
    )
    constrained = replace(inputs, constraints=constraints)
    expected = REFERENCE.sample(logits, constrained)
    assert agreement(ops.sample(logits, constrained), expected, inputs) >= 0.999


def is_kept(logits: Tensor, filters: dict[str, float]) -> Tensor:
    """The definition, literally, for one row without equals. bool [V]"""
    order = logits.argsort(descending=True)
    probabilities = torch.softmax(logits[order].double() / filters.get("temperature", 1.0), -1)
    keep = probabilities >= filters.get("min_p", 0.0) * probabilities[0]
    keep[int(filters.get("top_k", len(logits))) :] = False
    probabilities = probabilities * keep / (probabilities * keep).sum()
    keep &= probabilities.cumsum(-1) - probabilities < filters.get("top_p", 1.0)
    return torch.zeros_like(keep).scatter(0, order, keep)


FILTERS = [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.6, "top_k": 30, "top_p": 0.9}]


@pytest.mark.parametrize("filters", FILTERS)
def test_frequencies_follow_the_distribution(ops: CpuOps, filters: dict[str, float]) -> None:
    """Pearson's chi-square, and nothing that the filters remove."""
    count, vocab_size = 20_000, 40
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3))
    inputs = make_inputs(count, **filters, seed=11)
    frequencies = ops.sample(logits.expand(count, vocab_size), inputs).token_ids.bincount(minlength=vocab_size)
    kept = is_kept(logits, filters)
    assert 1 < kept.sum() <= vocab_size
    expected = torch.softmax(logits / filters.get("temperature", 1.0), -1) * kept
    expected = count * expected / expected.sum()
    assert not frequencies[~kept].any()
    statistic = float(((frequencies - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(40, 1003), (16, 49_152)])
def test_rows_have_the_same_bits_in_any_company(ops: CpuOps, num_rows: int, vocab_size: int, num_threads: int) -> None:
    logits, inputs, _ = mixed_case(num_rows, vocab_size, torch.bfloat16)
    inputs = rows_of(inputs, slice(None), 20)
    torch.set_num_threads(1)
    whole = ops.sample(logits, inputs)
    torch.set_num_threads(num_threads)
    wider = torch.full((num_rows, vocab_size + 5), NAN, dtype=logits.dtype)  # rows that do not follow each other
    wider[:, :vocab_size] = logits
    cuts = [(0, num_rows, 20), (0, 1, 20), (5, 6, 1), (3, 10, 5), (num_rows - 1, num_rows, 20), (7, num_rows, 3)]
    for start, stop, num_top in cuts:
        rows = slice(start, stop)
        part = ops.sample(wider[rows, :vocab_size], rows_of(inputs, rows, num_top))
        assert torch.equal(part.token_ids, whole.token_ids[rows])
        assert part.logprobs is not None
        assert whole.logprobs is not None
        assert torch.equal(part.logprobs, whole.logprobs[rows])
        assert part.top_token_ids is not None
        assert whole.top_token_ids is not None
        assert torch.equal(part.top_token_ids, whole.top_token_ids[rows, :num_top])
        assert part.top_logprobs is not None
        assert whole.top_logprobs is not None
        assert torch.equal(part.top_logprobs, whole.top_logprobs[rows, :num_top])


WAYS = [
    {"temperature": 0.0},
    {},
    {"temperature": 1e-5},
    {"temperature": 1e9},
    {"top_k": 1},
    {"top_k": 5, "temperature": 1e9},
    {"top_k": 900},
    {"top_p": 1e-7},
    {"top_p": 0.5},
    {"top_p": 0.999999},
    {"min_p": 1.0},
    {"min_p": 1e-40},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
]


def spread(vocab_size: int) -> Tensor:
    return torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(9)) * 3


Way = frozenset[tuple[str, float]]


@cache
def extreme_case(way: Way, dtype: torch.dtype) -> tuple[Tensor, SamplingInputs, Sampled]:
    logits = spread(1003).to(dtype)
    inputs = make_inputs(64, **dict(way), logprob_rows=torch.arange(64), num_top_logprobs=3)
    return logits, inputs, REFERENCE.sample(logits, inputs)


@cache
def case_of_equals(way: Way, vocab_size: int) -> tuple[Tensor, SamplingInputs, Sampled]:
    logits = torch.zeros(64, vocab_size)
    logits[::2, vocab_size // 2 :] = -0.0  # equal to 0, too
    inputs = make_inputs(64, **dict(way), logprob_rows=torch.arange(64), num_top_logprobs=min(3, vocab_size))
    return logits, inputs, REFERENCE.sample(logits, inputs)


@pytest.mark.parametrize("ways", WAYS)
def test_extreme_parameters_match_the_reference(ops: CpuOps, ways: dict[str, float]) -> None:
    for dtype in DTYPES:
        logits, inputs, expected = extreme_case(frozenset(ways.items()), dtype)
        assert agreement(ops.sample(logits, inputs), expected, inputs) == 1.0


@pytest.mark.parametrize("ways", WAYS)
def test_equals_match_the_reference(ops: CpuOps, ways: dict[str, float]) -> None:
    for vocab_size in (1, 15, 16, 2503):
        logits, inputs, expected = case_of_equals(frozenset(ways.items()), vocab_size)
        assert agreement(ops.sample(logits, inputs), expected, inputs) == 1.0


@pytest.mark.parametrize("ways", WAYS)
def test_the_only_token_left_is_chosen(ops: CpuOps, ways: dict[str, float]) -> None:
    token_ids = [0, 514, 1002]
    for other in (-INF, NAN):
        logits = torch.full((3, 1003), other)
        logits[range(3), token_ids] = 2.0
        sampled = ops.sample(logits, make_inputs(3, **ways, logprob_rows=torch.arange(3)))
        assert sampled.token_ids.tolist() == token_ids
        assert sampled.logprobs is not None
        assert sampled.logprobs.tolist() == [0.0] * 3


@pytest.mark.parametrize("ways", WAYS)
def test_a_spoilt_row_gets_some_token_and_leaves_the_others_alone(ops: CpuOps, ways: dict[str, float]) -> None:
    inputs = make_inputs(64, **ways, logprob_rows=torch.arange(64), num_top_logprobs=3)
    others = torch.arange(64) != 7
    for dtype in DTYPES:
        logits = spread(515).to(dtype)
        expected = ops.sample(logits, inputs)
        assert expected.top_logprobs is not None
        for spoilt in (NAN, INF, -INF):
            logits[7] = spoilt
            sampled = ops.sample(logits, inputs)
            assert 0 <= int(sampled.token_ids[7]) < 515
            assert sampled.logprobs is not None
            assert sampled.top_logprobs is not None
            assert not sampled.logprobs.isnan().any()
            assert not sampled.top_logprobs.isnan().any()
            assert torch.equal(sampled.token_ids[others], expected.token_ids[others])
            assert torch.equal(sampled.top_logprobs[others], expected.top_logprobs[others])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinite_logits_win_and_nan_never_does(ops: CpuOps, temperature: float) -> None:
    logits = spread(200)
    logits[:, ::7] = NAN
    is_nan = logits[0].isnan()
    inputs = make_inputs(64, temperature=temperature, top_p=0.99)
    assert not is_nan[ops.sample(logits, inputs).token_ids].any()
    logits[:, [31, 101]] = INF
    chosen = set(ops.sample(logits, inputs).token_ids.tolist())
    assert chosen == ({31, 101} if temperature else {31})


@pytest.mark.parametrize("size", [0.0, 0.7, 1e6, 1e30])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_match_the_reference(ops: CpuOps, size: float, temperature: float) -> None:
    """Long histories with repeats; a row without one; generated tokens alone, and a prompt alone."""
    num_rows, vocab_size, max_len = 64, 200, 300
    lens = torch.randint(0, max_len, (num_rows,), generator=torch.Generator().manual_seed(2))
    prompt_lens = lens // 3
    lens[0], prompt_lens[1], prompt_lens[2] = 0, 0, lens[2]
    token_ids = torch.randint(50, (num_rows, max_len), generator=torch.Generator().manual_seed(4))
    sizes = torch.full((num_rows,), size)
    penalties = Penalties(token_ids, prompt_lens, lens, sizes, -sizes / 2, sizes + 1)
    logits = spread(vocab_size)
    rows = torch.tensor([0, 1, 2, 9, 63])
    inputs = make_inputs(num_rows, temperature=temperature, penalties=penalties, logprob_rows=rows, num_top_logprobs=4)
    assert agreement(ops.sample(logits, inputs), REFERENCE.sample(logits, inputs), inputs) == 1.0


def test_history_outside_the_vocabulary_is_ignored(ops: CpuOps) -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0]])
    factors = (torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]))
    token_ids = torch.tensor([[3, -1, 2**40, -(2**40), 0, 1, 1, 1]])
    for num_tokens, expected in [(4, 0), (5, 1), (99, 0)]:  # a length beyond the array ends with it
        penalties = Penalties(token_ids, torch.tensor([0]), torch.tensor([num_tokens]), *factors)
        assert int(ops.sample(logits, make_inputs(1, temperature=0.0, penalties=penalties)).token_ids) == expected


def test_logprobs_of_some_rows_land_in_their_places(ops: CpuOps) -> None:
    logits = spread(1003)
    rows = torch.tensor([3, 4, 40, 63])
    sampled = ops.sample(logits, make_inputs(64, logprob_rows=rows, num_top_logprobs=2))
    expected = torch.log_softmax(logits, -1)[rows]
    assert sampled.logprobs is not None
    assert sampled.top_logprobs is not None
    chosen = expected.gather(-1, sampled.token_ids[rows, None])[:, 0]
    torch.testing.assert_close(sampled.logprobs, chosen, rtol=0, atol=1e-5)
    torch.testing.assert_close(sampled.top_logprobs, expected.topk(2).values, rtol=0, atol=1e-5)
    none = ops.sample(logits, make_inputs(64, logprob_rows=rows))
    assert none.top_token_ids is not None
    assert none.top_token_ids.shape == (4, 0)
    assert torch.equal(none.token_ids, sampled.token_ids)


@pytest.mark.parametrize("spacing", [1e-30, 1e-3, 1.0, 1e30])
def test_thresholds_are_exact_wherever_values_crowd(ops: CpuOps, spacing: float) -> None:
    """Values over the whole range of floats, and packed so closely that buckets must be split again."""
    logits = torch.zeros(4, 49_152)
    logits[:, 1::2] = torch.randn(4, 24_576, generator=torch.Generator().manual_seed(6)) * spacing
    logits[2:] += 5.0
    for ways in ({"top_p": 0.95}, {"top_k": 40}, {"top_k": 30_000, "top_p": 0.7}, {"min_p": 1e-3}):
        inputs = make_inputs(4, **ways)
        assert torch.equal(ops.sample(logits, inputs).token_ids, REFERENCE.sample(logits, inputs).token_ids)
