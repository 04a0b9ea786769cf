"""The shapes of a text completion. Chunks and whole answers share one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tandem.router.errors import ApiError
from tandem.router.form import Naming, Usage
from tandem.router.openai import sse
from tandem.router.openai.logprobs import EchoedLogprobs, completion_logprobs, prompt_logprobs
from tandem.router.output import Answer, Delta
from tandem.router.plan import Plan
from tandem.router.tokenizer import Tokenizer
from tandem.workers.types import TokenLogprobs


class CompletionForm:
    """See `form.Form`."""

    is_pure = True

    def __init__(self, plan: Plan, tokenizer: Tokenizer, naming: Naming) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._envelope = {
            "id": f"cmpl-{naming.unique_id}",
            "object": "text_completion",
            "created": naming.created,
            "model": naming.model,
        }
        self._writer = sse.ChunkWriter(self._envelope, shows_usage=plan.include_usage)
        self._unopened = set(range(plan.num_sequences)) if plan.scores_prompts else set()
        """Choices whose first chunk waits for the logprobs of their prompt."""
        self._echoed_logprobs: dict[int, EchoedLogprobs] = {}
        self._prompt_logprobs: dict[int, msgspec.Raw] = {}
        """Both by prompt, where they are shown."""
        self._text_chunks: Sequence[Callable[[str], bytes]] | None = None
        """By choice; made when the first is asked for."""

    def take_prompt(self, position: int, scored: Sequence[TokenLogprobs]) -> None:
        plan, prompt = self._plan, self._plan.prompts[position]
        if plan.echo and plan.shows_logprobs:
            self._echoed_logprobs[position] = EchoedLogprobs(self._tokenizer, prompt, scored)
        if plan.shows_prompt_logprobs:
            self._prompt_logprobs[position] = prompt_logprobs(self._tokenizer, prompt, scored)

    def begin(self) -> bytes:
        """Nothing opens a completion, unless the client wants to see its prompt."""
        if self._unopened or (not self._plan.return_token_ids and not self._plan.echo):
            return b""
        return b"".join([self._opening(index, {}) for index in range(self._plan.num_sequences)])

    def _opening(self, index: int, scored: dict[str, Any]) -> bytes:
        choice = self._choice(index, Delta(text=self._echoed(index)))
        return self._writer.chunk(choice | self._prompt(index) | scored)

    def _scored_opening(self, index: int) -> bytes:
        self._unopened.discard(index)
        position = index // self._plan.num_choices
        scored: dict[str, Any] = {}
        if position in self._echoed_logprobs:
            nothing = completion_logprobs(self._tokenizer, [])
            scored["logprobs"] = self._echoed_logprobs[position].before(nothing)
        if position in self._prompt_logprobs:
            scored["prompt_logprobs"] = self._prompt_logprobs[position]
        return self._opening(index, scored)

    def show(self, index: int, answer: Answer, delta: Delta) -> bytes:
        if index in self._unopened:
            return self._scored_opening(index) + self.show(index, answer, delta)
        has_news = delta.text or delta.scored or delta.finish_reason is not None
        if not has_news and not (self._plan.return_token_ids and delta.token_ids):
            return b""
        return self._writer.chunk(self._choice(index, delta))

    def show_text(self, index: int, text: str) -> bytes:
        if not text:
            return b""
        if self._text_chunks is None:
            choices = [self._choice(number, Delta(text=sse.TEXT)) for number in range(self._plan.num_sequences)]
            self._text_chunks = [self._writer.text_chunk(choice) for choice in choices]
        return self._text_chunks[index](text)

    def end(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        last = self._writer.usage(usage.for_openai()) if self._plan.include_usage else b""
        return last + sse.DONE

    def fail(self, error: ApiError) -> bytes:
        return sse.error(error)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Mapping[str, Any]:
        choices: list[dict[str, Any]] = []
        for position in range(len(self._plan.prompts)):
            start = position * self._plan.num_choices
            for answer in self._best(answers[start : start + self._plan.num_choices]):
                choices.append(self._whole_choice(len(choices), answer, position))
        return {**self._envelope, "choices": choices, "usage": usage.for_openai()}

    def _whole_choice(self, index: int, answer: Answer, position: int) -> dict[str, Any]:
        plan = self._plan
        first = position * plan.num_choices
        choice = self._choice(index, Delta(finish_reason="length") if plan.only_prompt else answer.total)
        choice["text"] = self._echoed(first) + choice["text"]
        if position in self._echoed_logprobs:
            written = completion_logprobs(self._tokenizer, [] if plan.only_prompt else answer.total.scored)
            choice["logprobs"] = self._echoed_logprobs[position].before(written)
        if position in self._prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs[position]
        return choice | self._prompt(first)

    def _best(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Those with the highest logprob per token; equals in their order."""
        num_best = self._plan.num_best or len(answers)
        return answers if num_best == len(answers) else sorted(answers, key=_mean_logprob, reverse=True)[:num_best]

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
        }
        if delta.scored and self._plan.shows_logprobs:
            echoed = self._echoed_logprobs.get(index // self._plan.num_choices)
            start = 0 if echoed is None else echoed.text_len
            choice["logprobs"] = completion_logprobs(self._tokenizer, delta.scored, start)
        if self._plan.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _echoed(self, index: int) -> str:
        return self._plan.echo[index // self._plan.num_choices] if self._plan.echo else ""

    def _prompt(self, index: int) -> dict[str, Any]:
        prompt = self._plan.prompts[index // self._plan.num_choices]
        return {"prompt_token_ids": list(prompt)} if self._plan.return_token_ids else {}


def _mean_logprob(answer: Answer) -> float:
    scored = answer.total.scored
    return sum(token.logprobs.logprob for token in scored) / max(1, len(scored))
