"""The model's tokenizer, from its files alone: text to ids, messages to a prompt, ids to bytes and text.

`transformers` would do the same and bring torch along; the gateway must stay small, so it reads the files itself. Tests
hold the two against each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from tandem.router.chat_template import ChatTemplate
from tandem.router.detokenizer import Detokenizer, TokenTable
from tandem.workers.errors import ModelError, RequestError


class Tokenizer:
    """Everything about text that the gateway needs. Safe to use from several threads.

    Raises `ModelError` naming the file that is missing or malformed.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        description = _read_json(path)
        if description is None:
            raise ModelError(f"{path} is missing: the tokenizer cannot be loaded")
        try:
            self._tokenizer = RawTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path} is not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()  # a truncated prompt would be a silently different question
        self._tokenizer.no_padding()
        self._table = TokenTable(self._tokenizer, description.get("decoder"))

        settings = _read_json(folder / "tokenizer_config.json") or {}
        model_config = _read_json(folder / "config.json") or {}
        generation_config = _read_json(folder / "generation_config.json") or {}
        special_tokens = _special_tokens(settings)
        template = _template_source(folder, settings)
        self._template = None if template is None else ChatTemplate(template, special_tokens)
        self.vocab_size: int = model_config.get("vocab_size") or self._tokenizer.get_vocab_size()
        """Ids from here on do not exist in the model."""
        self.eos_token_ids = self._eos_token_ids(generation_config, model_config, special_tokens)
        """Ids that end an answer, sorted."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # the batch form without offsets: half the time of `encode`, and it lets go of the GIL throughout
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text for these messages. Raises `RequestError` if the model has no chat template or it refuses."""
        if self._template is None:
            raise RequestError("this model has no chat template; use the completions endpoint", param="messages")
        return self._template.render(messages)

    def token_bytes(self, token_id: int) -> bytes:
        return self._table.bytes_of(token_id)

    def detokenizer(self, prompt_token_ids: Sequence[int]) -> Detokenizer:
        return self._table.detokenizer(prompt_token_ids)

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


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The text of the chat template: its own file wins over the entry in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    try:
        if path.exists():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    entry = settings.get("chat_template")
    if isinstance(entry, list):
        named = {item["name"]: item["template"] for item in entry}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None
