"""The masks of a step: a row whose mask takes long waits by itself. Grammars here end their work when told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tandem.workers import masks
from tandem.workers.batch import LATER, Refusal, SampleSpec
from tandem.workers.constraint import Constraint
from tandem.workers.grammar import GrammarState, Words
from tandem.workers.masks import Mask, MaskMaker
from tandem.workers.types import SamplingParams

VOCAB = 64
PARAMS = SamplingParams(max_tokens=9, seed=0)


class HeldUp(GrammarState):
    """Allows the token with the number of tokens so far, as soon as `go` is set."""

    def __init__(self, fails: bool = False) -> None:
        self.go = threading.Event()
        self.num_begun = 0
        self.thread = ""
        self._num_tokens = 0
        self._fails = fails

    def follow(self, token_ids: object, first: int) -> None:
        assert isinstance(token_ids, list)
        self._num_tokens = len(token_ids)

    @property
    def error(self) -> str:
        return ""

    def fill(self, words: Words) -> None:
        self.num_begun += 1
        self.thread = threading.current_thread().name
        assert self.go.wait(20)
        if self._fails:
            raise ZeroDivisionError
        words[0] = 1 << self._num_tokens


def quick() -> HeldUp:
    grammar = HeldUp()
    grammar.go.set()
    return grammar


def spec(constraint: Constraint | None, num_tokens: int) -> SampleSpec:
    return SampleSpec(PARAMS, 0, num_tokens, list(range(num_tokens)), 0, constraint)


def constrained(grammar: GrammarState) -> Constraint:
    return Constraint(PARAMS, VOCAB, grammar)


def masks_of(maker: MaskMaker, *specs: SampleSpec, num_others: int = 0) -> list[Mask]:
    wait = maker.begin(specs, num_others)
    assert wait is not None
    return wait()


def tokens_of(mask: Mask) -> list[int]:
    assert isinstance(mask, np.ndarray)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@pytest.fixture
def slow() -> Iterator[HeldUp]:
    grammar = HeldUp()
    yield grammar
    grammar.go.set()


def test_a_row_that_takes_long_is_left_out_until_its_mask_is_there(slow: HeldUp) -> None:
    maker = MaskMaker()
    held_up, usual = constrained(slow), constrained(quick())
    for num_tokens in (3, 4, 5):  # the others get on, the one stays where it is
        late, mask, free = masks_of(maker, spec(held_up, 7), spec(usual, num_tokens), spec(None, 9))
        assert (late, free) == (LATER, None)
        assert tokens_of(mask) == [num_tokens]
    slow.go.set()
    while (late := masks_of(maker, spec(held_up, 7))[0]) is LATER:
        pass
    assert tokens_of(late) == [7]
    assert slow.num_begun == 1
    assert tokens_of(masks_of(maker, spec(held_up, 8))[0]) == [8]


def test_no_mask_of_a_grammar_is_computed_in_the_step_s_own_thread() -> None:
    grammar = quick()
    masks_of(MaskMaker(), spec(constrained(grammar), 1))
    assert grammar.thread.startswith("masks")


def test_one_that_was_late_is_not_waited_for_again(slow: HeldUp, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = MaskMaker()
    held_up = constrained(slow)
    assert masks_of(maker, spec(held_up, 7)) == [LATER]
    monkeypatch.setattr(masks, "PATIENCE_S", 1000.0)  # waiting for it would end the test
    assert masks_of(maker, spec(held_up, 7), spec(None, 9)) == [LATER, None]
    late, mask = masks_of(maker, spec(held_up, 7), spec(constrained(quick()), 5))
    assert late is LATER
    assert tokens_of(mask) == [5]
    assert masks_of(maker, spec(held_up, 7), num_others=1) == [LATER]


def test_rows_behind_slow_ones_find_another_thread(slow: HeldUp) -> None:
    maker = MaskMaker()
    some = [HeldUp(), HeldUp()]
    *late, mask = masks_of(maker, *(spec(constrained(one), 3) for one in some), spec(constrained(quick()), 5))
    for one in some:
        one.go.set()
    assert late == [LATER, LATER]
    assert tokens_of(mask) == [5]


def test_what_is_cancelled_while_it_is_computed_is_forgotten(slow: HeldUp) -> None:
    maker = MaskMaker()
    assert masks_of(maker, spec(constrained(slow), 7)) == [LATER]
    slow.go.set()
    maker._executor.shutdown()
    assert len(maker._late) == 0


def test_an_error_is_the_step_s_and_no_token_left_is_the_row_s() -> None:
    broken = HeldUp(fails=True)
    broken.go.set()
    with pytest.raises(ZeroDivisionError):
        masks_of(MaskMaker(), spec(constrained(broken), 1))
    params = SamplingParams(max_tokens=9, seed=0, allowed_token_ids=(5,))
    nothing = Constraint(params, VOCAB, quick())
    assert isinstance(masks_of(MaskMaker(), spec(nothing, 4))[0], Refusal)
    assert tokens_of(masks_of(MaskMaker(), spec(nothing, 5))[0]) == [5]
