"""A worker without a model: it speaks the real protocol over a real socket and says what a script tells it to.

It ships with the code so that all who build on the router can test against it. A script is a coroutine per request; the
one given by default answers with a fixed list of tokens, as a deterministic model would: a request that comes back with
tokens already emitted goes on where it was.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from collections.abc import Awaitable, Callable, Sequence

from tandem.workers.connection import Connection, accept
from tandem.workers.errors import ProtocolError, WorkerUnavailable
from tandem.workers.protocol import (
    PROTOCOL_VERSION,
    Cancel,
    Embed,
    Embedded,
    Failed,
    FinishChoice,
    Message,
    NeedPrefill,
    Pair,
    Paired,
    Ping,
    Pong,
    Started,
    Submit,
    Tokens,
    UsePrefill,
)
from tandem.workers.types import (
    BlockCounts,
    CachedTokens,
    Choice,
    FinishReason,
    ModelIdentity,
    Request,
    Role,
    TokenChunk,
    TokenLogprobs,
    WorkerAddress,
    WorkerSnapshot,
)

logger = logging.getLogger(__name__)

SCRIPTED_EMBEDDING_SIZE = 8
TokensFor = Callable[[Request, int], Sequence[int]]
"""All tokens of this choice's answer, from its beginning."""


def scripted_identity(
    block_size: int = 32, max_model_len: int = 4096, numerics: str = "scripted/any/0"
) -> ModelIdentity:
    return ModelIdentity(
        protocol_version=PROTOCOL_VERSION,
        model="scripted",
        revision="0",
        dtype="float32",
        numerics=numerics,
        layout_version=1,
        block_size=block_size,
        block_bytes=64,
        max_model_len=max_model_len,
    )


class Conversation:
    """One request, from the script's side."""

    def __init__(self, worker: ScriptedWorker, connection: Connection, submit: Submit) -> None:
        self.worker = worker
        self.submit = submit
        self.request = submit.request
        self.finished_choices: set[int] = set()
        """Choices that the gateway wants no more of."""
        self.use_prefill: asyncio.Queue[UsePrefill] = asyncio.Queue()
        self.connection = connection
        """To the gateway that asks."""

    def send(self, message: Message) -> None:
        self.connection.send(message)

    def start(self, *, cached: CachedTokens | None = None) -> None:
        prefill = self.submit.prefill
        num_prompt_logprobs = self.request.sampling.num_prompt_logprobs
        scored = () if num_prompt_logprobs is None else self.request.prompt_token_ids[1:]
        self.send(
            Started(
                request_id=self.request.request_id,
                path="local" if prefill is None else "remote",
                prefill_worker=self.worker.worker_id if prefill is None else prefill.worker_id,
                decode_worker=self.worker.worker_id,
                cached=cached or CachedTokens(),
                queue_s=0.0,
                prompt_logprobs=tuple(scripted_logprobs(token_id, num_prompt_logprobs or 0) for token_id in scored),
            )
        )

    def chunk(self, choice: int, token_ids: Sequence[int], finish_reason: FinishReason | None = None) -> TokenChunk:
        """A chunk with made-up logprobs, if the request asks for some."""
        num_logprobs = self.request.sampling.num_logprobs
        logprobs = None
        if num_logprobs is not None:
            logprobs = tuple(scripted_logprobs(token_id, num_logprobs) for token_id in token_ids)
        return TokenChunk(
            request_id=self.request.request_id,
            choice=choice,
            token_ids=tuple(token_ids),
            finish_reason=finish_reason,
            logprobs=logprobs,
        )

    def say(self, *chunks: TokenChunk) -> None:
        self.send(Tokens(chunks=chunks))

    def fail(self, message: str = "scripted failure", *, retryable: bool, code: str = "internal_error") -> None:
        self.send(Failed(request_id=self.request.request_id, message=message, retryable=retryable, code=code))

    async def ask_for_prefill(self) -> WorkerAddress | None:
        """Say that the prefill worker is lost and wait for the name of another."""
        failed = "" if self.submit.prefill is None else self.submit.prefill.worker_id
        self.send(NeedPrefill(request_id=self.request.request_id, failed_worker=failed, reason="scripted"))
        return (await self.use_prefill.get()).prefill


Script = Callable[[Conversation], Awaitable[None]]


def scripted_embedding(message: Embed) -> Embedded:
    """Of unit length, and told by the text: its first token's place is 0.6, its length's 0.8."""
    numbers = [0.0] * SCRIPTED_EMBEDDING_SIZE
    numbers[message.token_ids[0] % 4] = 0.6
    numbers[4 + len(message.token_ids) % 4] = 0.8
    embedding = struct.pack(f"<{len(numbers)}f", *numbers)
    return Embedded(request_id=message.request_id, embedding=embedding, cached=CachedTokens(), queue_s=0.0)


def scripted_logprobs(token_id: int, num_logprobs: int) -> TokenLogprobs:
    """Made up, and told by the token: it is the likeliest, its successors by number come next."""
    top = tuple(range(token_id, token_id + num_logprobs))
    return TokenLogprobs(
        logprob=-0.5, top_token_ids=top, top_logprobs=tuple(-0.5 - position for position in range(num_logprobs))
    )


