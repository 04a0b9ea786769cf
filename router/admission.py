"""How much is let into the house: a bound on sequences in flight, the door that closes for a shutdown, and a queue for
what would miss the configured limits now.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from bisect import insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.router.errors import ApiError, bad_request, shutting_down, too_many
from tandem.workers.types import PRIORITY_S

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""Predictions also change without anything leaving us: other gateways' requests end, snapshots come."""
LONGEST_WAIT_S = 10.0
"""Where only the time between tokens is limited."""
LONGEST_RETRY_S = 60
PROBE_S = 10.0
"""A prediction that misses the limits although nobody is there may be out of date: speeds are learned from requests
alone, so after a bad minute all would be refused for ever. After so long without any, one is let in to find out."""


class Admission:
    """Counts sequences from admission to their end. Whether they run or wait is the workers' affair."""

    def __init__(self, max_in_flight: int, max_prompt_tokens: int) -> None:
        self._max_in_flight = max_in_flight
        self._max_prompt_tokens = max_prompt_tokens
        self.num_in_flight = 0
        self.num_prompt_tokens = 0
        self.is_cluster_draining: Callable[[], bool] = lambda: False
        """Whether the workers are about to stop, by somebody else's will."""
        self._is_closed = False
        self._num_open = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_draining(self) -> bool:
        """Nobody is let in."""
        return self._is_closed or self.is_cluster_draining()

    def close_door(self) -> None:
        """For good."""
        self._is_closed = True

    @contextmanager
    def open_door(self) -> Iterator[None]:
        """A request is in the house, from its first byte to the last of its answer."""
        self._num_open += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._empty.set()

    async def until_empty(self, timeout_s: float) -> None:
        """Returns when no request is in the house, or when the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            logger.info("%d requests are still in the house", self._num_open)

    @contextmanager
    def admit(self, num_sequences: int, num_prompt_tokens: int) -> Iterator[None]:
        """Holds room for these sequences and prompts. Raises `ApiError` 429 when there is none, 503 when draining."""
        if self.is_draining:
            raise shutting_down()
        if num_sequences > self._max_in_flight:
            raise bad_request(
                f"This request asks for {num_sequences} sequences, more than the server ever runs at once."
            )
        has_room = self.num_in_flight + num_sequences <= self._max_in_flight
        # a request that is alone may be as large as it likes: other limits hold for it
        if self.num_in_flight and self.num_prompt_tokens + num_prompt_tokens > self._max_prompt_tokens:
            has_room = False
        if not has_room:
            raise too_many("The server has as many requests as it can take. Please try again shortly.")
        self.num_in_flight += num_sequences
        self.num_prompt_tokens += num_prompt_tokens
        try:
            yield
        finally:
            self.num_in_flight -= num_sequences
            self.num_prompt_tokens -= num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a request that would be let in now, in seconds. `queue_s`: the part of `ttft_s` that waits for others.
    `is_alone`: its workers have nothing else to do."""

    ttft_s: float
    queue_s: float
    itl_s: float
    is_alone: bool = False


@dataclass(slots=True, eq=False)
class _Waiting:
    predict: Callable[[], Prediction]
    book: Callable[[], None]
    arrived: float
    rank: float
    """Its place in line: when it came, and with a priority so much later."""
    let_in: asyncio.Future[None]


class Gate:
    """Lets a request in when it is predicted to meet the limits; others wait in line, and are refused when it is too
    late for them, or the line too long. What was let in is never refused later.

    `clock` is the one that `arrived` was read from. A limit that is None is no limit.
    """

    def __init__(
        self,
        slo_ttft_s: float | None,
        slo_itl_s: float | None,
        max_queue: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._slo_ttft_s = slo_ttft_s
        self._slo_itl_s = slo_itl_s
        self._max_queue = max_queue
        self._clock = clock
        self._waiting: list[_Waiting] = []
        self._pump: asyncio.Task[None] | None = None
        self._last_entry = -math.inf
        self._changed = asyncio.Event()

    @property
    def has_limits(self) -> bool:
        return self._slo_ttft_s is not None or self._slo_itl_s is not None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def notify(self) -> None:
        """Something has ended: whoever is first in line may fit now."""
        self._changed.set()

    async def enter(
        self, predict: Callable[[], Prediction], book: Callable[[], None], arrived: float, priority: int = 0
    ) -> None:
        """Returns once `book` was called, which is done the moment that `predict` meets the limits, before anybody
        else is looked at. Raises `ApiError` 429, and what the two raise."""
        prediction = predict()
        rank = arrived + PRIORITY_S * priority
        is_first = not self._waiting or rank < self._waiting[0].rank
        if is_first and self._may_enter(prediction, arrived):
            self._let_in_by(book)
            return
        left_s = self._latest_entry(prediction, arrived) - self._clock()
        if left_s <= 0 or len(self._waiting) >= self._max_queue:
            raise self._refusal(prediction)
        waiting = _Waiting(predict, book, arrived, rank, asyncio.get_running_loop().create_future())
        insort(self._waiting, waiting, key=lambda each: each.rank)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._let_in(), name="gate")
        try:
            async with asyncio.timeout(left_s):
                await waiting.let_in
        except TimeoutError:
            if not waiting.let_in.done() or waiting.let_in.cancelled():
                raise self._refusal(predict()) from None
            waiting.let_in.result()  # in the same moment: let in, or an error
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            self.notify()

    def _may_enter(self, prediction: Prediction, arrived: float) -> bool:
        is_probe = prediction.is_alone and self._clock() - self._last_entry >= PROBE_S
        return is_probe or self._fits(prediction, arrived)

    def _let_in_by(self, book: Callable[[], None]) -> None:
        book()
        self._last_entry = self._clock()

    def _fits(self, prediction: Prediction, arrived: float) -> bool:
        waited_s = self._clock() - arrived
        if self._slo_ttft_s is not None and waited_s + prediction.ttft_s > self._slo_ttft_s:
            return False
        return self._slo_itl_s is None or prediction.itl_s <= self._slo_itl_s

    def _latest_entry(self, prediction: Prediction, arrived: float) -> float:
        """From then on it would be late even if nobody were before it."""
        if self._slo_ttft_s is None:
            return arrived + LONGEST_WAIT_S
        return arrived + self._slo_ttft_s - (prediction.ttft_s - prediction.queue_s)

    def _refusal(self, prediction: Prediction) -> ApiError:
        """What waits ahead passes at a second per second: by so much the client is too early."""
        excess_s = 0.0 if self._slo_ttft_s is None else prediction.ttft_s - self._slo_ttft_s
        return too_many(
            "The server is too busy to answer within its time limits. Please try again later.",
            retry_after_s=min(LONGEST_RETRY_S, max(1, math.ceil(excess_s))),
        )

    async def _let_in(self) -> None:
        """By rank, while somebody waits."""
        while self._waiting:
            first = self._waiting[0]
            try:
                if not first.let_in.done() and self._may_enter(first.predict(), first.arrived):
                    self._let_in_by(first.book)
                    first.let_in.set_result(None)
            except ApiError as error:
                first.let_in.set_exception(error)
            if first.let_in.done():
                self._waiting.pop(0)
                continue
            self._changed.clear()
            try:
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
