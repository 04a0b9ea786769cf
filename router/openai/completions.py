"""POST /v1/completions: what it takes, and what that comes down to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field

from tandem.router.config import GatewayConfig
from tandem.router.errors import bad_request
from tandem.router.form import Form, Naming
from tandem.router.openai.completion_form import CompletionForm
from tandem.router.openai.fields import SharedFields, TokenId
from tandem.router.openai.wire import parse_body
from tandem.router.plan import Plan, resolve_max_tokens
from tandem.router.tokenizer import Tokenizer
from tandem.workers.types import SamplingParams

DEFAULT_MAX_TOKENS = 16

UNSUPPORTED: dict[str, Sequence[Any]] = {
    "suffix": ("",),
}
"""Fields of the API, or usual ones, that are not served, with the values that ask for nothing."""


class CompletionRequest(SharedFields):
    """`prompt`: a text, its token ids, or a list of either."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0 with `echo`: to see the prompt alone."""
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None

    def plan(self, tokenizer: Tokenizer, config: GatewayConfig) -> Plan:
        """Tokenise, check ids and lengths. Slow for long prompts. Raises `ApiError`."""
        include_usage = self.include_usage()
        num_answers = self._num_answers()
        given = _as_prompts(self.prompt)
        if len(given) * num_answers > config.max_num_choices:
            param = "n" if len(given) <= config.max_num_choices else "prompt"
            # before tokenising: a list of a million prompts is refused for what it is
            raise bad_request(f"A request may ask for at most {config.max_num_choices} choices in all.", param=param)
        prompts = tuple(tuple(self.truncated(_tokens(prompt, tokenizer))) for prompt in given)
        only_prompt = self._wants_only_prompt()
        max_tokens = resolve_max_tokens(
            1 if only_prompt else self.max_tokens,
            DEFAULT_MAX_TOKENS,
            longest_prompt=max(len(prompt) for prompt in prompts),
            max_model_len=config.max_model_len,
            param="prompt",
        )
        grammar = None if self.structured_outputs is None else self.structured_outputs.to_grammar()
        return Plan(
            prompts=prompts,
            sampling=self._scored(
                self.sampling(
                    tokenizer,
                    max_tokens=max_tokens,
                    default_seed=config.seed,
                    num_logprobs=self.logprobs,
                    num_prompt_logprobs=self.num_prompt_logprobs(),
                    grammar=grammar,
                )
            ),
            num_choices=num_answers,
            num_best=self.n or 1,
            stop=self.stops(),
            stream=bool(self.stream),
            include_usage=include_usage,
            shows_logprobs=self.logprobs is not None,
            shows_prompt_logprobs=self.prompt_logprobs is not None,
            only_prompt=only_prompt,
            return_token_ids=bool(self.return_token_ids),
            cache_salt=self.cache_salt,
            retention=self.retention(),
            priority=self.priority or 0,
            showing=self.showing(),
            echo=self._echo(given, prompts, tokenizer),
            grammar_field=None if grammar is None else "structured_outputs",
        )

    def form(self, plan: Plan, tokenizer: Tokenizer, naming: Naming) -> Form:
        return CompletionForm(plan, tokenizer, naming)

    def num_prompt_logprobs(self) -> int | None:
        """An echoed prompt is scored like the answer."""
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)

    def _wants_only_prompt(self) -> bool:
        if self.max_tokens != 0:
            return False
        if not self.echo or self.stream:
            raise bad_request("'max_tokens' may be 0 with 'echo', and not in a stream.", param="max_tokens")
        return True

    def _num_answers(self) -> int:
        """How many are written for each prompt; the best `n` of them are shown."""
        wanted, best_of = self.n or 1, self.best_of
        if best_of is None or best_of == wanted:
            return wanted
        if best_of < wanted:
            raise bad_request("'best_of' must be at least 'n'.", param="best_of")
        if self.stream:
            raise bad_request("The best of several answers cannot be streamed.", param="best_of")
        return best_of

    def _scored(self, sampling: SamplingParams) -> SamplingParams:
        """The best are found by their logprobs, whether the client wants to see these or not."""
        is_compared = self._num_answers() > (self.n or 1)
        if is_compared and sampling.num_logprobs is None:
            return msgspec.structs.replace(sampling, num_logprobs=0)
        return sampling

    def _echo(
        self, given: Sequence[str | list[int]], prompts: Sequence[tuple[int, ...]], tokenizer: Tokenizer
    ) -> tuple[str, ...]:
        if not self.echo:
            return ()
        return tuple(
            prompt if isinstance(prompt, str) and self.truncate_prompt_tokens is None else tokenizer.text_of(ids)
            for prompt, ids in zip(given, prompts, strict=True)
        )


def parse(body: bytes) -> CompletionRequest:
    """Raises `ApiError` 400 naming the field."""
    return parse_body(CompletionRequest, body, UNSUPPORTED)


def _as_prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]  # a list that starts with an int holds nothing else
    return prompt


def _tokens(prompt: str | list[int], tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode_plain(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
    if not ids:
        raise bad_request("The prompt must not be empty.", param="prompt")
    largest = max(ids)
    if largest >= tokenizer.vocab_size:
        raise bad_request(
            f"The prompt holds the token id {largest}, but the vocabulary has {tokenizer.vocab_size} ids.",
            param="prompt",
        )
    return ids
