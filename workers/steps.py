"""What passes between the engine, its runner and those who listen to them: one step, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from tandem.workers.batch import Batch, SampledToken, StepResult
from tandem.workers.beams import Answer
from tandem.workers.scheduler import Chunk
from tandem.workers.sequence import Sequence
from tandem.workers.types import FinishReason

STEP_FAILED = "the step that computed this request failed"

Collect = Callable[[], SequenceOf[StepResult]]
"""Waits for a step that was launched. One entry per item, in order. To be called once."""


class Runner(Protocol):
    """Executes steps in the order in which they come. Called from one thread at a time, not the event loop's."""

    def execute(self, batch: Batch) -> SequenceOf[StepResult]:
        """One entry per item, in order."""

    def launch(self, batch: Batch) -> Collect:
        """Begin a step, behind those that were launched before. The batch's lists are not read any more once this has
        returned. Items that follow the step launched just before it may be part of it."""


@dataclass(frozen=True, slots=True)
class Step:
    """`batch` is for the runner; `chunks` says, item by item, whose it is. Lists in the batch are the sequences' own:
    they do not change until the step is launched."""

    batch: Batch
    chunks: tuple[Chunk, ...]
    schedule_s: float = 0.0
    overlaps: bool = False
    """It is to be launched and collected, with the next one decided in between where that can be."""
    host_need: str | None = None
    """Why nothing can be decided before its results are known."""

    @property
    def can_be_followed(self) -> bool:
        """Whether the next step may be decided, and launched, while this one is computed."""
        return self.overlaps and self.host_need is None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step did for one sequence. `error`: the step failed and the sequence has ended; say no more to anyone.
    `is_retryable`: another worker may do better.

    `num_computed` tokens of the sequence have KV in `sequence.block_ids`. `token` is None after a chunk that is not the
    last. After a token with neither finish_reason nor error, the sequence goes on (or is HELD, if it has `hold`).
    """

    sequence: Sequence
    num_computed: int
    token: SampledToken | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    is_retryable: bool = True
    answers: tuple[Answer, ...] = ()
    """All of them, when a beam search has ended."""
    embedding: bytes | None = None
    """Of a sequence with `pooling`, which has ended with it (embedding.py)."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step, for metrics. `schedule_s + execute_s + apply_s` is all of it, without the wait for the event loop.
    Where steps overlap, `execute_s` begins when the device has nothing older to do; the other two go on meanwhile."""

    num_sequences: int
    num_tokens: int
    schedule_s: float
    execute_s: float
    apply_s: float
    num_decodes: int = 0
    """Sequences that computed one token."""
    num_attended: int = 0
    """Tokens that the tokens of the other sequences attended to, added up."""

    @classmethod
    def of(cls, step: Step, execute_s: float, apply_s: float) -> StepTimes:
        """Of a step that is over."""
        prompts = [item for item in step.batch.items if len(item.token_ids) > 1]
        return cls(
            *(len(step.chunks), step.batch.num_tokens, step.schedule_s, execute_s, apply_s),
            num_decodes=len(step.chunks) - len(prompts),
            num_attended=sum(item.num_attended for item in prompts),
        )
