"""What a step's results do to its sequences: tokens are appended, ends noticed, beams moved on, embeddings made."""

from __future__ import annotations

import time
from collections.abc import Callable

from tandem.workers.batch import Later, Pooled, Refusal, SampledToken, Scored, StepResult
from tandem.workers.beams import Answer
from tandem.workers.embedding import add_rows, unit_vector
from tandem.workers.scheduler import Chunk, Scheduler
from tandem.workers.sequence import BeamGroup, Sequence, Status
from tandem.workers.steps import STEP_FAILED, StepOutput
from tandem.workers.types import FinishReason


class Outcomes:
    """Of one engine. `finish` ends a sequence and forgets it."""

    def __init__(self, scheduler: Scheduler, max_model_len: int, finish: Callable[[Sequence], None]) -> None:
        self._scheduler = scheduler
        self._max_model_len = max_model_len
        self._finish = finish

    def fail(self, sequence: Sequence) -> StepOutput:
        """The step that it was part of failed."""
        output = StepOutput(sequence, sequence.num_computed, error=STEP_FAILED)
        self._finish(sequence)
        return output

    def take(self, chunk: Chunk, result: StepResult) -> StepOutput:
        """A chunk is computed, and this came of it. Its sequence has not ended."""
        sequence, num_tokens = chunk.sequence, chunk.num_tokens
        if isinstance(result, Scored):
            sequence.prompt_logprobs += result.logprobs
            result = result.token
        if isinstance(result, Later):  # its last token stays uncomputed: the next step takes it once more
            assert not sequence.in_flight, "a step follows a token that is not known yet"
            num_tokens, result = num_tokens - 1, None
        self._scheduler.advance(sequence, num_tokens)
        if isinstance(result, Refusal):
            return self._refuse(sequence, result.reason)
        if sequence.pooling is not None:
            return self._pool(sequence, result)
        assert not isinstance(result, Pooled), "nobody wants an embedding of it"
        return StepOutput(sequence, sequence.num_computed) if result is None else self.take_token(sequence, result)

    def take_token(self, sequence: Sequence, token: SampledToken) -> StepOutput:
        """Append a sampled token, and see whether it was the last."""
        num_computed = sequence.num_computed
        if sequence.beams is not None:
            return StepOutput(sequence, num_computed, answers=self._search_on(sequence.beams, sequence.choice, token))
        sequence.token_ids.append(token.token_id)
        if sequence.first_token_at is None:
            sequence.first_token_at = time.monotonic()
        finish_reason = self._finish_reason(sequence)
        if sequence.hold:
            self._scheduler.remove(sequence, Status.HELD)
        elif finish_reason is not None:
            self._finish(sequence)
        return StepOutput(sequence, num_computed, token, finish_reason)

    # Inside

    def _refuse(self, sequence: Sequence, reason: str) -> StepOutput:
        """It cannot go on, here or elsewhere."""
        output = StepOutput(sequence, sequence.num_computed, error=reason, is_retryable=False)
        self._finish(sequence)
        return output

    def _pool(self, sequence: Sequence, result: StepResult) -> StepOutput:
        """Take what a chunk gave; with the last one the embedding is complete, and the sequence ends."""
        if isinstance(result, Pooled):
            sequence.pooled = add_rows(sequence.pooled, result.rows)
        if not sequence.is_prompt_computed:
            return StepOutput(sequence, sequence.num_computed)
        assert sequence.pooled is not None, "computed, and nothing pooled"
        embedding = unit_vector(sequence.pooled)
        if embedding is None:
            return self._refuse(sequence, "the model's hidden states are no finite numbers")
        self._finish(sequence)
        return StepOutput(sequence, sequence.num_computed, embedding=embedding)

    def _search_on(self, beams: BeamGroup, beam: int, token: SampledToken) -> tuple[Answer, ...]:
        """A beam's continuations are known. If they were the last, all beams go on, or the search ends."""
        assert token.logprobs is not None, "a beam is sampled with its continuations"
        if not beams.search.take(beam, token.logprobs):
            return ()
        forks = beams.search.advance()
        if forks:
            self._scheduler.fork(beams.sequences, forks)
            return ()
        for sequence in beams.sequences:
            self._finish(sequence)
        return beams.search.answers(beams.choices)

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        if sequence.token_ids[-1] in sequence.params.stop_token_ids:
            return "stop"
        constraint = sequence.constraint
        if constraint is not None and constraint.is_complete(sequence.token_ids, sequence.num_prompt_tokens):
            return "stop"
        is_full = len(sequence.token_ids) >= self._max_model_len
        return "length" if is_full or sequence.num_generated >= sequence.params.max_tokens else None
