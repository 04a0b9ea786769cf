"""POST /v1/completions: what it takes, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, ValidationError

from tandem.router.config import GatewayConfig
from tandem.router.errors import bad_request
from tandem.router.openai.fields import SharedFields, TokenId, parse_object, refusal, without_unsupported
from tandem.router.openai.logprobs import completion_logprobs
from tandem.router.output import Delta
from tandem.router.plan import Plan, resolve_max_tokens
from tandem.router.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16

# fields of the API that are not served, with the values that ask for nothing
UNSUPPORTED: dict[str, Sequence[Any]] = {
    "best_of": (1,),
    "echo": (False,),
    "logit_bias": ({},),
    "suffix": (),
    "user": (),
}


class CompletionRequest(SharedFields):
    """`prompt`: a text, its token ids, or a list of either."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


def parse(body: bytes) -> CompletionRequest:
    """Raises `ApiError` 400 naming the field."""
    fields = without_unsupported(parse_object(body), UNSUPPORTED)
    try:
        return CompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise refusal(error, fields) from error


def plan(request: CompletionRequest, tokenizer: Tokenizer, config: GatewayConfig) -> Plan:
    """Tokenise, check ids and lengths. Slow for long prompts. Raises `ApiError`."""
    include_usage = request.include_usage()
    given = _as_prompts(request.prompt)
    if len(given) * (request.n or 1) > config.max_num_choices:
        param = "n" if len(given) <= config.max_num_choices else "prompt"
        # before tokenising: a list of a million prompts is refused for what it is
        raise bad_request(f"A request may ask for at most {config.max_num_choices} choices in all.", param=param)
    prompts = tuple(_tokens(prompt, tokenizer) for prompt in given)
    max_tokens = resolve_max_tokens(
        request.max_tokens,
        DEFAULT_MAX_TOKENS,
        longest_prompt=max(len(prompt) for prompt in prompts),
        max_model_len=config.max_model_len,
        param="prompt",
    )
    return Plan(
        prompts=prompts,
        sampling=request.sampling(tokenizer, max_tokens=max_tokens, num_logprobs=request.logprobs),
        num_choices=request.n or 1,
        stop=request.stops(),
        stream=bool(request.stream),
        include_usage=include_usage,
        return_token_ids=bool(request.return_token_ids),
    )


def _as_prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]  # a list that starts with an int holds nothing else
    return prompt


def _tokens(prompt: str | list[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
    if not ids:
        raise bad_request("The prompt must not be empty.", param="prompt")
    largest = max(ids)
    if largest >= tokenizer.vocab_size:
        raise bad_request(
            f"The prompt holds the token id {largest}, but the vocabulary has {tokenizer.vocab_size} ids.",
            param="prompt",
        )
    return tuple(ids)


class CompletionFormat:
    """The shapes of the answer. Chunks and whole answers share one."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, plan: Plan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer

    def opening(self, index: int, prompt: Sequence[int]) -> dict[str, Any] | None:
        """Nothing opens a completion, unless the client wants to see its prompt's tokens."""
        if not self._plan.return_token_ids:
            return None
        empty = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        return {**empty, "token_ids": [], "prompt_token_ids": list(prompt)}

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the chunks for this delta; none if it has nothing to say yet."""
        has_news = delta.text or delta.scored or delta.finish_reason is not None
        if not has_news and not (self._plan.return_token_ids and delta.token_ids):
            return []
        return [self._choice(index, delta)]

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
        }
        if delta.scored:
            choice["logprobs"] = completion_logprobs(self._tokenizer, delta.scored)
        if self._plan.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def choice(self, index: int, total: Delta, prompt: Sequence[int]) -> dict[str, Any]:
        """One whole answer."""
        choice = self._choice(index, total)
        if self._plan.return_token_ids:
            choice["prompt_token_ids"] = list(prompt)
        return choice

    def extras(self) -> Mapping[str, Any]:
        return {}
