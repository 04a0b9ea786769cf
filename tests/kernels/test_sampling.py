"""The sampling op against a slow, literal reading of its definition; ties, penalties, and bits at any batch size."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.kernels import reference_sampling
from tandem.kernels.compiler import BuildError
from tandem.kernels.ops import Constraints, Ops, Penalties, Sampled, SamplingInputs, load_ops
from tandem.kernels.philox import uniform


@pytest.fixture(scope="module", params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    try:
        return load_ops(request.param)
    except BuildError as error:
        pytest.skip(str(error))


def make_inputs(num_rows: int, **changes: object) -> SamplingInputs:
    values: dict[str, object] = {
        "temperature": torch.ones(num_rows),
        "top_k": torch.zeros(num_rows, dtype=torch.int64),
        "top_p": torch.ones(num_rows),
        "min_p": torch.zeros(num_rows),
        "seed": torch.arange(num_rows) * 7919,
        "choice": torch.zeros(num_rows, dtype=torch.int64),
        "position": torch.arange(num_rows),
    }
    return SamplingInputs(**(values | changes))  # type: ignore[arg-type]


def kept_tokens(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Literally: min-p, then top-k, then top-p, over Python floats."""
    weights = [math.exp(x - max(logits)) for x in logits]
    kept = {i for i, w in enumerate(weights) if w >= min_p}
    if 0 < top_k < len(logits):
        kth = sorted(logits, reverse=True)[top_k - 1]
        kept = {i for i in kept if logits[i] >= kth}
    if top_p >= 1:
        return kept
    mass, before, result = sum(weights[i] for i in kept), 0.0, set()
    for i in sorted(kept, key=lambda i: (-logits[i], i)):
        if before >= top_p * mass and result:
            break
        result.add(i)
        before += weights[i]
    return result


FILTERS = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (40, 0.9, 0.01), (1, 1.0, 0.0), (0, 1e-6, 0.0)]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_drawn_token_is_the_inverse_cdf_over_the_kept_tokens(ops: Ops, top_k: int, top_p: float, min_p: float) -> None:
    num_rows, vocab_size = 300, 101
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    inputs = make_inputs(
        num_rows,
        top_k=torch.full((num_rows,), top_k),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), min_p),
    )
    chosen = ops.sample(logits, inputs).token_ids.tolist()
    numbers = uniform(inputs.seed, inputs.choice, inputs.position).tolist()
    for row in range(num_rows):
        values = logits[row].tolist()
        kept = kept_tokens(values, top_k, top_p, min_p)
        weights = [math.exp(x - max(values)) if i in kept else 0.0 for i, x in enumerate(values)]
        target, running = numbers[row] * sum(weights), 0.0
        expected = next(i for i, w in enumerate(weights) if (running := running + w) > target)
        assert chosen[row] == expected


def test_equals_are_resolved_by_the_lower_id(ops: Ops) -> None:
    logits = torch.zeros(1, 50)
    logits[0, 10:20] = 1.0
    greedy = make_inputs(1, temperature=torch.zeros(1))
    assert int(ops.sample(logits, greedy).token_ids) == 10
    half = make_inputs(400, top_p=torch.full((400,), 0.1), position=torch.arange(400))
    chosen = ops.sample(logits.expand(400, 50), half).token_ids  # ten equals of weight e, forty of weight 1: e/67 each
    assert set(chosen.tolist()) == {10, 11, 12}
    top = ops.sample(logits, make_inputs(1, logprob_rows=torch.tensor([0]), num_top_logprobs=3))
    assert top.top_token_ids is not None
    assert top.top_token_ids.tolist() == [[10, 11, 12]]


@pytest.mark.parametrize("temperature", [0.0, 0.25, 2.0])
def test_frequencies_follow_the_distribution(ops: Ops, temperature: float) -> None:
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0]])
    count = 20_000
    inputs = make_inputs(count, temperature=torch.full((count,), temperature), seed=torch.full((count,), 3))
    share = ops.sample(logits.expand(count, 4), inputs).token_ids.bincount(minlength=4) / count
    expected = torch.softmax(logits[0] / temperature, -1) if temperature else torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert torch.allclose(share.double(), expected.double(), atol=0.015)


def test_penalties_follow_their_formula_and_spare_other_rows(ops: Ops) -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]] * 2)
    penalties = Penalties(
        token_ids=torch.tensor([[0, 1, 2, 2, 3], [0, 0, 0, 0, 0]]),  # the last place of row 0 is padding
        prompt_lens=torch.tensor([2, 0]),
        lens=torch.tensor([4, 0]),
        presence=torch.tensor([0.5, 9.0]),
        frequency=torch.tensor([0.25, 9.0]),
        repetition=torch.tensor([2.0, 9.0]),
    )
    penalised = reference_sampling._penalise(logits, penalties)
    assert penalised.tolist() == [[1.0, -4.0, 0.5 - 0.5 - 0.5, 0.5], [2.0, -2.0, 1.0, 0.5]]
    assert logits.tolist() == [[2.0, -2.0, 1.0, 0.5]] * 2
    inputs = make_inputs(
        2, temperature=torch.zeros(2), penalties=penalties, logprob_rows=torch.tensor([0, 1]), num_top_logprobs=1
    )
    sampled = ops.sample(logits, inputs)
    assert sampled.logprobs is not None
    raw = torch.log_softmax(logits, -1)[:, 0]
    torch.testing.assert_close(sampled.logprobs, raw, rtol=0, atol=1e-6)


