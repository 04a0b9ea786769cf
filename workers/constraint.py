"""What one sequence may choose next, and what it is made to prefer: plain arrays, no tensors.

A token may be chosen if the client allows it, the grammar does, it does not complete a bad sequence, and it does not
end the answer too early. The state is a function of the sequence's tokens alone: whoever holds them goes on where
another worker stopped.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from copy import copy

import numpy as np

from tandem.workers.errors import RequestError
from tandem.workers.grammar import GrammarState, Words
from tandem.workers.types import SamplingParams


class NothingAllowed(Exception):
    """No token may follow. Ends the one sequence."""


class Constraint:
    """Of one sequence. Used by one thread at a time: the runner's while a step runs, else the engine's."""

    def __init__(self, params: SamplingParams, vocab_size: int, grammar: GrammarState | None = None) -> None:
        """`params` passed `validate_constraints` for this vocabulary."""
        self.bias_token_ids = np.array([token_id for token_id, _ in params.logit_bias], np.int64)
        self.biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self.grammar = grammar
        self.vocab_size = vocab_size
        self._min_tokens = params.min_tokens
        self._stop_token_ids = np.array(params.stop_token_ids, np.int64)
        self._allowed = _allowed_words(params, vocab_size)
        self._bad_endings: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        """Bad sequences of several tokens without their last one, by that one's length; the last one is at the end."""
        for bad in params.bad_token_ids:
            if len(bad) > 1:
                self._bad_endings[len(bad) - 1].append(bad)

    @property
    def reads_tokens(self) -> bool:
        """Whether the mask depends on which tokens there are, or how many."""
        counts = bool(self._min_tokens and len(self._stop_token_ids))
        return counts or self.grammar is not None or bool(self._bad_endings)

    def of_another(self, grammar: GrammarState | None) -> Constraint:
        """For another choice of the request: what does not change is shared."""
        other = copy(self)
        other.grammar = grammar
        return other

    def mask(self, token_ids: SequenceOf[int], num_prompt_tokens: int) -> Words | None:
        """The tokens that may come behind `token_ids`; None: any. Raises `NothingAllowed`."""
        forbidden = self._forbidden(token_ids, num_prompt_tokens)
        if self.grammar is None and self._allowed is None and not len(forbidden):
            return None
        words = self._from_grammar(token_ids, num_prompt_tokens)
        if self._allowed is not None:
            words &= self._allowed
        _clear(words, forbidden)
        if not words.any():
            raise NothingAllowed("no token may follow: the request's constraints exclude all of them")
        return words

    def is_complete(self, token_ids: SequenceOf[int], num_prompt_tokens: int) -> bool:
        """Whether the grammar leaves nothing to say."""
        if self.grammar is None:
            return False
        self.grammar.follow(token_ids, num_prompt_tokens)
        return self.grammar.is_complete

    def _from_grammar(self, token_ids: SequenceOf[int], num_prompt_tokens: int) -> Words:
        if self.grammar is None:
            return _all_words(self.vocab_size)
        words = np.zeros(-(-self.vocab_size // 32), np.int32)
        self.grammar.follow(token_ids, num_prompt_tokens)
        if not self.grammar.error:
            self.grammar.fill(words)
        if self.grammar.error:
            raise NothingAllowed(f"the grammar cannot go on: {self.grammar.error}")
        return words

    def _forbidden(self, token_ids: SequenceOf[int], num_prompt_tokens: int) -> SequenceOf[int]:
        forbidden: list[int] = []
        if len(token_ids) - num_prompt_tokens < self._min_tokens:
            forbidden += self._stop_token_ids.tolist()
        for length, sequences in self._bad_endings.items():
            ending = tuple(token_ids[-length:])
            forbidden += [bad[-1] for bad in sequences if bad[:-1] == ending]
        return forbidden


def needs_constraint(params: SamplingParams) -> bool:
    """Whether the sampler must be told of anything but what it is told of every sequence."""
    return bool(
        params.logit_bias
        or params.bad_token_ids
        or params.grammar is not None
        or params.allowed_token_ids is not None
        or (params.min_tokens and params.stop_token_ids)
    )


def validate_constraints(params: SamplingParams, vocab_size: int) -> None:
    """Raises `RequestError` naming the field that no worker with this vocabulary could honour."""
    if params.min_tokens > params.max_tokens:
        raise RequestError(f"min_tokens must be at most max_tokens, {params.max_tokens}", param="min_tokens")
    bias_token_ids = [token_id for token_id, _ in params.logit_bias]
    _check_ids("logit_bias", bias_token_ids, vocab_size)
    if len(set(bias_token_ids)) < len(bias_token_ids):
        raise RequestError("logit_bias must name a token once", param="logit_bias")
    if not all(math.isfinite(bias) for _, bias in params.logit_bias):
        raise RequestError("logit_bias must be finite", param="logit_bias")
    if params.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
        if not params.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
    for bad in params.bad_token_ids:
        _check_ids("bad_words", bad, vocab_size)
        if not bad:
            raise RequestError("bad_words must not hold an empty sequence", param="bad_words")


def _check_ids(name: str, token_ids: SequenceOf[int], vocab_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise RequestError(f"{name}: token ids must be from 0 to {vocab_size - 1}", param=name)


def _allowed_words(params: SamplingParams, vocab_size: int) -> Words | None:
    """What holds throughout: the allowed tokens without those that are bad by themselves. None: all."""
    bad = [sequence[0] for sequence in params.bad_token_ids if len(sequence) == 1]
    if params.allowed_token_ids is None:
        if not bad:
            return None
        words = _all_words(vocab_size)
    else:
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[list(params.allowed_token_ids)] = 1
        words = np.packbits(bits, bitorder="little").view(np.int32)
    _clear(words, bad)
    return words


def _all_words(vocab_size: int) -> Words:
    """A bit for each token, none behind the last."""
    words = np.full(-(-vocab_size // 32), -1, np.int32)
    if vocab_size % 32:
        words[-1] = (1 << vocab_size % 32) - 1
    return words


def _clear(words: Words, token_ids: SequenceOf[int]) -> None:
    unsigned = words.view(np.uint32)
    for token_id in token_ids:
        if token_id < 32 * len(words):
            unsigned[token_id >> 5] &= np.uint32(0xFFFFFFFF ^ 1 << (token_id & 31))
