"""One step, as the scheduler decides it and the runner executes it: plain lists, no tensors.

Tensors are made from it in one place, `model_runner.py`, so that host-to-device copies live in one file.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from tandem.workers.constraint import Constraint
from tandem.workers.embedding import Rows
from tandem.workers.pooling import PoolingMode
from tandem.workers.types import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Sample the token that follows an item's last token.

    `position` is the index that the new token will have in its sequence (prompt included): the random number is a
    function of (params.seed, choice, position). Penalties read `token_ids`, of which `num_prompt_tokens` are prompt;
    where the item follows another step, its own token comes behind them.
    """

    params: SamplingParams
    choice: int
    position: int
    token_ids: SequenceOf[int]
    num_prompt_tokens: int
    constraint: Constraint | None = None
    """The parameters' biases, bans and grammar; needed if they have any."""


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """Say how likely the model finds `targets`: each behind the item's token at the same place and all before it."""

    targets: SequenceOf[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Hidden states of an item's tokens: the first's, the last's, or (for a mean) sums of `run_len` at a time."""

    mode: PoolingMode
    run_len: int


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One sequence's part of a step: compute `token_ids`, whose first has position `start`.

    `block_ids` are the sequence's blocks from position 0, enough for `start + len(token_ids)` tokens; the KV of all
    tokens before `start` is already in them. `sample` is None for a prefill chunk that is not the last.
    """

    token_ids: SequenceOf[int]
    start: int
    block_ids: SequenceOf[int]
    sample: SampleSpec | None
    score: ScoreSpec | None = None
    pool: PoolSpec | None = None
    follows: int | None = None
    """Its one token is what the step launched just before samples in this row (of those that it samples); `token_ids`
    holds a 0 in its place. Nobody but the device may know it yet."""

    @property
    def num_attended(self) -> int:
        """Tokens that its own attend to, added up: each to all before it and to itself."""
        num_tokens = len(self.token_ids)
        return num_tokens * self.start + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The KV of the first `num_tokens` of `source` is to be in `destination`, too. What comes behind them there is
    written before it is read."""

    source: int
    destination: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """`copies` are made before anything is computed; no block is the source of one and the destination of another."""

    items: tuple[BatchItem, ...]
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What was chosen, and if it was asked for how likely that was."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """In a token's place: this sequence cannot go on. No other worker could go on with it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Later:
    """In a token's place: what may follow is not known yet. Compute the item's last token again in the next step."""


LATER = Later()


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """What came of an item with a `pool`: rows to be added up, in order."""

    rows: Rows


@dataclass(frozen=True, slots=True)
class Scored:
    """What came of an item with a `score`: one entry per target, and the token, if one was to be sampled."""

    logprobs: SequenceOf[TokenLogprobs]
    token: SampledToken | Refusal | Later | None


StepResult = SampledToken | Refusal | Later | Scored | Pooled | None
"""What came of one item; None where nothing was to be sampled, scored or pooled."""
