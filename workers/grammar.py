"""Grammars: text in the Lark dialect of llguidance, compiled once per worker and followed once per sequence.

    text ──GrammarCache──> Grammar ──start()──> GrammarState ──fill──> which tokens may come next
                                                     └──follow <── the tokens that came

llguidance derives its automata lazily, while masks are computed. Its limits are in units of work, so that a text which
is too much for one worker is too much for all of them, and `compile_grammar` takes the first step, in which nearly all
of that work is done. It does so without the GIL.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from llguidance._lib import LLParserLimits

from tandem.workers.errors import RequestError

INITIAL_FUEL = 150_000
"""Work for the first step, at most 100 ms of it, and for the size of what later masks are computed from: 20 ms each.
With the default, a million, a regular expression of twenty characters takes 3 s, and 0.5 s for each mask."""
STEP_FUEL = 1_000_000
"""Work for each further one. The default, a fifth, ends answers whose masks take 7 ms."""
MAX_LEXER_STATES = 50_000
"""At 1 to 2 kB each."""
MAX_GRAMMAR_CHARS = 256 << 10
MAX_CACHED = 128

Words = npt.NDArray[np.int32]
"""[ceil(vocab / 32)]: bit t % 32 of word t // 32 stands for token t."""


class GrammarState:
    """One sequence's place in a grammar. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._num_followed = 0

    def follow(self, token_ids: Sequence[int], first: int) -> None:
        """Go on with what was generated since the last call. The answer is `token_ids[first:]`."""
        new = token_ids[first + self._num_followed :]
        if new:
            self._num_followed += len(new)
            self._matcher.consume_tokens(list(new))

    @property
    def is_complete(self) -> bool:
        """Whether the answer matches and nothing can follow."""
        return bool(self._matcher.is_stopped()) and not self.error

    @property
    def error(self) -> str:
        """Why it cannot go on: a token that does not fit, or a limit. Empty if it can."""
        return str(self._matcher.get_error()) if self._matcher.is_error() else ""

    def fill(self, words: Words) -> None:
        """Set the bits of the tokens that may come next; an end-of-sequence token where the answer may end."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)


class Grammar:
    """A compiled grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> GrammarState:
        """At its beginning. What was derived so far is shared."""
        return GrammarState(self._matcher.deep_copy())


def load_grammar_tokenizer(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The model's tokenizer as grammars need it; takes about a second. Raises `RequestError` if it is of a kind that
    llguidance does not know, or nothing ends an answer."""
    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except (OSError, ValueError) as error:
        raise RequestError(f"this model's tokenizer cannot be used with grammars: {error}", param="grammar") from error


def compile_grammar(tokenizer: LLTokenizer, text: str) -> Grammar:
    """Raises `RequestError` for a text that is no grammar, or too much of one. Takes up to some 100 ms of work."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(f"the grammar is longer than {MAX_GRAMMAR_CHARS} characters", param="grammar")
    try:
        text.encode()
    except UnicodeEncodeError as half:
        raise RequestError("the grammar holds half a character", param="grammar") from half
    limits = LLParserLimits(
        initial_lexer_fuel=INITIAL_FUEL,
        step_lexer_fuel=STEP_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    error = matcher.get_error() or _try_some_token(matcher.deep_copy(), words)
    if error:
        raise RequestError(f"the grammar cannot be compiled: {_first_line(error)}", param="grammar")
    return Grammar(matcher)


def _try_some_token(matcher: LLMatcher, words: Words) -> str:
    """What is wrong after one of the tokens that may come first: what they lead to is only now looked at."""
    (token_ids,) = np.nonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    if len(token_ids):
        matcher.consume_token(int(token_ids[len(token_ids) // 2]))
    return str(matcher.get_error())


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:300]


class GrammarCache:
    """The grammars that a worker compiled last, by text. `prepare` before `get`, so that nobody waits in `get`.

    `load_tokenizer` is called once, when the first grammar comes. Both may raise `RequestError`.
    """

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer], max_cached: int = MAX_CACHED) -> None:
        self._load_tokenizer = load_tokenizer
        self._max_cached = max_cached
        self._tokenizer: LLTokenizer | None = None
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._compiling: dict[str, asyncio.Future[Grammar]] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self.num_compiled = 0

    async def prepare(self, text: str) -> None:
        """Compile it beside the event loop, one at a time, unless it is here."""
        if text in self._grammars:
            return
        future = self._compiling.get(text)
        if future is None:
            loop = asyncio.get_running_loop()
            future = self._compiling[text] = loop.run_in_executor(self._executor, self._compile, text)
            future.add_done_callback(lambda done: self._compiled(text, done))
        await asyncio.shield(future)

    def get(self, text: str) -> Grammar:
        """Compiles it here and now if it is not prepared."""
        grammar = self._grammars.get(text)
        if grammar is None:
            grammar = self._compile(text)
            self._put(text, grammar)
        self._grammars.move_to_end(text)
        return grammar

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _compile(self, text: str) -> Grammar:
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        self.num_compiled += 1
        return compile_grammar(self._tokenizer, text)

    def _compiled(self, text: str, future: asyncio.Future[Grammar]) -> None:
        del self._compiling[text]
        if not future.cancelled() and future.exception() is None:
            self._put(text, future.result())

    def _put(self, text: str, grammar: Grammar) -> None:
        self._grammars[text] = grammar
        while len(self._grammars) > self._max_cached:
            self._grammars.popitem(last=False)