def random_inputs(num_rows: int, vocab_size: int) -> tuple[Tensor, SamplingInputs]:
    generator = torch.Generator().manual_seed(5)

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (num_rows,), generator=generator)]

    # bfloat16 logits of a large vocabulary are full of equals
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 4).to(torch.bfloat16)
    lens = torch.randint(0, 30, (num_rows,), generator=generator)
    penalties = Penalties(
        torch.randint(vocab_size, (num_rows, 30), generator=generator),
        lens // 2,
        lens,
        pick(0.0, 0.5),
        pick(0.0, 0.3),
        pick(1.0, 1.3),
    )
    inputs = make_inputs(
        num_rows,
        temperature=pick(0.0, 0.7, 1.0, 1.5),
        top_k=pick(0, 1, 50, 3000).long(),
        top_p=pick(1.0, 0.95, 0.5),
        min_p=pick(0.0, 0.05),
        penalties=penalties,
        logprob_rows=torch.arange(num_rows),
        num_top_logprobs=20,
    )
    return logits, inputs


def rows_of(inputs: SamplingInputs, rows: slice, num_top: int) -> SamplingInputs:
    assert inputs.penalties is not None
    penalties = Penalties(*(getattr(inputs.penalties, field.name)[rows] for field in fields(Penalties)))
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "position")
    num_rows = len(inputs.seed[rows])
    return replace(
        inputs,
        **{name: getattr(inputs, name)[rows] for name in names},
        penalties=penalties,
        logprob_rows=torch.arange(num_rows),
        num_top_logprobs=num_top,
    )


@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_have_the_same_bits_at_any_batch_size(ops: Ops, num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        logits, inputs = random_inputs(24, 49_152)
        whole = ops.sample(logits, inputs)
        assert whole.logprobs is not None
        assert whole.top_token_ids is not None
        assert whole.top_logprobs is not None
        for start, stop, num_top in [(0, 1, 20), (5, 6, 1), (3, 10, 5), (23, 24, 20), (7, 24, 3)]:
            rows = slice(start, stop)
            part = ops.sample(logits[rows], rows_of(inputs, rows, num_top))
            assert torch.equal(part.token_ids, whole.token_ids[rows])
            assert part.logprobs is not None
            assert torch.equal(part.logprobs, whole.logprobs[rows])
            assert part.top_token_ids is not None
            assert torch.equal(part.top_token_ids, whole.top_token_ids[rows, :num_top])
            assert part.top_logprobs is not None
            assert torch.equal(part.top_logprobs, whole.top_logprobs[rows, :num_top])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), float("-inf")])
def test_a_spoilt_row_gets_some_token_and_leaves_the_others_alone(ops: Ops, spoilt: float) -> None:
    logits, inputs = random_inputs(6, 1000)
    expected = ops.sample(logits, inputs)
    assert expected.top_logprobs is not None
    others = torch.tensor([0, 1, 3, 4, 5])
    logits[2] = spoilt
    sampled = ops.sample(logits, inputs)
    assert 0 <= int(sampled.token_ids[2]) < 1000
    assert torch.equal(sampled.token_ids[others], expected.token_ids[others])
    assert sampled.top_logprobs is not None
    assert torch.equal(sampled.top_logprobs[others], expected.top_logprobs[others])
    assert not sampled.top_logprobs.isnan().any()


