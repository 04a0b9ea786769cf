"""The workers of `tandem bench gateway`: they speak the real protocol and step at a set pace, without a model.

A step gives each of a worker's requests one token and is one frame, as from a real worker. When each step was sent is
noted, so that afterwards the way of every single token can be timed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import uvloop

from tandem.cluster.bench.children import obey
from tandem.router.scripted_worker import Conversation, ScriptedWorker, scripted_identity
from tandem.workers.connection import Connection
from tandem.workers.protocol import Tokens
from tandem.workers.types import TokenChunk


@dataclass(slots=True)
class Told:
    """What was sent of one request: a token at `first_at`, then one in each step of the worker from `first_step` on."""

    worker: int
    first_at: float
    first_step: int
    num_tokens: int = 0


Running = tuple[Conversation, asyncio.Future[None]]
"""A request, and what is done with its last token."""


class Pace:
    """The seconds between two steps; None: nobody says anything."""

    def __init__(self) -> None:
        self.step_s: float | None = None
        self.changed = asyncio.Event()

    def set(self, step_s: float | None) -> None:
        self.step_s = step_s
        self.changed.set()
        self.changed = asyncio.Event()


class SteppingWorker:
    """One decode worker. Each request gets a first token at once, and then one with every step."""

    def __init__(self, number: int, key: bytes, token_ids: Sequence[int], pace: Pace, max_model_len: int) -> None:
        self.worker = ScriptedWorker(
            f"decode-{number}",
            "decode",
            self._play,
            key=key,
            identity=scripted_identity(max_model_len=max_model_len),
        )
        self.step_times: list[float] = []
        self.told: dict[str, Told] = {}
        self._number = number
        self._token_ids = token_ids
        self._pace = pace
        self._running: dict[str, Running] = {}

    async def _play(self, conversation: Conversation) -> None:
        name = conversation.request.request_id
        conversation.start()
        self.told[name] = Told(self._number, time.monotonic(), len(self.step_times))
        done = asyncio.get_running_loop().create_future()
        self._say({name: (conversation, done)})
        self._running[name] = conversation, done
        try:
            await done  # or until the gateway cancels
        finally:
            self._running.pop(name, None)

    def forget_ended(self) -> None:
        self.told = {name: self.told[name] for name in self._running}

    async def step(self, offset: float) -> None:
        """For ever, at the pace. `offset`: the part of a step by which this worker is later than the first one."""
        due = time.monotonic()
        while True:
            step_s = self._pace.step_s
            if step_s is None:
                await self._pace.changed.wait()
                due = time.monotonic() + offset * (self._pace.step_s or 0.0)
                continue
            due = max(due + step_s, time.monotonic() - step_s)  # what was missed is not made up for
            await asyncio.sleep(due - time.monotonic())
            if self._running:
                self.step_times.append(time.monotonic())
                self._say(self._running)

    def _say(self, running: Mapping[str, Running]) -> None:
        """A token for each of these: a frame per gateway."""
        frames: dict[Connection, list[TokenChunk]] = {}
        token_id = self._token_ids[len(self.step_times) % len(self._token_ids)]
        for name, (conversation, done) in running.items():
            told = self.told[name]
            if told.num_tokens == conversation.request.sampling.max_tokens:
                continue  # it has ended and is about to be forgotten
            told.num_tokens += 1
            is_last = told.num_tokens == conversation.request.sampling.max_tokens
            chunk = TokenChunk(
                request_id=name, choice=0, token_ids=(token_id,), finish_reason="length" if is_last else None
            )
            frames.setdefault(conversation.connection, []).append(chunk)
            if is_last and not done.done():
                done.set_result(None)
        for connection, chunks in frames.items():
            connection.post(Tokens(chunks=tuple(chunks)))


class Crew:
    """All workers of this process."""

    def __init__(self) -> None:
        self._workers: list[SteppingWorker] = []
        self._pace = Pace()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, order: dict[str, Any]) -> list[Any]:
        """Returns the workers' addresses."""
        key, count = bytes.fromhex(order["cluster_key"]), order["workers"]
        addresses = []
        for number in range(count):
            worker = SteppingWorker(number, key, order["token_ids"], self._pace, order["max_model_len"])
            addresses.append(msgspec.to_builtins(await worker.worker.start()))
            self._workers.append(worker)
            self._tasks.append(asyncio.create_task(worker.step(number / count)))
        return addresses

    async def pace(self, order: dict[str, Any]) -> None:
        self._pace.set(order["step_s"])

    async def stamps(self, order: dict[str, Any]) -> dict[str, Any]:
        """What was told since the last call."""
        told = {name: asdict(each) for worker in self._workers for name, each in worker.told.items()}
        answer = {"steps": [worker.step_times for worker in self._workers], "told": told}
        for worker in self._workers:
            worker.forget_ended()
        return answer

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._workers:
            await worker.worker.stop()


async def _main() -> None:
    crew = Crew()
    try:
        await obey({"start": crew.start, "pace": crew.pace, "stamps": crew.stamps})
    finally:
        await crew.stop()


if __name__ == "__main__":
    uvloop.run(_main())
