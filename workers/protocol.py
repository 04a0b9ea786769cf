"""The wire: what gateways, decode workers and prefill workers say to each other, one MessagePack frame per message.

A frame is a 4-byte big-endian length and a MessagePack body, at most `MAX_FRAME_BYTES`. Every message is a tagged
record; a frame of unknown type, with an unknown field or of a wrong type ends the connection (`ProtocolError`).

Opening a connection (mutual proof of the cluster key, nothing secret crosses the wire):

    server -> Challenge(nonce)
    client -> Hello(protocol_version, peer, nonce, proof = HMAC(key, "client" + server nonce + client nonce))
    server -> Welcome(protocol_version, address, identity, proof = HMAC(key, "server" + client nonce + server nonce))

Then, on a gateway's connection to a worker that decodes (decode or aggregated):

    gateway -> Submit, Cancel, FinishChoice, UsePrefill, Pair, Embed, Ping
    worker  -> Started, Tokens, Failed, NeedPrefill, Paired, Embedded, Pong

on a gateway's connection to a prefill worker:

    gateway -> Embed, Cancel, Pair, Ping
    worker  -> Embedded, Failed, Pong

and on a worker's connection to another one (one connection carries many requests; the second answers):

    reader -> Describe, Fetch, Prefill, Renew, Confirm, Cancel         Prefill: to prefill workers only
    owner  -> Description, TicketPart, Renewed, Confirmed, Failed
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tandem.workers.types import (
    CachedTokens,
    KVSource,
    KVTicket,
    ModelIdentity,
    PrefillPath,
    Record,
    Request,
    Retention,
    SamplingParams,
    TokenChunk,
    TokenLogprobs,
    WorkerAddress,
    WorkerSnapshot,
)

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 << 20


class Message(Record, tag=True, frozen=True, kw_only=True):
    """Base of all messages; the class name is the tag."""


# Opening


class Challenge(Message, frozen=True, kw_only=True):
    nonce: bytes


class Hello(Message, frozen=True, kw_only=True):
    protocol_version: int
    peer: str
    nonce: bytes
    proof: bytes


class Welcome(Message, frozen=True, kw_only=True):
    protocol_version: int
    address: WorkerAddress
    identity: ModelIdentity
    proof: bytes


# Gateway -> worker


class Submit(Message, frozen=True, kw_only=True):
    """Take this request and own it to its end. `prefill` is None when the router wants it prefilled locally.
    `source`: whence the worker that prefills may fetch the beginning of the prompt instead of computing it."""

    request: Request
    prefill: WorkerAddress | None = None
    source: KVSource | None = None
    timeout_s: float | None = None


class Cancel(Message, frozen=True, kw_only=True):
    """Forget this request: free its blocks here and, from a decode worker, on the prefill worker. Never answered."""

    request_id: str


class FinishChoice(Message, frozen=True, kw_only=True):
    """The gateway has all it wants of this choice (a stop string was completed): generate no more of it, the others go
    on. Never answered; chunks of the choice that are already on their way are dropped by the gateway. The request ends
    when its last choice does. A worker that does not know the request or the choice any more ignores it."""

    request_id: str
    choice: int


class UsePrefill(Message, frozen=True, kw_only=True):
    """Answer to `NeedPrefill`. None: nobody is left, prefill locally."""

    request_id: str
    prefill: WorkerAddress | None
    source: KVSource | None = None


class Pair(Message, frozen=True, kw_only=True):
    """Connect to these workers, compare identities, measure the path: now, so that no request waits for it. `prefill`:
    whose prompts a decode worker is handed; it says of each how that went (`Paired`). `sources`: of any role, whence
    beginnings of prompts may be fetched, to whoever reads prompts; where that does not work, nothing is fetched."""

    prefill: tuple[WorkerAddress, ...] = ()
    sources: tuple[WorkerAddress, ...] = ()


class Embed(Message, frozen=True, kw_only=True):
    """Read these tokens and say where the model puts them: answered by `Embedded` or `Failed`. `source`: whence their
    beginning may be fetched instead of computed."""

    request_id: str
    token_ids: tuple[int, ...]
    salt: str = ""
    retention: Retention = Retention()
    source: KVSource | None = None
    priority: int = 0


class Ping(Message, frozen=True, kw_only=True):
    pass


# Worker -> gateway


class Started(Message, frozen=True, kw_only=True):
    """Sent once, before the first token of a request. Says which way its prompt was read."""

    request_id: str
    path: PrefillPath
    prefill_worker: str
    decode_worker: str
    cached: CachedTokens
    queue_s: float
    handover_s: float | None = None
    """From the end of prefill to the sequence joining the batch; None when it was prefilled locally."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """If they were asked for: of each token of the prompt but the first."""


class Embedded(Message, frozen=True, kw_only=True):
    """`embedding`: a vector of unit length, little-endian float32."""

    request_id: str
    embedding: bytes
    cached: CachedTokens
    queue_s: float


class Tokens(Message, frozen=True, kw_only=True):
    """Everything that one step gave to this connection's requests."""

    chunks: tuple[TokenChunk, ...]


