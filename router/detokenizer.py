"""Token ids back into text, one token at a time, without ever cutting a character.

A token is a run of bytes, not of characters: one emoji may be four tokens. Two families of tokenizers are known by
their bytes (byte-level BPE; SentencePiece with byte fallback), and for them detokenising is exact and costs the same
for every token: the token's bytes go through an incremental UTF-8 decoder. Any other tokenizer goes through its own
`decode`, over a short window.

The text of an answer is what its tokens add to the prompt's text, so a leading space survives.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from tokenizers import Tokenizer as RawTokenizer

Family = Literal["byte_level", "sentencepiece", "other"]

SENTENCEPIECE_SPACE = "▁"
SENTENCEPIECE_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
MAX_PENDING_TOKENS = 16
"""A character of four bytes spans at most four tokens. What stays undecodable this long is noise, and is let go."""
WINDOW_PROMPT_TOKENS = 6


class Detokenizer(Protocol):
    """The text of one growing answer."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; often its own, sometimes none."""

    def finish(self) -> str:
        """What is left of a character that never became whole, as U+FFFD."""


def family_of(decoder: Mapping[str, Any] | None) -> tuple[Family, bool]:
    """Family of a tokenizer.json's "decoder" entry, and whether it strips one space from the start of a text."""
    if decoder is None:
        return "other", False
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    types = {step["type"] for step in steps}
    if types == {"ByteLevel"}:
        return "byte_level", False
    replaced = {
        str(step.get("replacement", ""))
        if step["type"] == "Metaspace"
        else str(step.get("pattern", {}).get("String", ""))
        for step in steps
        if step["type"] in ("Metaspace", "Replace")
    }
    if types <= SENTENCEPIECE_DECODERS and replaced == {SENTENCEPIECE_SPACE}:
        strips = "Strip" in types or any(
            step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never" for step in steps
        )
        return "sentencepiece", strips
    return "other", False


def _byte_of_character() -> dict[str, int]:
    """The inverse of GPT-2's alphabet, in which each byte is a printable character."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return alphabet


BYTE_OF_CHARACTER = _byte_of_character()


class TokenTable:
    """What each token id stands for: its bytes, and whether it is a control token that never shows in text."""

    def __init__(self, tokenizer: RawTokenizer, decoder: Mapping[str, Any] | None) -> None:
        self._tokenizer = tokenizer
        self.family, self._strips_first_space = family_of(decoder)
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self.texts: dict[int, str] = {}
        """Texts of tokens seen so far that are whole characters whatever stands around them, and that always show."""

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token, special ones included. Empty for an id that the tokenizer does not know."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._work_out(token_id)
            if token_id not in self.special_ids:
                try:
                    self.texts[token_id] = known.decode()
                except UnicodeDecodeError:
                    return known  # a part of a character
        return known

    def _work_out(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        if self.family == "byte_level":
            if all(character in BYTE_OF_CHARACTER for character in token):
                return bytes(BYTE_OF_CHARACTER[character] for character in token)
            return token.encode()
        if self.family == "sentencepiece":
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace(SENTENCEPIECE_SPACE, " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def detokenizer(self, prompt_token_ids: Sequence[int], hidden: frozenset[int] | None = None) -> Detokenizer:
        """A detokenizer for an answer to this prompt. `hidden`: control tokens that do not show; by default all."""
        hidden = self.special_ids if hidden is None else hidden
        if self.family == "other":
            return WindowDetokenizer(self._tokenizer, hidden, prompt_token_ids)
        # the last few tokens tell whether any text stands before the answer
        is_start_of_text = all(self.is_special(token_id) for token_id in prompt_token_ids)
        return ByteDetokenizer(self, hidden, strips_space=self._strips_first_space and is_start_of_text)


class ByteDetokenizer:
    """Exact: the tokens' bytes through an incremental UTF-8 decoder."""

    def __init__(self, table: TokenTable, hidden: frozenset[int], *, strips_space: bool) -> None:
        self._table = table
        self._hidden = hidden
        self._strips_space = strips_space
        self._texts = table.texts
        self._is_between = not strips_space
        """Between two characters, and not before the first."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if self._is_between:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        if token_id in self._hidden:
            return ""
        content = self._table.bytes_of(token_id)
        if self._strips_space and content:
            content = content.removeprefix(b" ")
            self._strips_space = False
        text = self._decoder.decode(content)
        self._is_between = not self._strips_space and not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        self._is_between = False
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For tokenizers of unknown make: decode the last few tokens with and without the new ones; the difference is new.

    Text that ends in U+FFFD waits for the tokens that make it whole.
    """

    def __init__(self, tokenizer: RawTokenizer, hidden: frozenset[int], prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._settled = [i for i in prompt_token_ids[-WINDOW_PROMPT_TOKENS:] if i not in hidden]
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._hidden or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._pending.append(token_id)
        text = self._difference()
        if not text or (text.endswith("\ufffd") and len(self._pending) < MAX_PENDING_TOKENS):
            return ""
        self._settled, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        text = self._difference()
        self._pending = []
        return text

    def _difference(self) -> str:
        # hidden ids never come this far
        before = self._tokenizer.decode(self._settled, skip_special_tokens=False)
        after = self._tokenizer.decode(self._settled + self._pending, skip_special_tokens=False)
        if after.startswith(before):
            return after[len(before) :]
        return after[len(before.rstrip("\ufffd")) :]
