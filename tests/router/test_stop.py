"""Stop strings: where the text ends must not depend on how it arrives."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tandem.router.stop import StopMatcher

ALPHABET = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        text, hit = matcher.push(piece)
        shown += text
        if hit is not None:
            return shown, True
    return shown + matcher.flush(), False


def cut_by_hand(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: read character by character until some stop string is complete."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(len(stop) for stop in complete)], True
    return text, False


@given(text=ALPHABET, stops=STOPS, cuts=st.sets(st.integers(0, 30)))
def test_any_pieces_give_the_same_cut(text: str, stops: list[str], cuts: set[int]) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert run(pieces, stops) == cut_by_hand(text, stops)


@given(text=ALPHABET, stops=STOPS)
def test_nothing_that_may_be_a_stop_is_shown_early(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    final, _ = cut_by_hand(text, stops)
    shown = ""
    for character in text:
        part, hit = matcher.push(character)
        shown += part
        assert final.startswith(shown)
        if hit:
            break


def test_text_is_held_back_only_as_far_as_needed() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == ("the ", None)
    assert matcher.push("NgineEN") == ("ENgine", None)
    assert matcher.flush() == "EN"
