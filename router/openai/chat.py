"""POST /v1/chat/completions: what it takes, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from tandem.router.config import GatewayConfig
from tandem.router.errors import bad_request
from tandem.router.openai.fields import SharedFields, WireModel, parse_object, refusal, without_unsupported
from tandem.router.openai.logprobs import chat_logprobs
from tandem.router.output import Delta
from tandem.router.plan import Plan, resolve_max_tokens
from tandem.router.tokenizer import Tokenizer

# fields of the API that are not served, with the values that ask for nothing
UNSUPPORTED: dict[str, Sequence[Any]] = {
    "audio": (),
    "function_call": (),
    "functions": (),
    "logit_bias": ({},),
    "metadata": (),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": (),
    "store": (False,),
    "tool_choice": (),
    "tools": (),
    "user": (),
    "verbosity": (),
    "web_search_options": (),
}


class TextPart(WireModel):
    type: Literal["text"]
    text: str


class Message(WireModel):
    """One message. Fields for tools and media may be null, as they are in answers that clients send back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: None = None
    refusal: None = None
    tool_calls: None = None
    tool_call_id: None = None
    function_call: None = None
    audio: None = None
    annotations: None = None

    def for_template(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        # "developer" is the newer name of the same thing, and templates know the older one
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatCompletionRequest(SharedFields):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def num_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs is not None:
            raise bad_request("'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")
        return None

    def asked_max_tokens(self) -> int | None:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise bad_request(
                "'max_tokens' and 'max_completion_tokens' cannot both be set.", param="max_completion_tokens"
            )
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def parse(body: bytes) -> ChatCompletionRequest:
    """Raises `ApiError` 400 naming the field."""
    fields = without_unsupported(parse_object(body), UNSUPPORTED)
    try:
        return ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise refusal(error, fields) from error


def plan(request: ChatCompletionRequest, tokenizer: Tokenizer, config: GatewayConfig) -> Plan:
    """Render, tokenise, check lengths. Slow for long prompts. Raises `ApiError`, `RequestError`."""
    num_logprobs, include_usage = request.num_logprobs(), request.include_usage()
    asked = request.asked_max_tokens()
    text = tokenizer.render_chat([message.for_template() for message in request.messages])
    prompt = tuple(tokenizer.encode(text, add_special_tokens=False))
    if not prompt:
        raise bad_request("The messages make an empty prompt.", param="messages")
    max_tokens = resolve_max_tokens(
        asked, None, longest_prompt=len(prompt), max_model_len=config.max_model_len, param="messages"
    )
    return Plan(
        prompts=(prompt,),
        sampling=request.sampling(tokenizer, max_tokens=max_tokens, num_logprobs=num_logprobs),
        num_choices=request.n or 1,
        stop=request.stops(),
        stream=bool(request.stream),
        include_usage=include_usage,
        return_token_ids=bool(request.return_token_ids),
    )


class ChatFormat:
    """The shapes of the answer."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, plan: Plan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer

    def opening(self, index: int, prompt: Sequence[int]) -> dict[str, Any] | None:
        """The first chunk's choice: it carries the role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the chunks for this delta; none if it has nothing to say yet."""
        chunks: list[dict[str, Any]] = []
        if delta.text or delta.scored or (self._plan.return_token_ids and delta.token_ids):
            chunks.append(self._chunk(index, {"content": delta.text}, delta, None))
        if delta.finish_reason is not None:
            chunks.append(self._chunk(index, {}, Delta(), delta.finish_reason))
        return chunks

    def _chunk(self, index: int, content: dict[str, str], delta: Delta, finish_reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": content, "logprobs": None, "finish_reason": finish_reason}
        if delta.scored:
            choice["logprobs"] = chat_logprobs(self._tokenizer, delta.scored)
        if self._plan.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def choice(self, index: int, total: Delta, prompt: Sequence[int]) -> dict[str, Any]:
        """One whole answer."""
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": total.text, "refusal": None},
            "logprobs": None,
            "finish_reason": total.finish_reason,
        }
        if self._plan.sampling.num_logprobs is not None:
            choice["logprobs"] = chat_logprobs(self._tokenizer, total.scored)
        if self._plan.return_token_ids:
            choice["token_ids"] = total.token_ids
        return choice

    def extras(self) -> Mapping[str, Any]:
        """Top-level fields of a whole answer, and of the first chunks of a stream."""
        return {"prompt_token_ids": list(self._plan.prompts[0])} if self._plan.return_token_ids else {}