def pack_masks(is_allowed: Tensor) -> Tensor:
    """bool [n, vocab] -> int32 [n, ceil(vocab / 32)]"""
    padded = torch.nn.functional.pad(is_allowed, (0, -is_allowed.shape[1] % 32))
    words = (padded.view(len(is_allowed), -1, 32).long() << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def constrained(num_rows: int, vocab_size: int, biases: dict[int, dict[int, float]], masks: dict[int, set[int]]) -> Any:
    """Constraints from what each row has of either."""
    longest = max((len(row) for row in biases.values()), default=0)
    token_ids, values = torch.zeros(num_rows, longest, dtype=torch.int64), torch.full((num_rows, longest), 1e9)
    lens, mask_rows = torch.zeros(num_rows, dtype=torch.int64), torch.full((num_rows,), -1)
    for row, wanted in biases.items():
        token_ids[row, : len(wanted)] = torch.tensor(list(wanted))
        values[row, : len(wanted)] = torch.tensor(list(wanted.values()))
        lens[row] = len(wanted)
    is_allowed = torch.zeros(len(masks), vocab_size, dtype=torch.bool)
    for index, (row, allowed) in enumerate(masks.items()):
        is_allowed[index, list(allowed)] = True
        mask_rows[row] = index
    return Constraints(token_ids, values, lens, mask_rows, pack_masks(is_allowed))


def test_biases_come_before_penalties_and_masks_behind_them(ops: Ops) -> None:
    """Row by row, the logits that greedy decoding sees; the logprobs stay the model's own."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.5]]).repeat(6, 1)
    one = torch.ones(6)
    penalties = Penalties(
        *(torch.tensor([[2]] * 6), torch.zeros(6, dtype=torch.int64), torch.tensor([0, 0, 1, 1, 0, 0])),
        *(one * 0, one * 0, one * 4),
    )
    constraints = constrained(
        6, 4, {0: {0: 2.5}, 2: {2: 6.0}, 3: {2: -4.0, 0: 0.5}, 5: {1: -99.0, 3: 1.0}}, {1: {0, 3}, 3: {0, 3}, 4: set()}
    )
    inputs = make_inputs(
        6,
        temperature=torch.zeros(6),
        penalties=penalties,
        constraints=constraints,
        logprob_rows=torch.arange(6),
        num_top_logprobs=1,
    )
    # row 2: (3 + 6) / 4 = 2.25 is the largest; the other way round it would be 3 / 4 + 6. Row 4 allows nothing
    sampled = ops.sample(logits, inputs)
    assert sampled.token_ids.tolist() == [0, 0, 2, 0, 0, 2]
    assert sampled.logprobs is not None
    raw = torch.log_softmax(logits[0], -1)
    torch.testing.assert_close(sampled.logprobs, raw[sampled.token_ids], rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.9, 1e30])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 0.7, 0.0), (0, 1.0, 0.2)])
def test_a_forbidden_token_is_never_chosen(
    ops: Ops, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Not among equals, not in a spoilt row, not at a temperature that makes everything alike."""
    num_rows, vocab_size = 60, 101
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    logits[:20] = float("nan")
    logits[20:30] = float("-inf")
    allowed = {row: {33 + row % 7, 64, 100} for row in range(num_rows)}
    inputs = make_inputs(
        num_rows,
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), min_p),
        constraints=constrained(num_rows, vocab_size, {50: {64: -1e38}}, allowed),
    )
    chosen = ops.sample(logits, inputs).token_ids.tolist()
    assert all(token_id in allowed[row] for row, token_id in enumerate(chosen))
    assert len(set(chosen[30:])) > 3


def test_a_mask_draws_as_if_the_other_tokens_were_not_there(ops: Ops) -> None:
    num_rows, vocab_size = 200, 333
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(2)) * 3
    allowed = sorted({*range(40, 60), *range(130, 333, 7)})
    inputs = make_inputs(num_rows, top_p=torch.full((num_rows,), 0.9), min_p=torch.full((num_rows,), 0.01))
    masked = replace(inputs, constraints=constrained(num_rows, vocab_size, {}, dict.fromkeys(range(num_rows), allowed)))
    expected = torch.tensor(allowed)[ops.sample(logits[:, allowed], inputs).token_ids]
    assert torch.equal(ops.sample(logits, masked).token_ids, expected)


def test_constrained_rows_leave_the_others_their_bits(ops: Ops) -> None:
    logits, inputs = random_inputs(12, 1000)
    plain = ops.sample(logits, inputs)
    constraints = constrained(12, 1000, {3: {5: 4.0}, 4: {7: -3.0}}, {3: set(range(500)), 9: {1, 2}})
    some = ops.sample(logits, replace(inputs, constraints=constraints))
    others = torch.tensor([row for row in range(12) if row not in (3, 4, 9)])
    assert torch.equal(some.token_ids[others], plain.token_ids[others])
    assert int(some.token_ids[9]) in (1, 2)
    alone = replace(rows_of(inputs, slice(3, 4), 20), constraints=constrained(1, 1000, {0: {5: 4.0}}, {0: range(500)}))
    assert torch.equal(ops.sample(logits[3:4], alone).token_ids, some.token_ids[3:4])


def test_score_says_of_given_tokens_what_sampling_says_of_chosen_ones(ops: Ops) -> None:
    logits, inputs = random_inputs(12, 1000)
    sampled = ops.sample(logits, inputs)
    scored = ops.score(logits, sampled.token_ids.clone(), 20)
    for field in fields(Sampled):
        assert torch.equal(getattr(scored, field.name), getattr(sampled, field.name))
    other = ops.score(logits[4:5], torch.tensor([17]), 0)
    assert other.logprobs is not None
    torch.testing.assert_close(other.logprobs, torch.log_softmax(logits[4:5].float(), -1)[:, 17], rtol=0, atol=1e-5)
