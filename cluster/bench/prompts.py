"""What the requests say: random content that depends on a seed alone, with shared parts where they are asked for."""

from __future__ import annotations

import numpy as np

from tandem.cluster.bench.arrivals import Arrival
from tandem.cluster.bench.client import Answer, Messages, Prompt

Content = str | list[int]
"""What one side says: text, or token ids."""

_OWN, _SHARED, _BLOCK, _WARM_UP, _TURN, _CHOICE = range(6)
"""Streams of randomness; the first number after the seed."""

_TEXT = """
the of and to in is was for that with on as are be this from have or by one had not but what all were when we there
can an your which their said if do will each about how up out them then she many some so these would other into has
more her two like him see time could no make than first been its who now people my made over did down only way find
use may water long little very after words called just where most know get through back much before go good new
write our used me man too any day same right look think also around another came come work three word must because
does part even place well such here take why things help put years different away again off went old number great
tell men say small every found still between name should home big give air line set own under read last never us
left end along while might next sound below saw something thought both few those always looked show large often
together asked house world going want school important until form food keep children feet land side without boy once
animals life enough took sometimes four head above kind began almost live page got earth need far hand high year
mother light parts country father let night following picture being study second eyes soon times story boys since
white days ever paper hard near sentence better best across during today others however sure means knew try told
young miles sun ways thing whole hear example heard several change answer room sea against top turned learn point
city play toward five using himself usually
"""
WORDS = tuple(_TEXT.split())
"""Common English words: with a space before it, each is one token in most vocabularies, so that lengths come out."""


class PromptMaker:
    """Makes prompts of exactly so many tokens (ids below `num_tokens`), or of so many common words.

    With `num_tokens`, ids come from the upper seven eighths of the range: special tokens mostly have low ids.
    """

    def __init__(
        self, seed: int, *, num_tokens: int | None, shared_prefix_len: int, num_shared_prefixes: int = 1
    ) -> None:
        self._seed = seed
        self._num_tokens = num_tokens
        self._shared_prefix_len = shared_prefix_len
        self._num_shared_prefixes = num_shared_prefixes

    def prompt(self, number: int, arrival: Arrival) -> Content:
        """The prompt of the `number`-th request, or of the first turn of the `number`-th conversation."""
        return self._finish(self._content(_OWN, number, arrival))

    def turn(self, number: int, turn: int, length: int) -> Content:
        """What the user says next in the `number`-th conversation."""
        return self._finish(self._draw(_TURN, number * 1_000 + turn, length))

    def warm_up_prompt(self, number: int, arrival: Arrival) -> Content:
        """Nothing in common with any measured prompt: a warm-up must not fill the server's cache for them."""
        return self._finish(self._draw(_WARM_UP, number, arrival.input_len))

    def _content(self, stream: int, number: int, arrival: Arrival) -> list[int]:
        if arrival.content_ids:
            start = [
                symbol
                for content_id in arrival.content_ids
                for symbol in self._draw(_BLOCK, content_id, arrival.content_block_len)
            ][: arrival.input_len]
        else:
            chooser = np.random.default_rng((self._seed, _CHOICE, stream, number))
            start = self._draw(_SHARED, int(chooser.integers(self._num_shared_prefixes)), self._shared_prefix_len)
        # At least one symbol of its own, unless the trace says that the whole prompt is shared.
        missing = arrival.input_len - len(start) if arrival.content_ids else max(1, arrival.input_len - len(start))
        return start + self._draw(stream, number, missing)

    def _draw(self, stream: int, number: int, length: int) -> list[int]:
        rng = np.random.default_rng((self._seed, stream, number))
        low, high = (0, len(WORDS)) if self._num_tokens is None else (self._num_tokens // 8, self._num_tokens)
        return [int(symbol) for symbol in rng.integers(low, high, length)]

    def _finish(self, symbols: list[int]) -> Content:
        if self._num_tokens is not None:
            return symbols
        return " ".join(WORDS[symbol] for symbol in symbols)


class Conversation:
    """What was said so far, in the form in which it is sent: token ids, text, or messages."""

    def __init__(self, content: Content, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._messages: Messages = []
        self._content: Content = [] if isinstance(content, list) else ""
        self.ask(content)

    @property
    def prompt(self) -> Prompt:
        return list(self._messages) if self._is_chat else self._content

    def ask(self, content: Content) -> None:
        self._say("user", content)

    def answer(self, answer: Answer) -> None:
        self._say("assistant", answer.token_ids if isinstance(self._content, list) else answer.text)

    def symbols(self) -> list[int] | list[str]:
        """Everything said, for comparing beginnings: token ids, or words."""
        return self._content if isinstance(self._content, list) else self._content.split()

    def _say(self, role: str, content: Content) -> None:
        if isinstance(self._content, list):
            assert isinstance(content, list)
            self._content = self._content + content
        else:
            assert isinstance(content, str)
            self._messages.append({"role": role, "content": content})
            separator = "" if role == "assistant" or not self._content else " "
            self._content += separator + content
