"""Sampling on the device beside the reference: same tokens, same alternatives; equals, histories, spoilt rows."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.kernels import philox
from tandem.kernels.ops import Constraints, Ops, Penalties, Sampled, SamplingInputs


def make_inputs(num_rows: int, **changes: Any) -> SamplingInputs:
    values: dict[str, Any] = {
        "temperature": torch.ones(num_rows),
        "top_k": torch.zeros(num_rows, dtype=torch.int64),
        "top_p": torch.ones(num_rows),
        "min_p": torch.zeros(num_rows),
        "seed": torch.arange(num_rows) * -7919,
        "choice": torch.arange(num_rows) % 3,
        "position": torch.arange(num_rows) * 1_000_003,
    }
    return SamplingInputs(**(values | changes))


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """bfloat16 logits are full of equals."""
    return (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(5)) * 4).to(dtype)


def assert_same(actual: Sampled, expected: Sampled) -> None:
    assert torch.equal(actual.token_ids, expected.token_ids)
    if expected.logprobs is None:
        assert actual.logprobs is None
        return
    assert actual.logprobs is not None
    assert actual.top_logprobs is not None
    assert expected.top_logprobs is not None
    assert torch.allclose(actual.logprobs, expected.logprobs, atol=2e-6)
    assert actual.top_token_ids is not None
    assert expected.top_token_ids is not None
    assert torch.equal(actual.top_token_ids, expected.top_token_ids)
    assert torch.allclose(actual.top_logprobs, expected.top_logprobs, atol=2e-6)


FILTERS = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (40, 0.9, 0.01), (1, 1.0, 0.0), (0, 1e-6, 0.0)]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_filtered_draws_are_those_of_the_reference(
    ops: Ops, reference: Ops, top_k: int, top_p: float, min_p: float
) -> None:
    num_rows = 4
    logits = random_logits(num_rows, 1100)
    inputs = make_inputs(
        num_rows,
        temperature=torch.tensor([0.0, 0.7, 1.0, 3.0]),
        top_k=torch.full((num_rows,), top_k),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), min_p),
    )
    assert_same(ops.sample(logits, inputs), reference.sample(logits, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_plain_draws_are_those_of_the_reference(ops: Ops, reference: Ops, dtype: torch.dtype) -> None:
    logits, inputs = random_logits(17, 1100, dtype), make_inputs(17)
    assert_same(ops.sample(logits, inputs), reference.sample(logits, inputs))


def random_penalties(num_rows: int, vocab_size: int) -> Penalties:
    generator = torch.Generator().manual_seed(6)
    lens = torch.tensor([0, 7, 30, 1, 0, 12])[:num_rows]
    return Penalties(
        token_ids=torch.randint(vocab_size, (num_rows, 30), generator=generator) // 40 * 40,  # many twice
        prompt_lens=lens // 2,
        lens=lens,
        presence=torch.tensor([0.5, 0.0, 0.7, 0.0, 9.0, 1.0])[:num_rows],
        frequency=torch.tensor([0.0, 0.3, 0.1, 0.0, 9.0, 0.0])[:num_rows],
        repetition=torch.tensor([1.3, 1.0, 1.2, 1.5, 9.0, 1.0])[:num_rows],
    )


def test_penalties_and_logprobs_are_those_of_the_reference(ops: Ops, reference: Ops) -> None:
    logits = random_logits(6, 1100)
    inputs = make_inputs(
        6,
        temperature=torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]),
        penalties=random_penalties(6, 1100),
        logprob_rows=torch.tensor([0, 2, 5]),
        num_top_logprobs=4,
    )
    before = logits.clone()
    for _ in range(2):  # the second finds the counts as the first left them
        assert_same(ops.sample(logits, inputs), reference.sample(logits, inputs))
    assert torch.equal(logits, before)


def test_every_step_counts_the_history_anew(ops: Ops) -> None:
    logits = torch.zeros(1, 50)
    logits[0, 5], logits[0, 6] = 10.0, 9.5
    one = torch.ones(1)
    history = Penalties(torch.tensor([[5]]), torch.tensor([0]), torch.tensor([1]), one * 0, one * 0.3, one)
    inputs = make_inputs(1, temperature=torch.zeros(1), penalties=history)
    assert [int(ops.sample(logits, inputs).token_ids) for _ in range(3)] == [5, 5, 5]  # twice 0.3 would make it 6


def test_a_token_is_penalised_once_however_often_it_was_seen(ops: Ops) -> None:
    """Next to each other, and further apart than a program looks at once."""
    logits = torch.zeros(2, 50)
    logits[:, 5], logits[:, 6] = 10.0, 9.5
    history = torch.full((2, 1300), 9)
    history[:, [0, 1, 1200]] = 5
    none, all_of_it = torch.zeros(2, dtype=torch.int64), torch.tensor([1300, 1300])
    # 10 - 3 * 0.1 and 10 / 1.03 stay the largest; 10 / 1.03 ** 2 would not
    factors = (torch.zeros(2), torch.tensor([0.1, 0.0]), torch.tensor([1.0, 1.03]))
    inputs = make_inputs(2, temperature=torch.zeros(2), penalties=Penalties(history, none, all_of_it, *factors))
    assert ops.sample(logits, inputs).token_ids.tolist() == [5, 5]


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the spoilt row
def test_constraints_are_those_of_the_reference(ops: Ops, reference: Ops) -> None:
    """Biases before penalties, masks behind both; equals and a spoilt row included."""
    logits = random_logits(6, 1100)
    logits[4] = float("nan")
    generator = torch.Generator().manual_seed(8)
    masks = torch.randint(-(1 << 31), 1 << 31, (3, 35), generator=generator).to(torch.int32)
    masks[1, :30] = 0
    constraints = Constraints(
        (torch.arange(6)[:, None] * 40 + torch.arange(4) * 40) % 1100,  # tokens of the histories, too
        torch.randn(6, 4, generator=generator) * 6,
        torch.tensor([0, 4, 2, 3, 1, 4]),
        torch.tensor([-1, 0, 1, 2, 1, -1]),
        masks,
    )
    inputs = make_inputs(
        6,
        temperature=torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 1.0]),
        penalties=random_penalties(6, 1100),
        constraints=constraints,
        logprob_rows=torch.tensor([0, 1, 5]),
        num_top_logprobs=2,
    )
    for _ in range(2):  # the second finds the counts as the first left them
        assert_same(ops.sample(logits, inputs), reference.sample(logits, inputs))


def test_score_is_that_of_the_reference(ops: Ops, reference: Ops) -> None:
    logits, token_ids = random_logits(3, 1100), torch.tensor([5, 1099, 0])
    assert_same(ops.score(logits, token_ids, 3), reference.score(logits, token_ids, 3))


@pytest.mark.parametrize("num_top", [0, 50])
def test_logprobs_without_alternatives_and_with_all(ops: Ops, reference: Ops, num_top: int) -> None:
    logits = random_logits(2, 17)
    inputs = make_inputs(2, logprob_rows=torch.tensor([1]), num_top_logprobs=num_top)
    assert_same(ops.sample(logits, inputs), reference.sample(logits, inputs))


def test_equals_are_resolved_by_the_lower_id(ops: Ops) -> None:
    logits = torch.zeros(1, 50)
    logits[0, 10:20] = 1.0
    logits[0, 20:22] = -0.0
    assert int(ops.sample(logits, make_inputs(1, temperature=torch.zeros(1))).token_ids) == 10
    num_rows = 12
    half = make_inputs(num_rows, top_p=torch.full((num_rows,), 0.1))  # ten of e / 67 each: two and a bit
    assert set(ops.sample(logits.repeat(num_rows, 1), half).token_ids.tolist()) <= {10, 11, 12}
    most = make_inputs(num_rows, top_k=torch.full((num_rows,), 11), top_p=torch.full((num_rows,), 0.45))
    chosen = set(ops.sample(logits.repeat(num_rows, 1), most).token_ids.tolist())
    assert chosen <= {*range(10, 20), 0, 1, 2, 3}
    assert len(chosen) > 3


def test_rows_have_the_same_bits_at_any_batch_size(ops: Ops) -> None:
    logits = random_logits(6, 1100)
    inputs = make_inputs(
        6,
        top_k=torch.tensor([0, 50, 0, 1, 0, 9]),
        top_p=torch.tensor([0.9, 1.0, 0.5, 1.0, 1.0, 0.95]),
        penalties=random_penalties(6, 1100),
        logprob_rows=torch.arange(6),
        num_top_logprobs=3,
    )
    whole = ops.sample(logits, inputs)
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "position")
    for rows in (slice(0, 1), slice(2, 5), slice(5, 6)):
        assert inputs.penalties is not None
        part = replace(
            inputs,
            **{name: getattr(inputs, name)[rows] for name in names},
            penalties=Penalties(*(getattr(inputs.penalties, field.name)[rows] for field in fields(Penalties))),
            logprob_rows=torch.arange(rows.stop - rows.start),
        )
        sampled = ops.sample(logits[rows].clone(), part)
        for field in fields(Sampled):
            assert torch.equal(getattr(sampled, field.name), getattr(whole, field.name)[rows])


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the interpreter's arithmetic is numpy's
@pytest.mark.parametrize("spoilt", [float("nan"), float("-inf")])
def test_a_spoilt_row_gets_some_token_and_leaves_the_others_alone(ops: Ops, spoilt: float) -> None:
    logits = random_logits(3, 200)
    inputs = make_inputs(3, top_p=torch.full((3,), 0.9), temperature=torch.full((3,), 0.5))
    inputs = replace(inputs, logprob_rows=torch.arange(3), num_top_logprobs=2)
    expected = ops.sample(logits, inputs)
    logits[1] = spoilt
    sampled = ops.sample(logits, inputs)
    assert 0 <= int(sampled.token_ids[1]) < 200
    assert torch.equal(sampled.token_ids[[0, 2]], expected.token_ids[[0, 2]])
    assert sampled.top_logprobs is not None
    assert not sampled.top_logprobs.isnan().any()


def test_random_numbers_are_those_of_the_reference(ops: Ops) -> None:
    """Two tokens of equal weight: the draw is the first bit of the number."""
    count = 24
    inputs = make_inputs(
        count, seed=torch.arange(count) * 0x0123_4567_89AB_CDEF - 5, position=torch.arange(count) << 30
    )
    numbers = philox.uniform(inputs.seed, inputs.choice, inputs.position)
    assert torch.equal(ops.sample(torch.zeros(count, 2), inputs).token_ids, (numbers >= 0.5).long())
