"""POST /tokenize and /detokenize: text to token ids and back, as the other endpoints do it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from tandem.router.config import GatewayConfig
from tandem.router.errors import bad_request
from tandem.router.openai.fields import TokenId
from tandem.router.openai.messages import Message, for_template
from tandem.router.openai.tool_fields import ToolList, offered
from tandem.router.openai.wire import WireModel, parse_body
from tandem.router.prompt import ChatQuestion, read_question
from tandem.router.tokenizer import Tokenizer


class TokenizeRequest(WireModel):
    """Either a `prompt`, as completions take it, or the `messages` of a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    tools: ToolList | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None
    return_token_strs: bool | None = None

    def answer(self, tokenizer: Tokenizer, config: GatewayConfig) -> Mapping[str, Any]:
        ids = self._ids(tokenizer)
        strings = [tokenizer.text_of([token_id]) for token_id in ids] if self.return_token_strs else None
        return {"count": len(ids), "max_model_len": config.max_model_len, "tokens": ids, "token_strs": strings}

    def _ids(self, tokenizer: Tokenizer) -> list[int]:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("Exactly one of 'prompt' and 'messages' must be given.", param="prompt")
        if self.messages is None:
            assert self.prompt is not None
            return tokenizer.encode_plain(self.prompt, add_special_tokens=self.add_special_tokens is not False)
        names = frozenset() if tokenizer.template is None else tokenizer.template.names
        question = ChatQuestion(
            messages=for_template(self.messages, names),
            tools=offered(self.tools, None, None),
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            variables=self.chat_template_kwargs or {},
        )
        return read_question(question, tokenizer).token_ids


class DetokenizeRequest(WireModel):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]

    def answer(self, tokenizer: Tokenizer, config: GatewayConfig) -> Mapping[str, Any]:
        if self.tokens and max(self.tokens) >= tokenizer.vocab_size:
            raise bad_request("'tokens' holds an id outside the vocabulary.", param="tokens")
        return {"prompt": tokenizer.text_of(self.tokens)}


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Raises `ApiError` 400 naming the field."""
    return parse_body(TokenizeRequest, body)


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Raises `ApiError` 400 naming the field."""
    return parse_body(DetokenizeRequest, body)
