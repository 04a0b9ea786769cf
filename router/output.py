"""One answer as the client sees it: the worker's tokens turned into text, cut at stop strings, with logprobs.

Tokens are taken one at a time whatever frames they came in, so the same tokens give the same text, logprobs and count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.router.stop import StopMatcher
from tandem.router.tokenizer import Tokenizer
from tandem.workers.types import FinishReason, TokenChunk, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A generated token with its logprobs and the place in the answer's text where it begins."""

    token_id: int
    logprobs: TokenLogprobs
    text_offset: int


@dataclass(slots=True)
class Delta:
    """What one frame added to one answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def extend(self, other: Delta) -> None:
        self.text += other.text
        self.token_ids += other.token_ids
        self.scored += other.scored
        self.finish_reason = other.finish_reason


class Answer:
    """One choice of one prompt while it is being written. `total` is everything so far."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stops: Sequence[str],
        stop_token_ids: Sequence[int],
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(prompt_token_ids)
        self._matcher = StopMatcher(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._text_len = 0
        self.total = Delta()
        self.is_cut = False
        """True once a stop string ended the answer: the worker does not know and must be told."""

    @property
    def is_finished(self) -> bool:
        return self.total.finish_reason is not None

    def push(self, chunk: TokenChunk) -> Delta:
        """Take what the worker sent and say what it added. Chunks behind the end add nothing."""
        delta = Delta()
        if self.is_finished:
            return delta
        for position, token_id in enumerate(chunk.token_ids):
            delta.token_ids.append(token_id)
            if chunk.logprobs is not None:
                delta.scored.append(ScoredToken(token_id, chunk.logprobs[position], self._text_len))
            ends_here = chunk.finish_reason == "stop" and position == len(chunk.token_ids) - 1
            # the token that ended the answer is counted and scored, and is no part of the text
            if not (ends_here and token_id in self._stop_token_ids):
                self._show(self._detokenizer.push(token_id), delta)
            if self.is_cut:
                break
        if chunk.finish_reason is not None and not self.is_cut:
            self._show(self._detokenizer.finish(), delta)
            if not self.is_cut:
                delta.text += self._matcher.flush()
                delta.finish_reason = chunk.finish_reason
        self.total.extend(delta)
        return delta

    def _show(self, text: str, delta: Delta) -> None:
        self._text_len += len(text)
        shown, is_cut = self._matcher.push(text)
        delta.text += shown
        if is_cut:
            self.is_cut = True
            delta.finish_reason = "stop"
