"""What a request of either endpoint comes down to, once it is validated and tokenised."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from tandem.router.errors import ApiError
from tandem.router.output import PLAIN_SHOWING, Showing
from tandem.workers.types import Choice, Request, Retention, SamplingParams


@dataclass(frozen=True, slots=True)
class Plan:
    """Prompts as tokens, how to continue them, and how to show it."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    num_choices: int = 1
    """Answers per prompt."""
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    """A last chunk with the usage; whole answers always carry it."""
    return_token_ids: bool = False
    showing: Showing = PLAIN_SHOWING
    num_best: int | None = None
    """Of the answers to a prompt only so many are shown: those that are most likely, per token."""
    shows_logprobs: bool = True
    """Those that were asked for; they may have been asked for only to compare answers."""
    echo: tuple[str, ...] = ()
    """The text of each prompt, where it stands at the start of its answers."""
    only_prompt: bool = False
    """The client wants to see the prompt's tokens and no answer; workers always write at least one token."""
    shows_prompt_logprobs: bool = False
    """As a list of their own."""
    grammar_field: str | None = None
    """The field that `sampling.grammar` was made from."""
    cache_salt: str | None = None
    """Sets these prompts' cached blocks apart from the tenant's others."""
    priority: int = 0
    cache_key: str | None = None
    """Requests with the same one prefer the same workers."""
    retention: Retention = field(default_factory=Retention)

    @property
    def scores_prompts(self) -> bool:
        """Whether answers begin with the logprobs of their prompts, which are known only once these were read."""
        return self.sampling.num_prompt_logprobs is not None

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.num_choices

    def requests(self, request_id: str, salt: str = "") -> list[Request]:
        """One per prompt, for the workers. The seed is shared: equal prompts with a seed get equal answers. `salt`: of
        the tenant and this plan's `cache_salt` together."""
        choices = tuple(Choice(index=index) for index in range(self.num_choices))
        return [
            Request(
                request_id=f"{request_id}-{position}" if len(self.prompts) > 1 else request_id,
                prompt_token_ids=prompt,
                sampling=self.sampling,
                choices=choices,
                salt=salt,
                retention=self.retention,
                priority=self.priority,
            )
            for position, prompt in enumerate(self.prompts)
        ]


def resolve_seed(asked: int | None, default: int | None) -> int:
    """Non-negative, 63 bits; drawn where neither is given, so that a continued answer can go on with it."""
    seed = default if asked is None else asked
    return secrets.randbits(63) if seed is None else seed % (1 << 63)


def resolve_max_tokens(
    asked: int | None, default: int | None, *, longest_prompt: int, max_model_len: int, param: str
) -> int:
    """The room for an answer. Raises `ApiError` context_length_exceeded, in the words that clients know.

    `default`: taken when nothing was asked, and cut to the room; None means all the room there is.
    """
    room = max_model_len - longest_prompt
    limit = f"This model's maximum context length is {max_model_len} tokens."
    if room < 1:
        raise ApiError(
            400,
            f"{limit} However, your {param} resulted in {longest_prompt} tokens, which leaves no room for an answer. "
            f"Please reduce the length of the {param}.",
            param=param,
            code="context_length_exceeded",
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise ApiError(
            400,
            f"{limit} However, you requested {longest_prompt + asked} tokens ({longest_prompt} in the {param}, {asked} "
            f"in the completion). Please reduce the length of the {param} or completion.",
            param=param,
            code="context_length_exceeded",
        )
    return asked
