"""POST /v1/embeddings: what it takes, and what that comes down to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.router.config import GatewayConfig
from tandem.router.errors import ApiError, bad_request
from tandem.router.openai.fields import KVRetention, Label, Priority, TokenId
from tandem.router.openai.wire import WireModel, parse_body
from tandem.router.tokenizer import Tokenizer
from tandem.workers.pooling import Pooling
from tandem.workers.types import Request, Retention, SamplingParams

NO_SAMPLING = SamplingParams(max_tokens=1, seed=0)

Side = Literal["left", "right"]
TokenIds = list[TokenId]


class EmbeddingRequest(WireModel):
    """`input`: a text, its token ids, or a list of either."""

    model: str
    input: str | TokenIds | list[str] | list[TokenIds]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """So many first numbers of each embedding, scaled to length 1 again: for models that were trained for it."""
    user: Label | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Of each input; -1: as many as the model can read."""
    truncation_side: Side | None = None
    """Which end is cut off. "right" unless it is said."""
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    kv_retention: KVRetention | None = None

    def plan(self, tokenizer: Tokenizer, config: GatewayConfig, pooling: Pooling) -> EmbeddingPlan:
        """Tokenise, check ids, lengths and sizes. Slow for long inputs. Raises `ApiError`."""
        if pooling.refusal is not None:
            raise bad_request(f"Not possible: {pooling.refusal}.", param="model", code="unsupported_model")
        return EmbeddingPlan(
            inputs=tuple(map(tuple, self._inputs(tokenizer, config))),
            num_dimensions=self._num_dimensions(pooling),
            is_base64=self.encoding_format == "base64",
            cache_salt=self.cache_salt,
            retention=Retention() if self.kv_retention is None else self.kv_retention.retention(),
            priority=self.priority or 0,
        )

    def _inputs(self, tokenizer: Tokenizer, config: GatewayConfig) -> list[list[int]]:
        given, is_list = _as_inputs(self.input)
        if len(given) > config.max_num_inputs:
            raise bad_request(f"At most {config.max_num_inputs} inputs can be given at once.", param="input")
        limit, side = self._truncation(config)
        inputs: list[list[int]] = []
        num_tokens = 0
        for position, each in enumerate(given):
            param = f"input[{position}]" if is_list else "input"
            token_ids = self._tokens(each, tokenizer, limit, side, param)
            _check_length(len(token_ids), config.max_model_len, param)
            num_tokens += len(token_ids)
            if num_tokens > config.max_num_input_tokens:
                raise bad_request(
                    f"The inputs have more than {config.max_num_input_tokens} tokens together.", param="input"
                )
            inputs.append(token_ids)
        return inputs

    def _truncation(self, config: GatewayConfig) -> tuple[int | None, Side]:
        limit = self.truncate_prompt_tokens
        if limit == 0:
            raise bad_request(
                "Invalid value for 'truncate_prompt_tokens': nothing would be left.",
                param="truncate_prompt_tokens",
                code="invalid_value",
            )
        if limit is None and self.truncation_side is not None:
            raise bad_request(
                "'truncation_side' is only allowed with 'truncate_prompt_tokens'.", param="truncation_side"
            )
        return config.max_model_len if limit == -1 else limit, self.truncation_side or "right"

    def _tokens(
        self, given: str | list[int], tokenizer: Tokenizer, limit: int | None, side: Side, param: str
    ) -> list[int]:
        if isinstance(given, str):
            if not given:
                raise bad_request(f"'{param}' must not be an empty string.", param=param)
            token_ids = _text_tokens(given, tokenizer, self.add_special_tokens is not False, limit, side)
        else:
            token_ids = given if limit is None else _cut(given, limit, side)
        if not token_ids:
            raise bad_request(f"'{param}' holds no tokens.", param=param)
        largest = max(token_ids)
        if largest >= tokenizer.vocab_size:
            message = f"'{param}' holds the id {largest}, but the vocabulary has {tokenizer.vocab_size} ids."
            raise bad_request(message, param=param)
        return token_ids

    def _num_dimensions(self, pooling: Pooling) -> int | None:
        asked = self.dimensions
        if asked is None or asked == pooling.hidden_size:
            return None
        if asked > pooling.hidden_size:
            message = f"'dimensions' must be at most {pooling.hidden_size}, the size of this model's embeddings."
        elif pooling.sizes and asked not in pooling.sizes:
            message = f"'dimensions' of this model must be one of {', '.join(map(str, pooling.sizes))}."
        else:
            return asked
        raise bad_request(message, param="dimensions", code="invalid_value")


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """Inputs as tokens, and how to show their embeddings. `num_dimensions` None: all there are."""

    inputs: tuple[tuple[int, ...], ...]
    num_dimensions: int | None
    is_base64: bool
    cache_salt: str | None
    retention: Retention
    priority: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.inputs))

    def requests(self, request_id: str, salt: str) -> list[Request]:
        """One per input, for the workers."""
        return [
            Request(
                request_id=f"{request_id}-{position}",
                prompt_token_ids=token_ids,
                sampling=NO_SAMPLING,
                salt=salt,
                retention=self.retention,
                priority=self.priority,
            )
            for position, token_ids in enumerate(self.inputs)
        ]


def parse(body: bytes) -> EmbeddingRequest:
    """Raises `ApiError` 400 naming the field."""
    return parse_body(EmbeddingRequest, body)


def _as_inputs(given: Any) -> tuple[Sequence[str | list[int]], bool]:
    """The inputs, and whether they were a list of some."""
    if isinstance(given, str):
        return [given], False
    if not given:
        raise bad_request("'input' must not be an empty list.", param="input")
    if isinstance(given[0], int):
        return [given], False  # a list that starts with an int holds nothing else
    return given, True


def _text_tokens(text: str, tokenizer: Tokenizer, adds_special: bool, limit: int | None, side: Side) -> list[int]:
    """What the model wants before and behind every text stays, whatever is cut off of the text."""
    token_ids = tokenizer.encode_plain(text, add_special_tokens=adds_special)
    if limit is None or len(token_ids) <= limit:
        return token_ids
    if not adds_special:
        return _cut(token_ids, limit, side)
    plain = tokenizer.encode_plain(text, add_special_tokens=False)
    num_added = len(token_ids) - len(plain)
    for start in range(num_added + 1):
        end = start + len(plain)
        if num_added < limit and token_ids[start:end] == plain:
            return token_ids[:start] + _cut(plain, limit - num_added, side) + token_ids[end:]
    return _cut(token_ids, limit, side)


def _cut(token_ids: list[int], limit: int, side: Side) -> list[int]:
    return token_ids[:limit] if side == "right" else token_ids[-limit:]


def _check_length(num_tokens: int, max_model_len: int, param: str) -> None:
    if num_tokens > max_model_len:
        raise ApiError(
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, '{param}' has {num_tokens}. "
            "Please shorten it, or set 'truncate_prompt_tokens'.",
            param=param,
            code="context_length_exceeded",
        )
