"""An answer depends on its tokens, and not on the frames they came in."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from tandem.router.output import Answer, Delta
from tandem.router.scripted_worker import scripted_logprobs
from tandem.router.tokenizer import Tokenizer
from tandem.workers.types import TokenChunk

EOS = 2
TOKENS = st.lists(st.integers(0, 399), max_size=30)
STOPS = st.lists(st.sampled_from(["a", "e ", "the", "\ufffd", " q", "é", "zz"]), max_size=3)


def write(
    tokenizer: Tokenizer,
    frames: list[list[int]],
    stops: list[str],
    finish_reason: Literal["stop", "length"] = "length",
    stop_token_ids: tuple[int, ...] = (EOS,),
) -> Answer:
    """The answer after these frames; what its deltas add up to is checked against its total."""
    answer = Answer(tokenizer, [5], stops, stop_token_ids)
    deltas = Delta()
    for position, ids in enumerate(frames):
        chunk = TokenChunk(
            request_id="r",
            choice=0,
            token_ids=tuple(ids),
            finish_reason=finish_reason if position == len(frames) - 1 else None,
            logprobs=tuple(scripted_logprobs(token_id, 1) for token_id in ids),
        )
        delta = answer.push(chunk)
        deltas.extend(Delta(delta.text, delta.token_ids, delta.scored, deltas.finish_reason or delta.finish_reason))
    assert answer.is_finished
    assert deltas == answer.total
    return answer


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@given(ids=TOKENS, stops=STOPS, cuts=st.sets(st.integers(0, 30)))
def test_any_frames_give_the_same_answer(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], cuts: set[int]
) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    frames = [ids[start:end] for start, end in pairwise(places)]
    whole, framed = write(tokenizer, [ids], stops), write(tokenizer, frames, stops)
    assert (framed.total, framed.is_cut) == (whole.total, whole.is_cut)


@given(ids=TOKENS, stops=STOPS)
def test_counted_up_to_the_token_that_completes_the_stop(
    tokenizer: Tokenizer, ids: list[int], stops: list[str]
) -> None:
    answer = write(tokenizer, [ids], stops)
    whole = write(tokenizer, [ids], [])
    num_tokens = len(answer.total.token_ids)
    assert whole.total.text.startswith(answer.total.text)
    assert not any(stop in answer.total.text for stop in stops)
    assert len(answer.total.scored) == num_tokens
    if answer.is_cut:
        assert answer.total.finish_reason == "stop"
        before = write(tokenizer, [ids[: num_tokens - 1]], [])
        assert all(stop not in before.total.text.rstrip("\ufffd") for stop in stops)
    else:
        assert answer.total == whole.total


def test_text_held_back_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    answer = write(tokenizer, [ids_of(tokenizer, "it jumped")], ["jumped over"])
    assert (answer.total.text, answer.is_cut, answer.total.finish_reason) == ("it jumped", False, "length")


def test_stop_token_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "the fox")
    answer = write(tokenizer, [ids], [], "stop", stop_token_ids=(ids[-1],))
    assert answer.total.token_ids == ids
    assert answer.total.text == "the fox"[: -len(tokenizer.token_bytes(ids[-1]))]
    same_token_earlier = write(tokenizer, [[ids[-1], *ids[:1]]], [], "length", stop_token_ids=(ids[-1],))
    assert same_token_earlier.total.text == (tokenizer.token_bytes(ids[-1]) + tokenizer.token_bytes(ids[0])).decode()


def test_nothing_follows_the_end(tokenizer: Tokenizer) -> None:
    answer = write(tokenizer, [ids_of(tokenizer, "one two three")], ["two"])
    before = Delta(answer.total.text, [*answer.total.token_ids], [*answer.total.scored], "stop")
    late = TokenChunk(request_id="r", choice=0, token_ids=(40, 41), finish_reason="length")
    assert answer.push(late) == Delta()
    assert answer.total == before
    assert answer.total.text == "one "


def test_end_without_tokens(tokenizer: Tokenizer) -> None:
    answer = write(tokenizer, [ids_of(tokenizer, "fox"), []], ["foxes"])
    assert (answer.total.text, answer.total.finish_reason) == ("fox", "length")
