"""The fields that chat and completions share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.router.errors import bad_request
from tandem.router.openai.structure import StructuredOutputs
from tandem.router.openai.wire import WireModel
from tandem.router.output import Showing
from tandem.router.parsers.select import PLAIN_READING, Reading
from tandem.router.plan import resolve_seed
from tandem.router.tokenizer import Tokenizer
from tandem.workers.types import MAX_PRIORITY, Retention, SamplingParams

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
MAX_STOP_CHARACTERS = 256
MAX_BIASED_TOKENS = 1024
MAX_TOKENS_PER_BAD_WORD = 32
SMALLEST_TOP_P = 1e-9
"""`top_p: 0` is allowed by the API and keeps the one most likely token."""

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0)]
Label = Annotated[str, Field(max_length=512)]
"""Of the client's own: it changes no answer."""
Priority = Annotated[int, Field(ge=0, le=MAX_PRIORITY)]
"""0 comes first, and whoever says nothing has it: clients may step back, nobody pushes ahead of the others."""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class StreamOptions(WireModel):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class KVRetention(WireModel):
    """How long the prompt's cached blocks are worth keeping: see `types.Retention`. `duration` in seconds."""

    priority: Annotated[int, Field(ge=0, le=100)] | None = None
    duration: Annotated[float, Field(gt=0)] | None = None

    def retention(self) -> Retention:
        default = Retention()
        return Retention(
            priority=default.priority if self.priority is None else self.priority, duration_s=self.duration
        )


class SharedFields(WireModel):
    """Fields of both endpoints; None means that the client left the choice to us."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None
    """0 and -1 keep every token."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(max_length=10)], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASED_TOKENS),
        ]
        | None
    ) = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=1 << 18)] | None = None
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]], Field(max_length=128)]
        | None
    ) = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    beam_width: Annotated[int, Field(ge=1, le=64)] | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    priority: Priority | None = None
    user: Label | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    kv_retention: KVRetention | None = None

    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def include_usage(self) -> bool:
        """Raises `ApiError` when options for a stream come without one."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def retention(self) -> Retention:
        return Retention() if self.kv_retention is None else self.kv_retention.retention()

    def _beams(self) -> dict[str, Any]:
        """What a beam search is asked for. Raises `ApiError` for its fields without one."""
        if self.beam_width is None:
            for field in ("length_penalty", "early_stopping"):
                if getattr(self, field) is not None:
                    raise bad_request(f"'{field}' is only allowed with 'beam_width'.", param=field)
            return {}
        if (self.n or 1) > self.beam_width:
            raise bad_request("'n' must be at most 'beam_width'.", param="n")
        return {
            "beam_width": self.beam_width,
            "length_penalty": 1.0 if self.length_penalty is None else self.length_penalty,
            "early_stopping": self.early_stopping or False,
        }

    def showing(self, reading: Reading = PLAIN_READING) -> Showing:
        return Showing(
            includes_stop=bool(self.include_stop_str_in_output),
            shows_special=self.skip_special_tokens is False,
            reading=reading,
        )

    def truncated(self, prompt: list[int]) -> list[int]:
        """The prompt, or as much of its end as the client wants to keep."""
        return prompt if self.truncate_prompt_tokens is None else prompt[-self.truncate_prompt_tokens :]

    def sampling(
        self,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        default_seed: int | None,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None = None,
        grammar: str | None = None,
    ) -> SamplingParams:
        """Raises `ApiError` for ids outside the vocabulary, and for fields that contradict each other."""
        stop_token_ids = set(self._known_ids("stop_token_ids", tokenizer))
        if not self.ignore_eos:
            stop_token_ids.update(tokenizer.eos_token_ids)
        allowed = None if self.allowed_token_ids is None else self._known_ids("allowed_token_ids", tokenizer)
        min_tokens = self.min_tokens or 0
        if min_tokens > max_tokens:
            raise bad_request(f"'min_tokens' exceeds the {max_tokens} tokens of the answer.", param="min_tokens")
        return SamplingParams(
            max_tokens=max_tokens,
            seed=resolve_seed(self.seed, default_seed),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else max(self.top_p, SMALLEST_TOP_P),
            top_k=min(max(self.top_k or 0, 0), tokenizer.vocab_size),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            num_logprobs=num_logprobs,
            stop_token_ids=tuple(sorted(stop_token_ids)),
            min_tokens=min_tokens,
            logit_bias=self._biases(tokenizer),
            allowed_token_ids=None if allowed is None else tuple(sorted(set(allowed))),
            bad_token_ids=self._bad_token_ids(tokenizer),
            grammar=grammar,
            num_prompt_logprobs=num_prompt_logprobs,
            **self._beams(),
        )

    def _known_ids(self, field: str, tokenizer: Tokenizer) -> list[int]:
        ids: list[int] = getattr(self, field) or []
        if ids and max(ids) >= tokenizer.vocab_size:
            raise bad_request(f"'{field}' holds an id outside the vocabulary.", param=field)
        return ids

    def _biases(self, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
        biases: dict[int, float] = {}
        for key, bias in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdigit()) or int(key) >= tokenizer.vocab_size:
                raise bad_request(
                    f"The keys of 'logit_bias' are token ids from 0 to {tokenizer.vocab_size - 1}.", param="logit_bias"
                )
            biases[int(key)] = bias
        return tuple(sorted(biases.items()))

    def _bad_token_ids(self, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
        """A word is other tokens at the start of a text than behind a space: both are banned."""
        sequences = {
            tuple(tokenizer.encode_plain(form, add_special_tokens=False))
            for word in self.bad_words or ()
            for form in (word, " " + word.lstrip())
        }
        sequences.discard(())
        if any(len(sequence) > MAX_TOKENS_PER_BAD_WORD for sequence in sequences):
            raise bad_request(f"'bad_words' may have at most {MAX_TOKENS_PER_BAD_WORD} tokens each.", param="bad_words")
        return tuple(sorted(sequences))
