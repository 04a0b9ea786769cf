"""Responses that are kept, for a while and up to a bound, and those that are being written.

In the memory of this process: a restart forgets them. Each belongs to the key that asked for it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.router.errors import ApiError, bad_request
from tandem.router.openai.messages import Message

MAX_RESPONSES = 4096
MAX_CHARACTERS = 64 << 20
TIME_TO_LIVE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, and the conversation up to and including it."""

    response: Mapping[str, Any]
    messages: Sequence[Message]
    caller: str
    num_characters: int
    expires: float


class ResponseStore:
    """`clock` counts seconds. The oldest go first when there are too many."""

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

    def begin(self, name: str, caller: str, shown: Callable[[], Mapping[str, Any]], cancel: Callable[[], None]) -> None:
        """A response is being written. `shown`: what there is of it."""
        self._running[name] = (caller, shown, cancel)

    def end(self, name: str) -> None:
        self._running.pop(name, None)

    def put(self, name: str, caller: str, response: Mapping[str, Any], messages: Sequence[Message]) -> None:
        self._forget_old()
        num_characters = len(str(response)) + sum(len(str(message.content)) for message in messages)
        if num_characters > self._max_characters:
            return
        expires = self._clock() + self._time_to_live_s
        self._stored[name] = Stored(response, messages, caller, num_characters, expires)
        self._num_characters += num_characters
        while len(self._stored) > self._max_responses or self._num_characters > self._max_characters:
            self._forget(next(iter(self._stored)))

    def get(self, name: str, caller: str, *, param: str = "response_id") -> Stored:
        """Raises `ApiError` 404 for one that is unknown, forgotten, or somebody else's."""
        self._forget_old()
        stored = self._stored.get(name)
        if stored is None or stored.caller != caller:
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

    def _forget_old(self) -> None:
        now = self._clock()
        while self._stored and next(iter(self._stored.values())).expires <= now:
            self._forget(next(iter(self._stored)))

    def _forget(self, name: str) -> None:
        self._num_characters -= self._stored.pop(name).num_characters


def _not_found(name: str, param: str) -> ApiError:
    return ApiError(404, f"Response with id '{name[:80]}' not found.", param=param, code="response_not_found")