def answering(
    tokens_for: TokensFor, *, frame_len: int = 1, delay_s: float = 0.0, die_after: int | None = None
) -> Script:
    """A script that answers with these tokens, `frame_len` per choice and frame, `delay_s` between frames.

    `die_after`: the worker is killed once it has sent so many frames of a request that has nothing emitted yet.
    """

    async def script(conversation: Conversation) -> None:
        conversation.start()
        rest = {
            choice.index: _rest(conversation.request, choice, tokens_for) for choice in conversation.request.choices
        }
        is_fresh = not any(choice.emitted_token_ids for choice in conversation.request.choices)
        num_frames = 0
        while rest:
            await asyncio.sleep(delay_s)
            chunks = []
            for index in list(rest):
                if index in conversation.finished_choices:
                    del rest[index]
                    continue
                token_ids, finish_reason = rest[index]
                now, later = token_ids[:frame_len], token_ids[frame_len:]
                chunks.append(conversation.chunk(index, now, None if later else finish_reason))
                if later:
                    rest[index] = (later, finish_reason)
                else:
                    del rest[index]
            if chunks:
                conversation.say(*chunks)
                num_frames += 1
            if die_after is not None and is_fresh and num_frames == die_after:
                await asyncio.sleep(0)  # let the frame leave
                conversation.worker.kill()
                return

    return script


def _rest(request: Request, choice: Choice, tokens_for: TokensFor) -> tuple[list[int], FinishReason]:
    """What is left of this choice's answer, cut where a real engine would stop."""
    tokens: list[int] = []
    finish_reason: FinishReason = "length"
    for token_id in list(tokens_for(request, choice.index))[: request.sampling.max_tokens]:
        tokens.append(token_id)
        if token_id in request.sampling.stop_token_ids:
            finish_reason = "stop"
            break
    assert tuple(tokens[: len(choice.emitted_token_ids)]) == choice.emitted_token_ids, "emitted tokens are not ours"
    return tokens[len(choice.emitted_token_ids) :], finish_reason


class ScriptedWorker:
    """A listening worker. `received` is everything that gateways have sent, in order."""

    def __init__(
        self,
        worker_id: str,
        role: Role,
        script: Script | None = None,
        *,
        epoch: int = 0,
        key: bytes = b"",
        identity: ModelIdentity | None = None,
        pairing_error: str | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.role: Role = role
        self.script = script
        self.epoch = epoch
        self.received: list[Message] = []
        self.embedding: Callable[[Embed], Message | None] = scripted_embedding
        """What is answered to `Embed`; None: nothing."""
        self.is_silent = False
        """While true, pings go unanswered."""
        self.counters: dict[str, float] = {}
        self.histograms: dict[str, tuple[float, ...]] = {}
        self._key = key
        self._identity = identity or scripted_identity()
        self._pairing_error = pairing_error
        self._server: asyncio.Server | None = None
        self._address: WorkerAddress | None = None
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._conversations: dict[str, tuple[Conversation, asyncio.Task[None]]] = {}

    async def start(self) -> WorkerAddress:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self._address = WorkerAddress(
            worker_id=self.worker_id, epoch=self.epoch, role=self.role, host="127.0.0.1", port=port
        )
        return self._address

    @property
    def address(self) -> WorkerAddress:
        assert self._address is not None, "not started"
        return self._address

    def kill(self) -> None:
        """Gone, as after SIGKILL: no more connections, the open ones cut."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.abort()
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()

    async def stop(self) -> None:
        self.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def num_running(self) -> int:
        """Requests whose script has not ended and which were not cancelled."""
        return len(self._conversations)

    def snapshot(self) -> WorkerSnapshot:
        histograms, self.histograms = self.histograms, {}
        return WorkerSnapshot(
            worker_id=self.worker_id,
            epoch=self.epoch,
            role=self.role,
            pid=os.getpid(),
            blocks=BlockCounts(total=100, free=90, cached=6, used=4, incoming=0, quarantined=0),
            num_running=self.num_running,
            num_waiting=0,
            num_waiting_tokens=0,
            max_model_len=self._identity.max_model_len,
            counters=dict(self.counters),
            histograms=histograms,
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = Connection(reader, writer)
        self._connections.add(connection)
        try:
            await accept(connection, self.address, self._identity, key=self._key)
            while True:
                message = await connection.receive()
                self.received.append(message)
                self._react(connection, message)
        except (WorkerUnavailable, ProtocolError, asyncio.CancelledError):
            connection.abort()
        finally:
            self._connections.discard(connection)
            self._tasks.discard(task)

    def _react(self, connection: Connection, message: Message) -> None:
        match message:
            case Ping():
                if not self.is_silent:
                    connection.send(Pong(snapshot=self.snapshot()))
            case Pair(prefill=addresses):
                for address in addresses:
                    connection.send(
                        Paired(
                            prefill_worker=address.worker_id,
                            error=self._pairing_error,
                            transport="scripted",
                            gigabytes_per_s=1.0,
                        )
                    )
            case Submit():
                self._begin(connection, message)
            case Embed():
                if (answer := self.embedding(message)) is not None:
                    connection.send(answer)
            case Cancel(request_id=request_id) if request_id in self._conversations:
                self._conversations[request_id][1].cancel()
            case FinishChoice(request_id=request_id, choice=choice) if request_id in self._conversations:
                self._conversations[request_id][0].finished_choices.add(choice)
            case UsePrefill(request_id=request_id) if request_id in self._conversations:
                self._conversations[request_id][0].use_prefill.put_nowait(message)
            case _:
                pass

    def _begin(self, connection: Connection, submit: Submit) -> None:
        assert self.script is not None, f"{self.worker_id} has no script"
        conversation = Conversation(self, connection, submit)
        task = asyncio.ensure_future(self.script(conversation))
        request_id = submit.request.request_id
        self._conversations[request_id] = (conversation, task)
        self._tasks.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._conversations.pop(request_id, None)
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, WorkerUnavailable):  # that: the gateway was faster
                logger.error("the script of %s failed", self.worker_id, exc_info=error)

        task.add_done_callback(end)
