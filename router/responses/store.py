"""Responses that are kept, for a while and up to a bound, and those that are being written.

In the memory of this process, and, where gateways share theirs, in Redis as well (shared.py): memory is then what was
written here or asked for lately, and Redis knows better whenever it answers. Each belongs to the key that asked for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tandem.router.errors import ApiError, bad_request
from tandem.router.openai.messages import Message
from tandem.router.responses.sealed import Record
from tandem.router.responses.shared import SharedResponses

MAX_RESPONSES = 4096
MAX_CHARACTERS = 64 << 20
TIME_TO_LIVE_S = 3600.0
CANCEL_PATIENCE_S = 5.0
"""How long another gateway may take to end what it writes."""
CANCEL_POLL_S = 0.1

_writes: ContextVar[set[asyncio.Task[Any]] | None] = ContextVar("writes", default=None)


@contextmanager
def noting_writes() -> Iterator[set[asyncio.Task[Any]]]:
    """What this task, and those it starts, share with other gateways, until it is shared."""
    writes: set[asyncio.Task[Any]] = set()
    token = _writes.set(writes)
    try:
        yield writes
    finally:
        _writes.reset(token)


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, and the conversation up to and including it."""

    response: Mapping[str, Any]
    messages: Sequence[Message]
    caller: str
    num_characters: int
    expires: float


class ResponseStore:
    """`clock` counts seconds. The oldest go first when there are too many.

    `get`, `shown`, `cancel` and `delete` look here; `learn` first makes this what all gateways know, and `show`,
    `cancel_anywhere` and `delete_everywhere` are of all of them.
    """

    def __init__(
        self,
        *,
        max_responses: int = MAX_RESPONSES,
        max_characters: int = MAX_CHARACTERS,
        time_to_live_s: float = TIME_TO_LIVE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_characters = max_characters
        self._time_to_live_s = time_to_live_s
        self._clock = clock
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._num_characters = 0
        self._running: dict[str, tuple[str, Callable[[], Mapping[str, Any]], Callable[[], None]]] = {}
        self._shared: SharedResponses | None = None

    def share(self, redis_url: str, *, namespace: str, cluster_key: bytes) -> None:
        """From now on with all gateways of this namespace and key."""
        self._shared = SharedResponses(
            redis_url,
            namespace=namespace,
            cluster_key=cluster_key,
            time_to_live_s=self._time_to_live_s,
            cancel=self._cancel_running,
        )

    async def stop(self) -> None:
        if self._shared is not None:
            await self._shared.stop()

    def begin(self, name: str, caller: str, shown: Callable[[], Mapping[str, Any]], cancel: Callable[[], None]) -> None:
        """A response is being written. `shown`: what there is of it."""
        self._running[name] = (caller, shown, cancel)
        if self._shared is not None:
            self._shared.begin(name, caller, shown())

    def put(self, name: str, caller: str, response: Mapping[str, Any], messages: Sequence[Message]) -> None:
        """It is not written any more: this is kept of it."""
        self._running.pop(name, None)
        self._keep(name, caller, response, messages, self._time_to_live_s)
        if self._shared is not None:
            writing = self._shared.put(name, caller, response, messages)
            writes = _writes.get()
            if writes is not None:
                writes.add(writing)
                writing.add_done_callback(writes.discard)

    def get(self, name: str, caller: str, *, param: str = "response_id") -> Stored:
        """Raises `ApiError` 404 for one that is unknown, forgotten, or somebody else's."""
        self._forget_old()
        stored = self._stored.get(name)
        # what another gateway wrote has less time left than what stands before it
        if stored is None or stored.caller != caller or stored.expires <= self._clock():
            raise _not_found(name, param)
        return stored

    def shown(self, name: str, caller: str) -> Mapping[str, Any]:
        """A response, finished or not. Raises as `get` does."""
        running = self._running.get(name)
        return running[1]() if running is not None and running[0] == caller else self.get(name, caller).response

    def cancel(self, name: str, caller: str) -> Mapping[str, Any]:
        """Ends one that is being written. Raises `ApiError` 400 for one that is finished, 404 as `get` does."""
        running = self._running.get(name)
        if running is None or running[0] != caller:
            self.get(name, caller)
            raise bad_request("This response is finished and cannot be cancelled.", param="response_id")
        _, shown, cancel = running
        cancel()
        return {**shown(), "status": "cancelled"}

    def delete(self, name: str, caller: str) -> None:
        """Raises as `get` does."""
        self.get(name, caller)
        self._forget(name)

    # Over all gateways

    async def learn(self, name: str, caller: str) -> Record | None:
        """Ask what others know of it, and remember that. The answer, where another gateway still writes it."""
        if self._shared is None or name in self._running:
            return None
        found = await self._shared.find(name, caller)
        if found is None or found.kind == "running":
            return found
        known = self._stored.get(name)
        if found.kind == "deleted":
            if known is not None and known.caller == caller:
                self._forget(name)
        elif known is None:
            self._take(name, caller, found)
        return None

    async def show(self, name: str, caller: str) -> Mapping[str, Any]:
        """As `shown`."""
        running = await self.learn(name, caller)
        return self.shown(name, caller) if running is None else running.response

    async def cancel_anywhere(self, name: str, caller: str) -> Mapping[str, Any]:
        """As `cancel`. Where the gateway that writes it does not end it in time, it is still "in_progress"."""
        running = await self.learn(name, caller)
        if running is None or self._shared is None:
            return self.cancel(name, caller)
        await self._shared.ask_to_cancel(name, caller)
        end = self._clock() + CANCEL_PATIENCE_S
        while running is not None and self._clock() < end:
            await asyncio.sleep(CANCEL_POLL_S)
            running = await self.learn(name, caller)
        return self.shown(name, caller) if running is None else running.response

    async def delete_everywhere(self, name: str, caller: str) -> Mapping[str, Any]:
        """As `delete`."""
        await self.learn(name, caller)
        self.delete(name, caller)
        if self._shared is not None:
            await self._shared.delete(name, caller)
        return {"id": name, "object": "response", "deleted": True}

    # Inside

    def _cancel_running(self, name: str, caller: str) -> None:
        if name in self._running:
            self.cancel(name, caller)

    def _take(self, name: str, caller: str, found: Record) -> None:
        """What another gateway has written."""
        left_s = min(found.expires - time.time(), self._time_to_live_s)
        try:
            messages = found.conversation()
        except ValueError:  # of another version of ours
            return
        if left_s > 0:
            self._keep(name, caller, found.response, messages, left_s)

    def _keep(
        self, name: str, caller: str, response: Mapping[str, Any], messages: Sequence[Message], time_to_live_s: float
    ) -> None:
        self._forget_old()
        num_characters = len(str(response)) + sum(len(str(message.content)) for message in messages)
        if num_characters > self._max_characters:
            return
        if name in self._stored:
            self._forget(name)
        expires = self._clock() + time_to_live_s
        self._stored[name] = Stored(response, messages, caller, num_characters, expires)
        self._num_characters += num_characters
        while len(self._stored) > self._max_responses or self._num_characters > self._max_characters:
            self._forget(next(iter(self._stored)))

    def _forget_old(self) -> None:
        now = self._clock()
        while self._stored and next(iter(self._stored.values())).expires <= now:
            self._forget(next(iter(self._stored)))

    def _forget(self, name: str) -> None:
        self._num_characters -= self._stored.pop(name).num_characters


def _not_found(name: str, param: str) -> ApiError:
    return ApiError(404, f"Response with id '{name[:80]}' not found.", param=param, code="response_not_found")
