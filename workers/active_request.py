"""A request that a decode worker owns, from `Submit` to its one terminal message."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tandem.workers.beams import Answer
from tandem.workers.connection import Connection
from tandem.workers.handover import Delivered
from tandem.workers.protocol import UsePrefill
from tandem.workers.sequence import Sequence
from tandem.workers.steps import StepOutput
from tandem.workers.types import KVSource, Request, TokenChunk, WorkerAddress


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """`engine_id` is its name inside this worker: two gateways may use the same id."""

    connection: Connection
    request: Request
    engine_id: str
    prefill: WorkerAddress | None
    """Who is to read the prompt, as far as anybody else is."""
    source: KVSource | None
    """Whence the beginning may be fetched by whoever reads the prompt."""
    sequences: list[Sequence] = field(default_factory=list)
    open_choices: set[int] = field(default_factory=set)
    is_started: bool = False
    deadline: asyncio.TimerHandle | None = None
    fills: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """By choice. Mostly one: others find the prompt here, and only a long answer to continue is fetched as well."""
    delivered: Delivered | None = None
    """The first choice's."""
    replacement: asyncio.Future[WorkerAddress | None] | None = None
    """Set while the gateway is asked for another prefill worker."""

    def use_prefill(self, message: UsePrefill) -> None:
        """The gateway's answer, if one is still waited for."""
        if self.replacement is not None and not self.replacement.done():
            self.source = message.source
            self.replacement.set_result(message.prefill)

    def chunk(self, output: StepOutput) -> TokenChunk:
        """A step's token of one of its choices."""
        assert output.token is not None
        logprobs = output.token.logprobs
        return TokenChunk(
            request_id=self.request.request_id,
            choice=output.sequence.choice,
            token_ids=(output.token.token_id,),
            finish_reason=output.finish_reason,
            logprobs=None if logprobs is None else (logprobs,),
        )

    def whole_chunk(self, answer: Answer) -> TokenChunk:
        """All of one of its choices."""
        return TokenChunk(
            request_id=self.request.request_id,
            choice=answer.choice,
            token_ids=answer.token_ids,
            finish_reason=answer.finish_reason,
            logprobs=answer.logprobs,
        )
