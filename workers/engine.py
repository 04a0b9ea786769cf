"""One worker's engine: requests in, step outputs out. Accounting runs on one thread; only the runner runs elsewhere.

    add ──> sequences ──> steps (stepper.py) ──> StepOutput, ...
                 └─ INCOMING: somebody fills their blocks, and tells of it here

Every public method may be called at any time, also while a step is in flight.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from tandem.workers.batch import SampledToken
from tandem.workers.block_key import root_key
from tandem.workers.block_pool import BlockPool
from tandem.workers.books import check_owners
from tandem.workers.config import WorkerConfig
from tandem.workers.constraint import validate_constraints
from tandem.workers.errors import RequestError
from tandem.workers.grammar import GrammarCache
from tandem.workers.new_sequences import constrain, sequences_of
from tandem.workers.pooling import PoolingMode
from tandem.workers.prefix_cache import CacheEvent, PrefixCache
from tandem.workers.scheduler import Scheduler
from tandem.workers.sequence import Sequence, Status
from tandem.workers.stepper import Stepper
from tandem.workers.steps import Runner, StepOutput
from tandem.workers.types import (
    BlockCounts,
    FillSource,
    ModelIdentity,
    Request,
    Retention,
    SamplingParams,
    TokenLogprobs,
)
from tandem.workers.validation import validate_input, validate_request


class Engine(Stepper):
    """The public face of a worker's accounting. Its callbacks are those of `Stepper`."""

    def __init__(
        self,
        runner: Runner,
        config: WorkerConfig,
        num_blocks: int,
        identity: ModelIdentity,
        on_cache_event: CacheEvent | None = None,
        *,
        vocab_size: int = 1 << 32,
        overlaps: bool = False,
    ) -> None:
        """`vocab_size`: token ids are below it. `overlaps`: see `Stepper`."""
        self.cache = PrefixCache(config.block_size, on_cache_event, clock=time.monotonic)
        self.pool = BlockPool(num_blocks, self.cache)
        super().__init__(runner, Scheduler(config, self.pool, self.cache), overlaps=overlaps)
        self.config = config
        self.identity = identity
        self.vocab_size = vocab_size
        self.grammars: GrammarCache | None = None
        """Compiles what requests ask for; prepare a grammar in it before `add`, which otherwise waits for it."""
        self._requests: dict[str, dict[int, Sequence]] = {}
        """Unfinished (HELD included) sequences by request id and choice."""
        self.can_generate = True
        """False: the model has no head, and gives embeddings alone."""
        self._arrivals = itertools.count()

    # Requests

    def validate(self, request: Request, *, hold: bool = False) -> None:
        """Raises `RequestError` for a request that this worker could never finish."""
        self._check_is_new(request.request_id)
        if not self.can_generate:
            raise RequestError("this model gives embeddings alone", param="model", code="unsupported_model")
        validate_request(
            request,
            max_model_len=self.config.max_model_len,
            num_blocks=self.pool.num_blocks,
            block_size=self.config.block_size,
            max_running=self.scheduler.max_running,
            vocab_size=self.vocab_size,
            hold=hold,
        )
        validate_constraints(request.sampling, self.vocab_size)
        if request.sampling.grammar is not None and self.grammars is None:
            raise RequestError("this worker follows no grammars", param="grammar")

    def add(
        self, request: Request, *, wants_remote: bool = False, hold: bool = False, num_source_blocks: int = 0
    ) -> list[Sequence]:
        """Queue all choices of a request and return their sequences, lowest choice first. Validates.

        The lowest choice is the leader; its siblings follow when the prompt is in the cache. `wants_remote`: somebody
        else may compute the KV (decode worker). `hold`: compute the prompt and one token, then keep the blocks until
        `release` (prefill worker). `num_source_blocks`: so many first blocks of the prompt a peer is said to hold.
        """
        self.validate(request, hold=hold)
        sequences = sequences_of(
            *(request, self._root(request.salt), self._arrivals),
            wants_remote=wants_remote,
            hold=hold,
            num_source_blocks=num_source_blocks,
        )
        constrain(sequences, self.vocab_size, self.grammars)
        self._requests[request.request_id] = {sequence.choice: sequence for sequence in sequences}
        self.scheduler.add(sequences[0])
        self.wake()
        return sequences

    def hold_cached(
        self,
        request_id: str,
        token_ids: SequenceOf[int],
        salt: str,
        max_blocks: int,
        num_restorable: Callable[[SequenceOf[bytes]], int] = lambda keys: 0,
    ) -> Sequence | None:
        """Own the first blocks of a prompt, as far as they are cached here and at most `max_blocks`, for somebody who
        fetches them: a HELD sequence until `release` or `cancel`. None: not one is cached. Raises `RequestError`.

        `num_restorable(keys)`: how many of the blocks behind these the caller will bring from lower tiers. Then the
        sequence is INCOMING until `hold_arrived`, or, once cancelled, `release_incoming`."""
        self._check_is_new(request_id)
        sequence = self._unanswered(request_id, token_ids, salt, hold=True, status=Status.HELD)
        num_cached = self.scheduler.hold_cached(sequence, max_blocks)
        self.scheduler.expect_held(sequence, num_restorable(sequence.block_keys[num_cached:]))
        if not sequence.block_ids:
            return None
        self._requests[request_id] = {0: sequence}
        return sequence

    def add_embedding(
        self,
        request_id: str,
        token_ids: SequenceOf[int],
        pooling: PoolingMode,
        *,
        salt: str = "",
        retention: Retention | None = None,
        priority: int = 0,
        num_source_blocks: int = 0,
    ) -> Sequence:
        """Queue tokens whose embedding is wanted: a prompt that is read, by chunks like any other, and not continued.
        Raises `RequestError`."""
        self._check_is_new(request_id)
        capacity = self.pool.num_blocks * self.config.block_size
        validate_input(token_ids, max_tokens=min(self.config.max_model_len, capacity), vocab_size=self.vocab_size)
        sequence = self._unanswered(
            *(request_id, token_ids, salt),
            retention=retention or Retention(),
            priority=priority,
            pooling=pooling,
            num_source_blocks=num_source_blocks,
            queued_at=time.monotonic(),
        )
        self._requests[request_id] = {0: sequence}
        self.scheduler.add(sequence)
        self.wake()
        return sequence

    def _check_is_new(self, request_id: str) -> None:
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")

    def _unanswered(self, request_id: str, token_ids: SequenceOf[int], salt: str, **fields: Any) -> Sequence:
        """Tokens that are read, and not continued."""
        return Sequence(
            request_id=request_id,
            choice=0,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            params=SamplingParams(max_tokens=1, seed=0),
            root=self._root(salt),
            order=next(self._arrivals),
            **fields,
        )

    def cancel(self, request_id: str, choice: int | None = None) -> list[Sequence]:
        """Forget one choice of a request, or all of it, in whatever state; unknown ones are fine. No output follows. Of
        a beam search, only all of it: before its end no choice is anybody's.

        Blocks go back at once, except those of the step in flight (at its end) and those of INCOMING sequences. These
        sequences are returned: a pull may still write into them, so the caller must call `release_incoming` for each.
        """
        choices = self._requests.get(request_id, {})
        chosen = [
            sequence
            for index, sequence in choices.items()
            if choice is None or (index == choice and sequence.beams is None)
        ]
        incoming = [sequence for sequence in chosen if sequence.status is Status.INCOMING]
        for sequence in chosen:
            self._finish(sequence)
        self.wake()
        return incoming

    def release(self, sequence: Sequence) -> None:
        """A HELD sequence was handed over, or its lease has ended: its blocks become cached. Otherwise no effect."""
        if sequence.status is Status.HELD:
            self._finish(sequence)
            self.wake()

    # Fills, of which a handover is one. The ends of one also take a cancelled sequence, whose blocks they then free.

    def blocks_arrived(self, sequence: Sequence, num_tokens: int, source: FillSource) -> None:
        """The first `num_tokens` (whole blocks) of an INCOMING sequence have checked KV, the latest of it from
        `source`. Others may share these blocks at once, and nobody may write into them any more: the rest of a fill
        writes from `sequence.num_computed` on. No effect once it is cancelled."""
        if not sequence.is_finished:
            assert sequence.status is Status.INCOMING, sequence.status
            self.scheduler.blocks_arrived(sequence, num_tokens, source)
            self.wake()

    def hold_arrived(self, sequence: Sequence) -> bool:
        """No more blocks will be restored for an INCOMING sequence of `hold_cached`: it is HELD with those that it has.
        False: it was cancelled meanwhile."""
        if self.release_incoming(sequence):
            return False
        assert sequence.status is Status.INCOMING, sequence.status
        self.scheduler.hold_arrived(sequence)
        self.wake()
        return True

    def handover_finished(
        self, sequence: Sequence, first_token: SampledToken, prompt_logprobs: SequenceOf[TokenLogprobs] = ()
    ) -> StepOutput | None:
        """All tokens of an INCOMING sequence have KV, and this is the token that follows. It counts as sampled here
        (stop checks, output); the sequence joins the next step. `prompt_logprobs`: complete, if it `scores_prompt`.
        None: it was cancelled meanwhile."""
        if self.release_incoming(sequence):
            return None
        assert sequence.status is Status.INCOMING, sequence.status
        sequence.joined_at = time.monotonic()
        sequence.prompt_logprobs[:] = prompt_logprobs
        self.scheduler.fill_ended(sequence, len(sequence.token_ids))
        self.wake()
        return self._outcomes.take_token(sequence, first_token)

    def fill_ended(self, sequence: Sequence, num_valid_tokens: int) -> None:
        """No more KV will come, and nobody writes into its blocks any more. The first `num_valid_tokens` have checked
        KV; the full blocks of these are kept, the rest is computed here."""
        if self.release_incoming(sequence):
            return
        assert sequence.status is Status.INCOMING, sequence.status
        num_valid_tokens = min(num_valid_tokens, len(sequence.token_ids) - 1)
        sequence.joined_at = time.monotonic()
        self.scheduler.fill_ended(sequence, num_valid_tokens - num_valid_tokens % self.config.block_size)
        self.wake()

    def quarantine(self, sequence: Sequence, block_ids: list[int]) -> bool:
        """Somebody may still write into these blocks of an INCOMING sequence: set them aside until `end_quarantine`.

        `block_ids` must be all its blocks that may still be written (settle other pulls first): the rest may be freed.
        True: fresh blocks took their places in `sequence.block_ids`, and the handover goes on (try again, or abandon).
        False: there were none; the sequence went back to the queue, computes everything here, and this handover is
        over. A cancelled sequence just loses the blocks (True); it still needs `release_incoming`.
        """
        is_handover_alive = self.scheduler.quarantine(sequence, block_ids)
        self.wake()
        return is_handover_alive

    def end_quarantine(self, block_ids: list[int]) -> None:
        """Nobody writes into these quarantined blocks any more."""
        self.pool.end_quarantine(block_ids)
        self.wake()

    def release_incoming(self, sequence: Sequence) -> bool:
        """Free the blocks of a sequence that was INCOMING when it was cancelled. No pull may write into them any more.

        False: nothing to do (it is not cancelled, or this was done before).
        """
        if not sequence.is_finished or sequence.order not in self.scheduler.incoming:
            return False
        self.scheduler.end_incoming(sequence)
        self.wake()
        return True

    # What a worker says of itself

    @property
    def num_running(self) -> int:
        return self.scheduler.num_admitted

    @property
    def num_waiting(self) -> int:
        """Queued sequences, siblings that wait for their leader included."""
        sequences = (s for choices in self._requests.values() for s in choices.values())
        return sum(s.status in (Status.WAITING, Status.BLOCKED) for s in sequences)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that this worker has still to compute before the sequences it knows can decode."""
        queued = sum(sequence.num_uncomputed for sequence in self.scheduler.waiting)
        return queued + sum(s.num_uncomputed for s in self.scheduler.running if s.num_uncomputed > 1)

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def counts(self) -> BlockCounts:
        return self.pool.counts()

    def check(self) -> None:
        """Raises AssertionError unless pool, cache and sequences agree on every block. For tests, and when idle."""
        self.pool.check()
        live = {id(s): s for choices in self._requests.values() for s in choices.values()}
        live.update({id(s): s for s in self.scheduler.incoming.values()})
        live.update({id(chunk.sequence): chunk.sequence for step in self._in_flight for chunk in step.chunks})
        check_owners(self.pool, live.values())

    # Inside

    def _root(self, salt: str) -> bytes:
        return root_key(self.config.cluster_key, self.identity, salt)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence, Status.FINISHED)
        sequence.finished_at = time.monotonic()
        choices = self._requests[sequence.request_id]
        del choices[sequence.choice]
        if not choices:
            del self._requests[sequence.request_id]