class Failed(Message, frozen=True, kw_only=True):
    """The one terminal message of a request that could not be served here. `retryable`: another worker may do."""

    request_id: str
    message: str
    retryable: bool
    param: str | None = None
    code: str = "internal_error"


class NeedPrefill(Message, frozen=True, kw_only=True):
    """The prefill worker of this request is lost; who else?"""

    request_id: str
    failed_worker: str
    reason: str


class Paired(Message, frozen=True, kw_only=True):
    """Result of pairing with one prefill worker. `error` names the differing field and both values."""

    prefill_worker: str
    error: str | None = None
    transport: str | None = None
    gigabytes_per_s: float | None = None


class Pong(Message, frozen=True, kw_only=True):
    snapshot: WorkerSnapshot


# Worker -> another worker, whose KV it reads


class Describe(Message, frozen=True, kw_only=True):
    """Who are you, and how do I read your pool?"""


class Prefill(Message, frozen=True, kw_only=True):
    """Compute the KV of these tokens and the token after them. `num_prompt_tokens` of them are the prompt, the rest was
    generated before (a continued request); penalties and the random counter depend on the difference. `source`: whence
    the beginning may be fetched instead."""

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    choice: int
    salt: str
    retention: Retention = Retention()
    source: KVSource | None = None
    priority: int = 0


class Fetch(Message, frozen=True, kw_only=True):
    """Which blocks of this prompt are cached with you, from `first_block` on? Keep them for me until I confirm. The
    answer is a ticket without a first token, which may list fewer blocks than asked for, or none. What lower tiers hold
    is brought back for it as far as that can be done in half of `timeout_s`, by when the other computes instead."""

    request_id: str
    token_ids: tuple[int, ...]
    """The tokens of all `first_block + max_blocks` blocks: compared, so that nobody gets the KV of others."""
    salt: str
    first_block: int
    max_blocks: int
    timeout_s: float = 0.0


class Renew(Message, frozen=True, kw_only=True):
    """Extend the leases of these requests by their full length from now. Sent every second: it is also the heartbeat of
    the link, and always answered."""

    request_ids: tuple[str, ...]


class Confirm(Message, frozen=True, kw_only=True):
    """Everything is pulled: these blocks, at these generations. Did the promise hold throughout? Ends the lease."""

    request_id: str
    blocks: tuple[tuple[int, int], ...]
    """(block id, generation) as in the ticket."""


# Its answers


class Description(Message, frozen=True, kw_only=True):
    identity: ModelIdentity
    transfer_name: str
    transfer: bytes
    """Opaque to all but the transfer backend of the same name."""
    probe_block: int
    """The first of NUM_PATTERN_BLOCKS blocks that hold the known pattern of `transfer.base.probe_pattern`."""


class TicketPart(Message, frozen=True, kw_only=True):
    ticket: KVTicket


class Renewed(Message, frozen=True, kw_only=True):
    pass


class Confirmed(Message, frozen=True, kw_only=True):
    """`broken` is None when the lease held and no block was given away; else nothing that was pulled may be used."""

    request_id: str
    broken: Literal["lease", "generation"] | None = None


AnyMessage = (
    Challenge | Hello | Welcome
    | Submit | Cancel | FinishChoice | UsePrefill | Pair | Embed | Ping
    | Started | Tokens | Failed | NeedPrefill | Paired | Embedded | Pong
    | Describe | Fetch | Prefill | Renew | Confirm
    | Description | TicketPart | Renewed | Confirmed
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(AnyMessage).decode
