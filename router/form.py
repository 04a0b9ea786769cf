"""The border between an answer and the shape in which one endpoint shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.router.errors import ApiError
from tandem.router.output import Answer, Delta
from tandem.router.parsers.pieces import Content, Piece
from tandem.router.parsers.select import Reading
from tandem.workers.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Naming:
    """What every form says of its answer."""

    unique_id: str
    model: str
    created: int
    """Unix time in seconds."""
    cancel: Callable[[], None]
    """Ends the request from outside."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The bill, in tokens."""

    num_prompt: int
    num_completion: int
    num_cached: int
    num_reasoning: int

    def for_openai(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self.num_prompt + self.num_completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning},
        }


def pieces_of(delta: Delta, reading: Reading) -> Sequence[Piece]:
    """What was added, as it is read; all of it words where nothing reads it."""
    if reading.is_plain:
        return [Content(delta.text)] if delta.text else []
    return delta.pieces


class Form(Protocol):
    """One answer in one endpoint's shape: as a stream of events, or whole. `answers` come by index."""

    is_pure: bool
    """`whole` touches nothing but what it is given: it may be called in a thread, where there is much to tell."""

    def take_prompt(self, position: int, scored: Sequence[TokenLogprobs]) -> None:
        """How likely the tokens of this prompt are, but its first; told before its answers begin, where the plan scores
        prompts. Called in a thread: whatever is slow about it is done here, once."""

    def begin(self) -> bytes:
        """The first events, when a worker has taken the request."""

    def show(self, index: int, answer: Answer, delta: Delta) -> bytes:
        """The events for what was added to one answer; none if it has nothing to say yet."""

    def show_text(self, index: int, text: str) -> bytes:
        """`show` of a delta that is nothing but the text of tokens, perhaps empty."""

    def end(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """The last events."""

    def fail(self, error: ApiError) -> bytes:
        """The last events of a stream that broke: never the same as a clean end."""

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Mapping[str, Any]:
        """Everything in one object."""
