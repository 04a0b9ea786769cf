"""The prefill worker's half of a handover: compute prompts, promise their blocks.

    Prefill ──> sequence with `hold` ─┬─ tiers or a peer hold more than the pool ─> filled ─┐
                                      └──────────────────────────────────────────────────────┴─> computed
        each chunk ──> TicketPart (blocks, generations, digests); the last one with the first token

Promises are kept, and ended, in promises.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tandem.workers.connection import Connection
from tandem.workers.errors import RequestError
from tandem.workers.grammar import GrammarCache
from tandem.workers.kv_cache import KVCache
from tandem.workers.promises import Promise
from tandem.workers.protocol import AnyMessage, Cancel, Prefill
from tandem.workers.role import Role, Services
from tandem.workers.sequence import Sequence
from tandem.workers.steps import StepOutput
from tandem.workers.types import Choice, KVSource, Request, TokenChunk


@dataclass(slots=True, eq=False)
class Reading:
    """A prompt that this worker was asked to read, until its promise has ended."""

    salt: str
    source: KVSource | None
    fill: asyncio.Task[None] | None = None


class PrefillWorker(Role):
    """Answers decode workers."""

    name = "prefill"

    def __init__(self, services: Services, kv_cache: KVCache) -> None:
        super().__init__(services)
        self.kv_cache = kv_cache
        self._readings: dict[Sequence, Reading] = {}
        self._preparing: dict[tuple[Connection, str], asyncio.Task[None]] = {}
        """Whose grammar is being compiled."""
        self.promises.on_ended = self._ended

    def handle(self, connection: Connection, message: AnyMessage) -> None:
        if isinstance(message, Prefill):
            self._take(connection, message)
        elif isinstance(message, Cancel) and (connection, message.request_id) in self._preparing:
            self._preparing[connection, message.request_id].cancel()
        else:
            super().handle(connection, message)

    def connection_lost(self, connection: Connection) -> None:
        for (whose, _), preparing in self._preparing.items():
            if whose is connection:
                preparing.cancel()
        super().connection_lost(connection)

    def on_outputs(self, outputs: list[StepOutput]) -> None:
        """A step ended: publish the blocks that it completed."""
        for output in outputs:
            if self.embedder.try_take(output):
                continue
            promise = self.promises.of(output.sequence)
            if promise is None:
                self.engine.release(output.sequence)
            elif output.error is not None:
                self.promises.break_off(promise, output.error)
            else:
                self._publish(promise, output)

    def on_incoming(self, sequence: Sequence) -> None:
        if self.embedder.try_fill(sequence):
            return
        reading = self._readings[sequence]
        reading.fill = self._spawn_fill(sequence, self._fill(sequence, reading))

    # Inside

    def _source_of(self, sequence: Sequence) -> KVSource | None:
        reading = self._readings.get(sequence)
        return self.embedder.source_of(sequence) if reading is None else reading.source

    def _take(self, connection: Connection, message: Prefill) -> None:
        text, grammars = message.sampling.grammar, self.engine.grammars
        if text is None or grammars is None:
            self._begin(connection, message)
            return
        name = (connection, message.request_id)
        self._preparing[name] = self._tasks.spawn(self._prepare(connection, message, grammars, text), "grammar")
        self._preparing[name].add_done_callback(lambda _: self._preparing.pop(name, None))

    async def _prepare(self, connection: Connection, message: Prefill, grammars: GrammarCache, text: str) -> None:
        """Compile the grammar, then begin."""
        try:
            await grammars.prepare(text)
        except RequestError as error:
            self.promises.refuse(connection, message.request_id, str(error))
        else:
            self._begin(connection, message)

    def _begin(self, connection: Connection, message: Prefill) -> None:
        prompt, emitted = message.token_ids[: message.num_prompt_tokens], message.token_ids[message.num_prompt_tokens :]
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=prompt,
            sampling=message.sampling,
            choices=(Choice(index=message.choice, emitted_token_ids=emitted),),
            salt=message.salt,
            retention=message.retention,
            priority=message.priority,
        )
        num_source_blocks = 0 if message.source is None else message.source.num_blocks
        try:
            (sequence,) = self.engine.add(request, hold=True, num_source_blocks=num_source_blocks)
        except RequestError as error:
            self.promises.refuse(connection, message.request_id, str(error))
            return
        self._readings[sequence] = Reading(message.salt, message.source)
        self.promises.begin(connection, sequence)

    async def _fill(self, sequence: Sequence, reading: Reading) -> None:
        if await self.filler.fill(sequence, reading.salt):
            self.engine.fill_ended(sequence, sequence.num_computed)
            await self._publish_found(sequence)

    async def _publish_found(self, sequence: Sequence) -> None:
        """What was brought is complete: it is pulled while the first chunk is computed. If that is faster than the
        digests are, it publishes all of this itself."""
        promise = self.promises.of(sequence)
        if promise is None:
            return
        found = sequence.block_ids[: sequence.num_computed // self.engine.config.block_size]
        digests = await asyncio.to_thread(lambda: [self.kv_cache.digest(block_id) for block_id in found])
        if found and promise.num_blocks == 0 and self.promises.of(sequence) is promise:
            self.promises.publish(promise, len(found), digests, is_last=False)

    def _ended(self, sequence: Sequence, is_incoming: bool) -> None:
        reading = self._readings.pop(sequence, None)  # none: somebody fetched what was cached
        if is_incoming:
            assert reading is not None, "an INCOMING sequence that nobody reads"
            assert reading.fill is not None, "an INCOMING sequence that nobody fills"
            reading.fill.cancel()

    def _publish(self, promise: Promise, output: StepOutput) -> None:
        sequence, block_size = promise.sequence, self.engine.config.block_size
        is_last = output.token is not None
        # The last block of the prompt may be partly filled: it is complete when the prompt is.
        end = len(sequence.block_ids) if is_last else output.num_computed // block_size
        digests = [self.kv_cache.digest(block_id) for block_id in sequence.block_ids[promise.num_blocks : end]]
        first_token = _first_token(promise, output) if is_last else None
        if is_last:
            self.metrics.observe("queue_seconds", sequence.queued_s)
        self.promises.publish(
            *(promise, end, digests),
            is_last=is_last,
            first_token=first_token,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if is_last else (),
            cached=sequence.cached,
        )


def _first_token(promise: Promise, output: StepOutput) -> TokenChunk:
    assert output.token is not None
    logprobs = output.token.logprobs
    return TokenChunk(
        request_id=promise.request_id,
        choice=promise.sequence.choice,
        token_ids=(output.token.token_id,),
        logprobs=None if logprobs is None else (logprobs,),
    )
