"""The words that cross a process border, as frozen records. No torch here: the router imports this file.

Everything is a `msgspec.Struct`: it is validated on arrival and is its own MessagePack form.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["prefill", "decode", "aggregated"]
FinishReason = Literal["stop", "length"]
PrefillPath = Literal["remote", "local"]
FillSource = Literal["peer", "host", "disk"]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every record: immutable, named fields, unknown fields refused."""


class SamplingParams(Record, frozen=True, kw_only=True):
    """How the next token is chosen, and when to stop. Already validated by the gateway; the worker checks ranges again.

    `seed` is always set (the gateway draws one when the client gives none), so that a request continued on another
    worker goes on as if nothing had happened: the random number of a token depends on (seed, choice, position) alone.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    num_logprobs: int | None = None
    """None: no logprobs. 0: that of the chosen token. k: also the k most likely ones. They are of the model's own
    distribution, before temperature, penalties and constraints."""
    num_prompt_logprobs: int | None = None
    """As `num_logprobs`, for each token of the prompt but the first. The prompt is then read anew, cached or not."""
    beam_width: int | None = None
    """Beam search: the choices are the best answers of so many beams (workers/beams.py), told when all are known. No
    token is drawn: temperature, seed and filters have no say, and what changes logits cannot be asked for."""
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: tuple[int, ...] = ()
    """Ends the choice with finish_reason "stop"; the token itself is part of the output. The gateway puts the model's
    end-of-sequence ids here unless the client asked to ignore them."""
    min_tokens: int = 0
    """No token of `stop_token_ids` is sampled before so many tokens were generated."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit before anything else)."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these can be sampled. None: all."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences that are never completed: the last token of one is not sampled behind the others."""
    grammar: str | None = None
    """What the answer must match, in the Lark dialect of llguidance. The answer may end where it matches."""


PRIORITY_S = 10.0
"""A request of priority p waits as if it had come p times as much later."""
MAX_PRIORITY = 100


class Choice(Record, frozen=True, kw_only=True):
    """One of the `n` answers of a request, with the tokens that the client already has (empty on a fresh request)."""

    index: int
    emitted_token_ids: tuple[int, ...] = ()


class Retention(Record, frozen=True, kw_only=True):
    """How long a prompt's blocks are worth keeping. The higher, the longer: blocks of the lowest priority go first."""

    priority: int = 35
    """0 to 100."""
    duration_s: float | None = None
    """After so long without a use the priority falls back to the default. None: never."""


class Request(Record, frozen=True, kw_only=True):
    """The user's view of one generation: a prompt, and the choices that are still to be finished."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    choices: tuple[Choice, ...] = (Choice(index=0),)
    salt: str = ""
    """Tenant salt: requests with different salts never share a block."""
    retention: Retention = Retention()
    priority: int = 0
    """0 to `MAX_PRIORITY`: while it waits, so many times `PRIORITY_S` count as if it had come later."""


class TokenLogprobs(Record, array_like=True, frozen=True, kw_only=True):
    """Natural-log probabilities of one generated token and of its most likely alternatives, most likely first."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class TokenChunk(Record, array_like=True, frozen=True, kw_only=True):
    """What one step gave one choice of a request. `logprobs`, if asked for, has one entry per token of `token_ids`."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class ModelIdentity(Record, frozen=True, kw_only=True):
    """What two workers must have in common before KV may travel between them. Compared field by field at pairing."""

    protocol_version: int
    model: str
    revision: str
    """Digest of the weights' files (names, sizes, and the header or content digest), hex."""
    dtype: str
    numerics: str
    """Backend, hardware and version of all that computes (identity.py): with another one, any bit may differ."""
    layout_version: int
    block_size: int
    block_bytes: int
    max_model_len: int


class WorkerAddress(Record, frozen=True, kw_only=True):
    """Where one incarnation of a worker listens. A restarted worker has the same id and a higher epoch."""

    worker_id: str
    epoch: int
    role: Role
    host: str
    port: int


