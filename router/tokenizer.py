"""The model's tokenizer, from its files alone: text to ids, messages to a prompt, ids to bytes and text.

`transformers` would do the same and bring torch along; the gateway must stay small, so it reads the files itself. Tests
hold the two against each other.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from tandem.router.chat_template import ChatTemplate
from tandem.router.detokenizer import Detokenizer, TokenTable
from tandem.router.parsers.select import CallParserChoice, ReasoningParserChoice, style_of
from tandem.router.user_text import Mask, SpecialToken, UserText
from tandem.workers.errors import ModelError, RequestError


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the model reads it."""

    token_ids: list[int]
    ending: str
    """The last few characters of its text: some templates begin the answer."""


class Tokenizer:
    """Everything about text that the gateway needs. Safe to use from several threads.

    Raises `ModelError` naming the file that is missing or malformed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        chat_template: Path | None = None,
        tool_call_parser: CallParserChoice = "auto",
        reasoning_parser: ReasoningParserChoice = "auto",
    ) -> None:
        path = folder / "tokenizer.json"
        description = _read_json(path)
        if description is None:
            raise ModelError(f"{path} is missing: the tokenizer cannot be loaded")
        self._tokenizer = _load(path)
        # the same, but no text is a special token to it: the setting cannot be changed from call to call
        self._plain = _load(path)
        self._plain.encode_special_tokens = True
        self._table = TokenTable(self._tokenizer, description.get("decoder"))

        settings = _read_json(folder / "tokenizer_config.json") or {}
        model_config = _read_json(folder / "config.json") or {}
        generation_config = _read_json(folder / "generation_config.json") or {}
        special_tokens = _special_tokens(settings)
        template = _template_source(folder, settings) if chat_template is None else _read_text(chat_template)
        self.template = None if template is None else ChatTemplate(template, special_tokens)
        tokens = _control_tokens(self._tokenizer, template or "")
        self._plainest = _without(description, tokens) or self._plain
        self._user_text = UserText(tokens, self._encode_user_text)
        self.style = style_of(self.template, tool_call_parser, reasoning_parser)
        self.vocab_size: int = model_config.get("vocab_size") or self._tokenizer.get_vocab_size()
        """Ids from here on do not exist in the model."""
        self.eos_token_ids = self._eos_token_ids(generation_config, model_config, special_tokens)
        """Ids that end an answer, sorted."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of text in which control tokens are control tokens: never for what a user wrote."""
        # the batch form without offsets: half the time of `encode`, and it lets go of the GIL throughout
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_plain(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of somebody's words. `add_special_tokens`: those that the model wants before every text."""
        return self._plain.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text for these messages. Raises `RequestError` if the model has no chat template or it refuses."""
        return self._need_template().render(messages)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """The prompt for these messages, in which nothing that they say is a control token (user_text.py).

        `continue_final_message`: the prompt ends where the last message does, and the answer goes on with it. Raises
        `RequestError` as `render_chat` does.
        """
        template = self._need_template()
        mask, words = Mask(), self._user_text
        told = [words.mask(message, mask, is_answer=message["role"] == "assistant") for message in messages]
        end = f"{secrets.randbits(128):039d}"
        if continue_final_message:
            told[-1]["content"] += end
        text = template.render(
            told,
            tools=words.mask(tools, mask),
            add_generation_prompt=add_generation_prompt,
            variables=words.mask(dict(variables or {}), mask),
        )
        if continue_final_message:
            if end not in text:
                raise RequestError("the chat template does not show the last message", param="continue_final_message")
            text = text[: text.rindex(end)]
        return ChatPrompt(self._guarded(text, mask), text[-64:])

    def _guarded(self, text: str, mask: Mask) -> list[int]:
        if mask.is_empty:
            ids = self.encode(text, add_special_tokens=False)
            control = self._user_text.token_ids
            # a normaliser may have made a control token out of something that did not look like one
            if sum(token_id in control for token_id in ids) == self._user_text.num_tokens_in(text):
                return ids
        return self._user_text.encode(text, mask)

    def _encode_user_text(self, text: str) -> list[int]:
        return self._plainest.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _need_template(self) -> ChatTemplate:
        if self.template is None:
            raise RequestError("this model has no chat template; use the completions endpoint", param="messages")
        return self.template

    def token_id(self, text: str) -> int | None:
        """The id of the token with exactly this text."""
        return self._tokenizer.token_to_id(text)

    def is_special(self, token_id: int) -> bool:
        return self._table.is_special(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self._table.bytes_of(token_id)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, control tokens included."""
        detokenizer = self._table.detokenizer((), frozenset())
        return "".join([detokenizer.push(token_id) for token_id in token_ids]) + detokenizer.finish()

    def detokenizer(
        self, prompt_token_ids: Sequence[int], *, shows_special: bool = False, shown: Sequence[str] = ()
    ) -> Detokenizer:
        """For an answer to this prompt. Control tokens are hidden, but for those in `shown`, or none if
        `shows_special`."""
        if shows_special:
            return self._table.detokenizer(prompt_token_ids, frozenset())
        if not shown:
            return self._table.detokenizer(prompt_token_ids)
        ids = {self._tokenizer.token_to_id(text) for text in shown}
        return self._table.detokenizer(prompt_token_ids, self._table.special_ids - ids)

    def _eos_token_ids(
        self,
        generation_config: Mapping[str, Any],
        model_config: Mapping[str, Any],
        special_tokens: Mapping[str, str],
    ) -> tuple[int, ...]:
        configured = generation_config.get("eos_token_id", model_config.get("eos_token_id"))
        ids = set(configured if isinstance(configured, list) else [configured])
        if "eos_token" in special_tokens:
            ids.add(self._tokenizer.token_to_id(special_tokens["eos_token"]))
        return tuple(sorted(token_id for token_id in ids if isinstance(token_id, int)))


def _load(path: Path) -> RawTokenizer:
    try:
        tokenizer = RawTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()  # a truncated prompt would be a silently different question
    tokenizer.no_padding()
    return tokenizer


def _control_tokens(tokenizer: RawTokenizer, template: str) -> list[SpecialToken]:
    """The special tokens, and the added ones that the chat template writes."""
    return [
        SpecialToken(token_id, token.content, token.lstrip, token.rstrip, token.special)
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special or (token.content.strip() and token.content in template)
    ]


def _without(description: Mapping[str, Any], tokens: Sequence[SpecialToken]) -> RawTokenizer | None:
    """A tokenizer to which none of these is a token. None: it is enough to leave out the special ones."""
    others = {token.token_id for token in tokens if not token.is_special}
    if not others:
        return None
    added = [token | {"special": token["special"] or token["id"] in others} for token in description["added_tokens"]]
    tokenizer = RawTokenizer.from_str(json.dumps({**description, "added_tokens": added}))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in this file, or None if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return content


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like by name; each may be a string or a described token."""
    tokens: dict[str, str] = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The text of the chat template: its own file wins over the entry in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return _read_text(path)
    entry = settings.get("chat_template")
    if isinstance(entry, list):
        named = {item["name"]: item["template"] for item in entry}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None
