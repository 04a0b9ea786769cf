"""What a sequence may choose next, against sets of token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tandem.workers.constraint import Constraint, NothingAllowed, needs_constraint, validate_constraints
from tandem.workers.errors import RequestError
from tandem.workers.types import SamplingParams

VOCAB = 70
EVERYTHING = set(range(VOCAB))


def make_params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 9, "seed": 0, "stop_token_ids": (2, 69)} | changes))


def allowed(constraint: Constraint, token_ids: list[int], num_prompt_tokens: int = 0) -> set[int]:
    words = constraint.mask(token_ids, num_prompt_tokens)
    if words is None:
        return EVERYTHING
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[VOCAB:].any()
    return set(np.flatnonzero(bits).tolist())


def test_nothing_may_end_the_answer_before_min_tokens() -> None:
    constraint = Constraint(make_params(min_tokens=2), VOCAB)
    assert allowed(constraint, [5, 6], 2) == EVERYTHING - {2, 69}
    assert allowed(constraint, [5, 6, 7], 2) == EVERYTHING - {2, 69}
    assert constraint.mask([5, 6, 7, 8], 2) is None


def test_bad_sequences_are_not_completed_wherever_they_begin() -> None:
    constraint = Constraint(make_params(bad_token_ids=((7,), (1, 2), (3, 4, 5), (9, 5))), VOCAB)
    assert allowed(constraint, []) == EVERYTHING - {7}
    assert allowed(constraint, [0, 1], 2) == EVERYTHING - {7, 2}  # it began in the prompt
    assert allowed(constraint, [3, 4], 1) == EVERYTHING - {7, 5}
    assert allowed(constraint, [4], 1) == EVERYTHING - {7}
    assert allowed(constraint, [3, 4, 9]) == EVERYTHING - {7, 5}


def test_a_bad_sequence_alone_needs_a_mask_only_where_it_would_end() -> None:
    constraint = Constraint(make_params(bad_token_ids=((1, 2),)), VOCAB)
    assert constraint.mask([2, 3], 0) is None
    assert allowed(constraint, [2, 1]) == EVERYTHING - {2}


def test_only_allowed_tokens_are_left() -> None:
    constraint = Constraint(make_params(allowed_token_ids=(2, 31, 32, 69), bad_token_ids=((32,),), min_tokens=1), VOCAB)
    assert allowed(constraint, [8], 1) == {31}
    assert allowed(constraint, [8, 31], 1) == {2, 31, 69}
    with pytest.raises(NothingAllowed, match="exclude all"):
        Constraint(make_params(allowed_token_ids=(2,), min_tokens=1), VOCAB).mask([], 0)


def test_a_mask_is_the_caller_s() -> None:
    constraint = Constraint(make_params(allowed_token_ids=(31, 32), bad_token_ids=((5, 31),)), VOCAB)
    assert allowed(constraint, [5]) == {32}
    assert allowed(constraint, [6]) == {31, 32}


@pytest.mark.parametrize(
    "changes",
    [{"logit_bias": ((1, 2.0),)}, {"bad_token_ids": ((1,),)}, {"grammar": "start: "}, {"allowed_token_ids": (1,)}],
)
def test_what_needs_a_constraint(changes: dict[str, Any]) -> None:
    assert needs_constraint(make_params(**changes))
    assert needs_constraint(make_params(min_tokens=1))
    assert not needs_constraint(make_params(min_tokens=1, stop_token_ids=()))
    assert not needs_constraint(make_params())


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"min_tokens": 10}, "min_tokens"),
        ({"logit_bias": ((70, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"bad_token_ids": ((1, 70),)}, "bad_words"),
        ({"bad_token_ids": ((),)}, "bad_words"),
    ],
)
def test_what_nobody_could_honour_is_refused(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        validate_constraints(make_params(**changes), VOCAB)
    assert caught.value.param == param
    validate_constraints(make_params(min_tokens=9, allowed_token_ids=(69,), bad_token_ids=((0, 69),)), VOCAB)
