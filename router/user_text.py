"""A chat template puts users' words between control tokens. This keeps the words from becoming control tokens.

A user may write `<|im_end|>`. As text that is nine harmless characters; as a token it would end the message, and what
follows could be a message of the system's. So wherever a request's strings hold the text of a special token, it is
replaced by a number that nobody can guess before the template runs; of the rendered text, what still looks like a
special token is the template's own; the numbers become the user's text again, and are tokenised as plain text.

    "<|im_start|>user\\n{{content}}<|im_end|>"  with content "a<|im_end|>b"
    -> <|im_start|>  "user\\na" 7031...42 "b"  <|im_end|>
    -> id            plain("user\\na<|im_end|>b")  id

A request without such text (nearly every one) is tokenised in one go, exactly as Hugging Face does it.

Some tokenizers have role markers, or `<think>`, as tokens that are not special. Where the chat template writes such a
token, it is a control token here too; but not in an assistant's own words, which templates take apart at these places.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NUM_DIGITS = 40


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A control token as the tokenizer's file describes it."""

    token_id: int
    text: str
    takes_left_space: bool = False
    takes_right_space: bool = False
    is_special: bool = True
    """Otherwise it is one only because the chat template writes it."""


class UserText:
    """Knows the texts of one tokenizer's special tokens. `encode_plain` must not take any text for a special token."""

    def __init__(self, tokens: Sequence[SpecialToken], encode_plain: Callable[[str], list[int]]) -> None:
        self._tokens = {token.text: token for token in tokens if token.text}
        self._pattern = _pattern(self._tokens)
        self._special_pattern = _pattern([token.text for token in self._tokens.values() if token.is_special])
        self._encode_plain = encode_plain
        self.token_ids = frozenset(token.token_id for token in self._tokens.values())

    def mask(self, value: Any, mask: Mask, *, is_answer: bool = False) -> Any:
        """The same value with the control tokens' texts in its strings replaced, dictionaries' keys included.
        `is_answer`: an assistant's words."""
        return mask.applied(value, self._special_pattern if is_answer else self._pattern)

    def encode(self, rendered: str, mask: Mask) -> list[int]:
        """Token ids of a rendered template: control tokens where the template has them, plain text everywhere else."""
        ids: list[int] = []
        start, strips = 0, False
        for match in () if self._pattern is None else self._pattern.finditer(rendered):
            token = self._tokens[match[0]]
            text = rendered[start : match.start()]
            ids += self._plain(text, mask, strips_left=strips, strips_right=token.takes_left_space)
            ids.append(token.token_id)
            start, strips = match.end(), token.takes_right_space
        return ids + self._plain(rendered[start:], mask, strips_left=strips, strips_right=False)

    def num_tokens_in(self, rendered: str) -> int:
        """How many control tokens the template itself wrote."""
        return 0 if self._pattern is None else sum(1 for _ in self._pattern.finditer(rendered))

    def _plain(self, text: str, mask: Mask, *, strips_left: bool, strips_right: bool) -> list[int]:
        text = text.lstrip() if strips_left else text
        text = text.rstrip() if strips_right else text
        return self._encode_plain(mask.undone(text)) if text else []


def _pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    # the longest first: of two tokens that begin alike, the tokenizer takes the longer
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


class Mask:
    """What was replaced in one request, and how to undo it."""

    def __init__(self) -> None:
        # digits survive whatever a template does to text: cases, JSON, HTML, trimming
        self._nonce = f"{secrets.randbelow(10**_NUM_DIGITS):0{_NUM_DIGITS}d}"
        self._replaced: list[str] = []

    @property
    def is_empty(self) -> bool:
        return not self._replaced

    def applied(self, value: Any, pattern: re.Pattern[str] | None) -> Any:
        if pattern is None:
            return value
        if isinstance(value, str):
            return pattern.sub(self._replace, value)
        if isinstance(value, Mapping):
            return {self.applied(key, pattern): self.applied(each, pattern) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.applied(each, pattern) for each in value]
        return value

    def undone(self, text: str) -> str:
        if self.is_empty:
            return text
        return re.sub(self._nonce + r"(\d{9})", lambda match: self._replaced[int(match[1])], text)

    def _replace(self, match: re.Match[str]) -> str:
        self._replaced.append(match[0])
        return f"{self._nonce}{len(self._replaced) - 1:09d}"
