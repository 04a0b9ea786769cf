"""The engine's view of one choice of a request: its tokens, its blocks, and where it stands.

The life of a sequence (every arrow is an edge with a time stamp in `Sequence`, which is also the metric):

    add ──> BLOCKED ──leader has computed the prompt──> WAITING ──admitted──> RUNNING ──stop, length, error──> FINISHED
            (siblings of the first choice)

    RUNNING ──preempted──> WAITING
    RUNNING ──prompt computed, `hold`──> HELD ──release──> FINISHED                     (prefill worker)
    WAITING ──admitted, a fill follows──> INCOMING ──finished or abandoned──> RUNNING

A *fill* brings KV that was computed before or elsewhere: from lower tiers of this worker, then from a peer that holds
the beginning of the prompt; on a decode worker (`wants_remote`) a handover brings all that is left.

Cancel leads from every state to FINISHED. Two kinds of sequence still own blocks after that, while somebody may still
write into them: one whose step is in flight (until `apply`), and one that was INCOMING (until the handover says so).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from tandem.workers.batch import BlockCopy
from tandem.workers.beams import BeamSearch
from tandem.workers.constraint import Constraint
from tandem.workers.embedding import Rows
from tandem.workers.pooling import PoolingMode
from tandem.workers.types import PRIORITY_S, CachedTokens, Request, Retention, SamplingParams, TokenLogprobs


class Status(Enum):
    BLOCKED = auto()
    """Waits for the first choice of its request to compute the prompt that they share."""
    WAITING = auto()
    """Owns no blocks; in the queue."""
    RUNNING = auto()
    """Owns blocks for all its tokens; part of the next steps."""
    INCOMING = auto()
    """Owns blocks for all its tokens, which a fill is filling."""
    HELD = auto()
    """Prompt computed, first token sampled; owns its blocks until `Engine.release`."""
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The beams of one request, by number: RUNNING or WAITING those that are live, BLOCKED the others. A beam that has
    told its continuations waits for the rest with all its tokens computed."""

    search: BeamSearch
    choices: tuple[int, ...]
    """What the request calls the answers, best first."""
    sequences: list[Sequence] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice. Identity is the object: two sequences are never equal. Changed by the engine alone, read by all.

    `token_ids` is prompt + emitted (continued request) + generated. The first `num_computed` of them have KV in
    `block_ids`. `block_keys` are the keys of its first full blocks, as far as anyone has needed them; the first
    `num_registered` of its blocks are in the prefix cache.
    """

    request_id: str
    choice: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    root: bytes
    """`block_key.root_key` of its model and salt."""
    order: int
    """Arrival: the lower, the older. Survives preemption."""
    wants_remote: bool = False
    hold: bool = False
    retention: Retention = field(default_factory=Retention)
    priority: int = 0
    constraint: Constraint | None = None
    """The biases, bans and grammar of `params`, where there are any."""
    beams: BeamGroup | None = None
    """The search that it is a beam of. Its choice is its number there."""
    scores_prompt: bool = False
    """The logprobs of the prompt's tokens are wanted of it."""
    pooling: PoolingMode | None = None
    """An embedding of its tokens is wanted of it, and no token: it ends when they are computed."""
    num_source_blocks: int = 0
    """First blocks of the prompt that a peer is said to hold."""

    status: Status = Status.WAITING
    num_computed: int = 0
    num_admissions: int = 0
    num_pool_blocks: int = 0
    """First blocks that were here when it was admitted. Set at each admission, like the next one."""
    num_tier_blocks: int = 0
    """Blocks behind these that lower tiers of this worker hold."""
    cached: CachedTokens = field(default_factory=CachedTokens)
    """Prompt tokens whose KV this worker did not have to compute for it."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """If it `scores_prompt`: of the prompt's tokens from the second on, as far as they were computed."""
    pooled: Rows | None = None
    """With `pooling`: what was pooled so far, [1, hidden]."""
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    can_register: bool = True
    in_flight: int = 0
    """Steps that it is part of now. They read and write its blocks, which must not be freed."""
    num_launched: int = 0
    """Tokens behind the first `num_computed` whose KV these steps compute ..."""
    num_pending: int = 0
    """... and tokens behind `token_ids` that they sample: known when they are applied."""
    siblings: list[Sequence] = field(default_factory=list)
    """On the first choice of a request: those that are BLOCKED until it has computed the prompt."""
    leader: Sequence | None = None
    """The first choice: while it lives, it has the prompt in its blocks."""
    replaced: list[int] = field(default_factory=list)
    """Blocks that others took the places of while a step in flight still uses them: owned until that has ended."""
    copy: BlockCopy | None = None
    """Due with its next chunk, or part of the step in flight. The sequence owns the source, too; `num_computed` counts
    the copied tokens."""

    queued_at: float = 0.0
    admitted_at: float | None = None
    """First admission (`time.monotonic`, like all of these)."""
    joined_at: float | None = None
    """A handover ended and the sequence joined the batch."""
    first_token_at: float | None = None
    """First token that this worker added."""
    finished_at: float | None = None

    @property
    def rank(self) -> tuple[float, int]:
        """Its place in every queue, the lowest first: arrival, and with a `priority` so much later. Never changes."""
        return self.queued_at + PRIORITY_S * self.priority, self.order

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_due(self) -> int:
        """Tokens that no step has begun to compute, those not known yet included."""
        return len(self.token_ids) + self.num_pending - self.num_computed - self.num_launched

    @property
    def num_generated(self) -> int:
        """Generated tokens, those emitted by earlier workers included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_prompt_computed(self) -> bool:
        return self.num_computed >= self.num_prompt_tokens

    @property
    def needs_scores(self) -> bool:
        return self.scores_prompt and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def reads_anew(self) -> bool:
        """Whether it must read its prompt itself, from the beginning, whatever is cached of it."""
        return self.needs_scores or self.pooling in ("mean", "first")

    def forget_readings(self) -> None:
        """A reading was broken off, and begins anew."""
        self.prompt_logprobs.clear()
        self.pooled = None

    @property
    def queued_s(self) -> float:
        """From its arrival to its first admission; 0 before that."""
        return 0.0 if self.admitted_at is None else self.admitted_at - self.queued_at

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED


def begin_search(request: Request) -> BeamGroup | None:
    """For a request that is a beam search."""
    params = request.sampling
    if params.beam_width is None:
        return None
    search = BeamSearch(params, params.beam_width, params.max_tokens)
    return BeamGroup(search, tuple(sorted(choice.index for choice in request.choices)))
