"""One answer as the client sees it: the worker's tokens turned into text, cut at stop strings, read, with logprobs.

Tokens are taken one at a time whatever frames they came in, so the same tokens give the same text, logprobs and count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.router.parsers.pieces import CallStart, Piece, Reader
from tandem.router.parsers.select import PLAIN_READING, Reading
from tandem.router.stop import StopMatcher
from tandem.router.tokenizer import Tokenizer
from tandem.workers.types import FinishReason, TokenChunk, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Showing:
    """What of an answer's tokens its text shows, beside the usual."""

    includes_stop: bool = False
    """The stop string, or the stop token, stays at the end."""
    shows_special: bool = False
    """Control tokens are text."""
    reading: Reading = PLAIN_READING


PLAIN_SHOWING = Showing()


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A generated token with its logprobs and the place in the answer's text where it begins."""

    token_id: int
    logprobs: TokenLogprobs
    text_offset: int
    num_pieces: int = 0
    """Of the answer, before this token was read: it is a part of the next one, or there is none."""


@dataclass(slots=True)
class Delta:
    """What one frame added to one answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    pieces: list[Piece] = field(default_factory=list)
    """The text as it is read; empty when nothing reads it."""

    def extend(self, other: Delta) -> None:
        self.text += other.text
        self.token_ids += other.token_ids
        self.scored += other.scored
        self.finish_reason = other.finish_reason
        self.pieces += other.pieces


class Answer:
    """One choice of one prompt while it is being written."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stops: Sequence[str],
        stop_token_ids: Sequence[int],
        showing: Showing = PLAIN_SHOWING,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(
            prompt_token_ids, shows_special=showing.shows_special, shown=showing.reading.shown_tokens()
        )
        self._includes_stop = showing.includes_stop
        self._matcher = StopMatcher(stops, includes_stop=showing.includes_stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._reader: Reader | None = showing.reading.reader()
        self._text_len = 0
        self._total = Delta()
        self._texts: list[str] = []
        """What `try_push` added since somebody looked: a string that grows is copied each time."""
        self._is_plain = not stops and self._reader is None
        """Nothing but tokens can make or end it."""
        self.last_token_at: float | None = None
        """`time.perf_counter` when its last token came."""
        self.is_cut = False
        """True once a stop string ended the answer: the worker does not know and must be told."""
        self.stop_string: str | None = None
        """The one that ended the answer."""
        self.has_calls = False
        self.num_reasoning_tokens = 0

    @property
    def is_finished(self) -> bool:
        return self._total.finish_reason is not None

    def try_push(self, chunk: TokenChunk) -> str | None:
        """`push` for the common case, in which a chunk adds text and nothing else: the text. None: nothing happened."""
        if not self._is_plain or chunk.finish_reason is not None or chunk.logprobs is not None:
            return None
        token_ids = chunk.token_ids
        push = self._detokenizer.push
        text = push(token_ids[0]) if len(token_ids) == 1 else "".join([push(token_id) for token_id in token_ids])
        self._total.token_ids += token_ids
        self._texts.append(text)
        return text

    @property
    def total(self) -> Delta:
        """Everything so far."""
        if self._texts:
            text = "".join(self._texts)
            self._texts.clear()
            self._text_len += len(text)
            self._total.text += text
        return self._total

    def push(self, chunk: TokenChunk) -> Delta:
        """Take what the worker sent and say what it added. Chunks behind the end add nothing."""
        total, delta = self.total, Delta()
        if self.is_finished:
            return delta
        for position, token_id in enumerate(chunk.token_ids):
            delta.token_ids.append(token_id)
            if chunk.logprobs is not None:
                num_pieces = len(total.pieces) + len(delta.pieces)
                delta.scored.append(ScoredToken(token_id, chunk.logprobs[position], self._text_len, num_pieces))
            ends_here = chunk.finish_reason == "stop" and position == len(chunk.token_ids) - 1
            # the token that ended the answer is counted and scored, and is no part of the text
            if self._includes_stop or not (ends_here and token_id in self._stop_token_ids):
                self._show(self._detokenizer.push(token_id), delta)
            if self._reader is not None and self._reader.is_reasoning:
                self.num_reasoning_tokens += 1
            if self.is_cut:
                break
        if chunk.finish_reason is not None and not self.is_cut:
            self._show(self._detokenizer.finish(), delta)
            if not self.is_cut:
                self._add(self._matcher.flush(), delta)
                delta.finish_reason = chunk.finish_reason
        if delta.finish_reason is not None and self._reader is not None:
            self._take(self._reader.finish(), delta)
        total.extend(delta)
        return delta

    def _show(self, text: str, delta: Delta) -> None:
        self._text_len += len(text)
        shown, self.stop_string = self._matcher.push(text)
        self._add(shown, delta)
        if self.stop_string is not None:
            self.is_cut = True
            delta.finish_reason = "stop"

    def _add(self, text: str, delta: Delta) -> None:
        if not text:
            return
        delta.text += text
        if self._reader is not None:
            self._take(self._reader.push(text), delta)

    def _take(self, pieces: Sequence[Piece], delta: Delta) -> None:
        delta.pieces += pieces
        self.has_calls = self.has_calls or any(isinstance(piece, CallStart) for piece in pieces)
