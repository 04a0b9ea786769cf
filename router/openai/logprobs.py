"""Logprobs in the shapes of the two endpoints. Natural logarithms; -inf is written as -9999, as the API does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem.router.http import encode_json
from tandem.router.output import ScoredToken
from tandem.router.tokenizer import Tokenizer
from tandem.workers.types import TokenLogprobs

LOWEST = -9999.0


def chat_logprobs(tokenizer: Tokenizer, scored: Sequence[ScoredToken]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion: per token its logprob, its bytes, and the most likely alternatives."""
    return {"content": [_chat_token(tokenizer, token) for token in scored], "refusal": None}


def _chat_token(tokenizer: Tokenizer, token: ScoredToken) -> dict[str, Any]:
    alternatives = zip(token.logprobs.top_token_ids, token.logprobs.top_logprobs, strict=True)
    return {
        **_described(tokenizer, token.token_id, token.logprobs.logprob),
        "top_logprobs": [_described(tokenizer, token_id, logprob) for token_id, logprob in alternatives],
    }


def _described(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    content = tokenizer.token_bytes(token_id)
    return {"token": _shown(content, ""), "logprob": max(logprob, LOWEST), "bytes": list(content)}


def completion_logprobs(tokenizer: Tokenizer, scored: Sequence[ScoredToken], start: int = 0) -> dict[str, Any]:
    """`choices[].logprobs` of a completion: four lists, one entry per token each. The token itself is always among its
    alternatives, so there may be one more of them than was asked for. `start`: where the answer's text begins."""
    return {
        "tokens": [_name(tokenizer, token.token_id) for token in scored],
        "token_logprobs": [max(token.logprobs.logprob, LOWEST) for token in scored],
        "top_logprobs": [_alternatives(tokenizer, token) for token in scored],
        "text_offset": [start + token.text_offset for token in scored],
    }


def prompt_offsets(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Where each token begins in the prompt's text, and where that ends."""
    detokenizer = tokenizer.detokenizer((), shows_special=True)
    offsets = [0]
    for token_id in prompt:
        offsets.append(offsets[-1] + len(detokenizer.push(token_id)))
    offsets[-1] += len(detokenizer.finish())
    return offsets


class EchoedLogprobs:
    """The four lists of a prompt that is echoed before its answers. Slow to make for a long one."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], scored: Sequence[TokenLogprobs]) -> None:
        *offsets, self.text_len = prompt_offsets(tokenizer, prompt)
        told = [ScoredToken(token_id, logprobs, 0) for token_id, logprobs in zip(prompt[1:], scored, strict=True)]
        # nothing comes before the first token, so nothing says how likely it was
        self._lists: Mapping[str, list[Any]] = {
            "tokens": [_name(tokenizer, token_id) for token_id in prompt],
            "token_logprobs": [None, *[max(token.logprobs.logprob, LOWEST) for token in told]],
            "top_logprobs": [None, *[_alternatives(tokenizer, token) for token in told]],
            "text_offset": offsets,
        }

    def before(self, answer: Mapping[str, list[Any]]) -> dict[str, Any]:
        """With the lists of an answer behind them, in which offsets count from the answer's beginning."""
        moved = {**answer, "text_offset": [self.text_len + offset for offset in answer["text_offset"]]}
        return {name: [*before, *moved[name]] for name, before in self._lists.items()}


def prompt_logprobs(tokenizer: Tokenizer, prompt: Sequence[int], scored: Sequence[TokenLogprobs]) -> msgspec.Raw:
    """`prompt_logprobs`: per token of the prompt those that were likely there and the one that stands there, by id.
    `rank` is null for one that was not among the likeliest. As JSON: several answers may show the same. Slow to make
    for a long prompt."""
    told: list[dict[str, Any] | None] = [None]
    for token_id, logprobs in zip(prompt[1:], scored, strict=True):
        likely = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        entry = {
            str(each): _ranked(tokenizer, each, logprob, rank) for rank, (each, logprob) in enumerate(likely, start=1)
        }
        entry.setdefault(str(token_id), _ranked(tokenizer, token_id, logprobs.logprob, None))
        told.append(entry)
    return msgspec.Raw(encode_json(told))


def _ranked(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": _name(tokenizer, token_id)}


def _alternatives(tokenizer: Tokenizer, token: ScoredToken) -> dict[str, float]:
    alternatives: dict[str, float] = {}
    for token_id, logprob in zip(token.logprobs.top_token_ids, token.logprobs.top_logprobs, strict=True):
        alternatives.setdefault(_name(tokenizer, token_id), max(logprob, LOWEST))
    alternatives.setdefault(_name(tokenizer, token.token_id), max(token.logprobs.logprob, LOWEST))
    return alternatives


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    return _shown(tokenizer.token_bytes(token_id), "bytes:")


def _shown(content: bytes, prefix: str) -> str:
    """The token as text; a part of a character as its bytes, which U+FFFD would make indistinguishable."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in content)
