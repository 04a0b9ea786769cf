"""Beam search over one prompt: which beams go on and which answers are kept. Pure: no blocks, no steps.

    take(beam, logprobs) for each live beam ──> advance() ──> the next beams, each with its parent and its token
                                                          └─> none: answers()

The procedure is that of Hugging Face's `generate`. Of all continuations of all beams the most likely ones are looked
at, in order: those that end the answer are kept if they are among the first `width`, the first `width` others go on.
An answer's score is the sum of its logprobs / its length ** length_penalty, the token that ends it included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import msgspec

from tandem.workers.types import Choice, FinishReason, Request, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer so far, or a whole one."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Empty unless the client wants them."""
    logprob: float = 0.0
    """Sum over its tokens."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A whole answer that is kept, until as many better ones are found."""

    hypothesis: Hypothesis
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole choice."""

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fork:
    """A beam of the next step: beam `parent` of this one, and a token more."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class _Candidate:
    logprob: float
    parent: int
    place: int
    """Among the parent's own continuations."""


def num_candidates(params: SamplingParams, width: int) -> int:
    """How many of a beam's continuations can matter: `width` must be left when all that end the answer are gone."""
    return width * max(2, 1 + len(params.stop_token_ids))


class BeamSearch:
    """One request's. Beams are numbered from 0; there is one before the first `advance`, and then at most `width`."""

    def __init__(self, params: SamplingParams, width: int, max_tokens: int) -> None:
        """`max_tokens`: what the answers may have at most, here."""
        self._width = width
        self._max_tokens = max_tokens
        self._num_shown = params.num_logprobs
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._num_candidates = num_candidates(params, width)
        self._live: list[Hypothesis] = [Hypothesis()]
        self._given: dict[int, TokenLogprobs] = {}
        self._ended: list[Ended] = []
        """Best first, at most `width`."""

    def take(self, beam: int, logprobs: TokenLogprobs) -> bool:
        """The most likely continuations of a beam. True: it was the last one that was missing."""
        assert beam < len(self._live), "no such beam"
        self._given[beam] = logprobs
        return len(self._given) == len(self._live)

    def advance(self) -> list[Fork]:
        """Needs all beams' continuations. An empty list ends the search."""
        assert len(self._given) == len(self._live), "continuations are missing"
        length = len(self._live[0].token_ids) + 1
        forks: list[Fork] = []
        live: list[Hypothesis] = []
        for rank, candidate in enumerate(self._candidates()):
            token_id = self._given[candidate.parent].top_token_ids[candidate.place]
            is_end = token_id in self._stop_token_ids
            if is_end or length == self._max_tokens:
                if rank < self._width:
                    self._end(self._extended(candidate), "stop" if is_end else "length")
            elif len(live) < self._width:
                live.append(self._extended(candidate))
                forks.append(Fork(candidate.parent, token_id))
        self._given.clear()
        self._live = live
        return [] if not live or self._is_over(length) else forks

    def answers(self, choices: SequenceOf[int]) -> tuple[Answer, ...]:
        """The best, best first, when the search has ended. The last one again where a tiny vocabulary has not so
        many."""
        last = len(self._ended) - 1
        return tuple(_answer(choice, self._ended[min(index, last)]) for index, choice in enumerate(choices))

    def _candidates(self) -> list[_Candidate]:
        """All beams' continuations, most likely first; among equals in the order of beams, then as the sampler has
        them."""
        every = [
            _Candidate(self._live[parent].logprob + logprob, parent, place)
            for parent, given in self._given.items()
            for place, logprob in enumerate(given.top_logprobs[: self._num_candidates])
        ]
        every.sort(key=lambda candidate: (-candidate.logprob, candidate.parent, candidate.place))
        return every[: self._num_candidates]

    def _extended(self, candidate: _Candidate) -> Hypothesis:
        parent, given = self._live[candidate.parent], self._given[candidate.parent]
        logprobs = parent.logprobs
        if self._num_shown is not None:
            shown = TokenLogprobs(
                logprob=given.top_logprobs[candidate.place],
                top_token_ids=given.top_token_ids[: self._num_shown],
                top_logprobs=given.top_logprobs[: self._num_shown],
            )
            logprobs = (*logprobs, shown)
        token_id = given.top_token_ids[candidate.place]
        return Hypothesis((*parent.token_ids, token_id), logprobs, candidate.logprob)

    def _end(self, hypothesis: Hypothesis, finish_reason: FinishReason) -> None:
        ended = Ended(hypothesis, self._score(hypothesis.logprob, len(hypothesis.token_ids)), finish_reason)
        self._ended.append(ended)
        self._ended.sort(key=lambda one: -one.score)  # stable: among equals the earlier one
        del self._ended[self._width :]

    def _is_over(self, length: int) -> bool:
        """Whether no live beam can become better than all answers that are kept, as far as this rule looks."""
        if len(self._ended) < self._width:
            return False
        if self._early_stopping is True:
            return True
        hopeful = self._max_tokens if self._early_stopping == "never" and self._length_penalty > 0 else length
        return self._score(self._live[0].logprob, hopeful) <= self._ended[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self._length_penalty)


def as_beams(request: Request) -> Request:
    """One choice per beam, each sampled with its continuations."""
    width = request.sampling.beam_width
    assert width is not None, "not a beam search"
    num_logprobs = num_candidates(request.sampling, width)
    params = msgspec.structs.replace(request.sampling, temperature=0.0, num_logprobs=num_logprobs)
    beams = tuple(Choice(index=index) for index in range(width))
    return msgspec.structs.replace(request, sampling=params, choices=beams)


def _answer(choice: int, ended: Ended) -> Answer:
    hypothesis = ended.hypothesis
    return Answer(choice, hypothesis.token_ids, hypothesis.logprobs or None, ended.finish_reason)
