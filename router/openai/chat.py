"""POST /v1/chat/completions: what it takes, and what that comes down to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from tandem.router.config import GatewayConfig
from tandem.router.errors import bad_request
from tandem.router.form import Form, Naming
from tandem.router.openai.chat_form import ChatForm
from tandem.router.openai.fields import Label, Metadata, SharedFields
from tandem.router.openai.messages import Message, for_template
from tandem.router.openai.structure import ResponseFormat, format_grammar
from tandem.router.openai.tool_fields import ToolChoice, ToolList, offered
from tandem.router.openai.wire import parse_body, refusal
from tandem.router.plan import Plan, resolve_max_tokens
from tandem.router.prompt import ChatQuestion, read_question
from tandem.router.tokenizer import Tokenizer

UNSUPPORTED: dict[str, Sequence[Any]] = {
    "audio": (),
    "function_call": (),
    "functions": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields of the API, or usual ones, that are not served, with the values that ask for nothing."""


class ChatCompletionRequest(SharedFields):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None
    # what follows changes no answer, by the API's own words
    metadata: Metadata | None = None
    prompt_cache_key: Label | None = None
    """Other things equal, requests with the same one go to the same workers."""
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    safety_identifier: Label | None = None
    service_tier: Literal["auto", "default"] | None = None

    def num_logprobs(self) -> int | None:
        """Alternatives per token; None: no logprobs at all. Raises `ApiError`."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise bad_request("'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")
        return None

    def asked_max_tokens(self) -> int | None:
        """By either of its names. Raises `ApiError` for both."""
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise bad_request(
                "'max_tokens' and 'max_completion_tokens' cannot both be set.", param="max_completion_tokens"
            )
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def structure(self) -> tuple[str | None, str | None]:
        """The grammar of the answer and the field that asks for it."""
        by_format = format_grammar(self.response_format)
        if self.structured_outputs is None:
            return by_format, None if by_format is None else "response_format"
        if by_format is not None:
            raise bad_request(
                "'structured_outputs' and 'response_format' cannot both be set.", param="structured_outputs"
            )
        return self.structured_outputs.to_grammar(), "structured_outputs"

    def question(self, tokenizer: Tokenizer) -> ChatQuestion:
        """Raises `ApiError`."""
        names = frozenset() if tokenizer.template is None else tokenizer.template.names
        grammar, grammar_field = self.structure()
        return ChatQuestion(
            messages=for_template(self.messages, names),
            tools=offered(self.tools, self.tool_choice, self.parallel_tool_calls),
            grammar=grammar,
            grammar_field=grammar_field,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            reasoning_effort=self.reasoning_effort,
            variables=self.chat_template_kwargs or {},
        )

    def plan(self, tokenizer: Tokenizer, config: GatewayConfig) -> Plan:
        """Render, tokenise, check lengths. Slow for long prompts. Raises `ApiError`."""
        num_logprobs, include_usage = self.num_logprobs(), self.include_usage()
        asked = self.asked_max_tokens()
        prompt = read_question(self.question(tokenizer), tokenizer)
        ids = tuple(self.truncated(prompt.token_ids))
        max_tokens = resolve_max_tokens(
            asked, None, longest_prompt=len(ids), max_model_len=config.max_model_len, param="messages"
        )
        return Plan(
            prompts=(ids,),
            sampling=self.sampling(
                tokenizer,
                max_tokens=max_tokens,
                default_seed=config.seed,
                num_logprobs=num_logprobs,
                num_prompt_logprobs=self.prompt_logprobs,
                grammar=prompt.grammar,
            ),
            num_choices=self.n or 1,
            stop=self.stops(),
            stream=bool(self.stream),
            include_usage=include_usage,
            return_token_ids=bool(self.return_token_ids),
            cache_salt=self.cache_salt,
            cache_key=self.prompt_cache_key,
            retention=self.retention(),
            priority=self.priority or 0,
            showing=self.showing(prompt.reading),
            shows_prompt_logprobs=self.prompt_logprobs is not None,
            grammar_field=prompt.grammar_field,
        )

    @staticmethod
    def of(fields: Mapping[str, Any]) -> ChatCompletionRequest:
        """A chat that another API's request comes down to; fields that are None were not given. Raises `ApiError`."""
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            return ChatCompletionRequest(**given)
        except ValidationError as error:
            raise refusal(error, given) from error

    def form(self, plan: Plan, tokenizer: Tokenizer, naming: Naming) -> Form:
        return ChatForm(plan, tokenizer, naming)


def parse(body: bytes) -> ChatCompletionRequest:
    """Raises `ApiError` 400 naming the field."""
    return parse_body(ChatCompletionRequest, body, UNSUPPORTED)