class KVSource(Record, frozen=True, kw_only=True):
    """A worker, of any role, that is said to hold the KV of a prompt's first `num_blocks` blocks. A hint: whoever
    fetches them checks."""

    address: WorkerAddress
    num_blocks: int


class BlockCounts(Record, frozen=True, kw_only=True):
    """Blocks of one pool by state. One owner per block: the states always add up to `total`."""

    total: int
    free: int
    cached: int
    used: int
    incoming: int
    quarantined: int

    def is_consistent(self) -> bool:
        return self.free + self.cached + self.used + self.incoming + self.quarantined == self.total


class WorkerSpeeds(Record, frozen=True, kw_only=True):
    """What this worker's steps take, in seconds, as measured so far (workers/speeds.py). None: not measured yet.

    A token of a prompt takes `prefill_token_s + prefill_attended_s * (tokens it attends to)`, a step of n sequences
    that decode `decode_step_s + decode_sequence_s * n`.
    """

    prefill_token_s: float | None = None
    prefill_attended_s: float | None = None
    decode_step_s: float | None = None
    decode_sequence_s: float | None = None


class WorkerSnapshot(Record, frozen=True, kw_only=True):
    """What a worker says of itself once a second, and what the router's policy decides on."""

    worker_id: str
    epoch: int
    role: Role
    pid: int
    blocks: BlockCounts
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    """Prompt tokens that are admitted or queued and not yet computed."""
    max_model_len: int
    max_num_batched_tokens: int = 512
    """A prompt is read in chunks of at most so many tokens; sequences that decode wait for each."""
    max_num_seqs: int | None = None
    """Sequences that run at once; more of them wait. None: not told."""
    speeds: WorkerSpeeds = WorkerSpeeds()
    kv_tier_blocks: dict[str, int] = {}
    """Blocks that tiers below the pool hold, by tier ("host", "disk")."""
    counters: dict[str, float] = {}
    """Monotonic counters for /metrics, keyed `name` or `name{label="value"}` (see workers/metrics.py)."""
    histograms: dict[str, tuple[float, ...]] = {}
    """Observations since the previous snapshot, seconds (step_seconds, queue_seconds, handover_seconds, ...)."""


class TicketBlock(Record, array_like=True, frozen=True, kw_only=True):
    """One block of KV on the prefill worker: `index` counts blocks from the start of the prompt."""

    index: int
    block_id: int
    generation: int
    digest: bytes
    """xxh3-128 of the block's bytes, 16 bytes."""


class CachedTokens(Record, frozen=True, kw_only=True):
    """Prompt tokens whose KV was not computed for a request by the worker that read its prompt, by where it was found.
    Never more tokens than the prompt has."""

    pool: int = 0
    """In the worker's own block pool."""
    peer: int = 0
    """In another worker's pool, and fetched."""
    host: int = 0
    """In host memory, where evicted blocks go."""
    disk: int = 0

    @property
    def total(self) -> int:
        return self.pool + self.peer + self.host + self.disk

    def plus(self, source: FillSource, num_tokens: int) -> CachedTokens:
        return msgspec.structs.replace(self, **{source: getattr(self, source) + num_tokens})

    def at_most(self, num_tokens: int) -> CachedTokens:
        """What is left of these when only the first `num_tokens` count. The pool's come first, then host memory's."""
        left: dict[str, int] = {}
        for source in ("pool", "host", "disk", "peer"):
            left[source] = min(getattr(self, source), num_tokens)
            num_tokens -= left[source]
        return CachedTokens(**left)


class KVTicket(Record, frozen=True, kw_only=True):
    """A part of the prefill worker's promise: these blocks hold this request's KV until the lease ends.

    Parts are numbered from 0; they may arrive twice or out of order, and the decode worker sorts it out. The part that
    is `last` carries the first generated token.
    """

    request_id: str
    worker_id: str
    epoch: int
    part: int
    blocks: tuple[TicketBlock, ...]
    lease_s: float
    cached: CachedTokens
    """Whose KV the prefill worker did not have to compute."""
    last: bool = False
    first_token: TokenChunk | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """In the last part, if they were asked for: of each token of the prompt but the first."""
