"""What an answer's text consists of, once it is read: words, thoughts, and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool is being called. Calls of one answer are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class Reader(Protocol):
    """Reads one growing answer. The same text gives the same pieces (joined) in whatever portions it comes."""

    @property
    def is_reasoning(self) -> bool:
        """True while what comes next would be reasoning."""

    def push(self, text: str) -> list[Piece]:
        """What can be said for sure after this text."""

    def finish(self) -> list[Piece]:
        """The text has ended: what was held back."""


@dataclass(slots=True)
class Call:
    """One call of a tool, as far as it is written."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """Pieces put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @staticmethod
    def of(pieces: Sequence[Piece]) -> Message:
        message = Message()
        for piece in pieces:
            message.add(piece)
        return message

    def add(self, piece: Piece) -> None:
        match piece:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallStart(_, name):
                self.calls.append(Call(name))
            case CallArguments(index, text):
                self.calls[index].arguments += text
