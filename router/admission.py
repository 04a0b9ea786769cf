"""How much is let into the house: a bound on sequences in flight, and the door that closes for a shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.router.errors import ApiError, bad_request, shutting_down

logger = logging.getLogger(__name__)


class Admission:
    """Counts sequences from admission to their end. Whether they run or wait is the workers' affair."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self.num_in_flight = 0
        self.is_draining = False
        self._num_open = 0
        self._empty = asyncio.Event()
        self._empty.set()

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
    def admit(self, num_sequences: int) -> Iterator[None]:
        """Holds room for these sequences. Raises `ApiError` 429 when there is none, 503 when draining."""
        if self.is_draining:
            raise shutting_down()
        if num_sequences > self._max_in_flight:
            raise bad_request(
                f"This request asks for {num_sequences} sequences, more than the server ever runs at once."
            )
        if self.num_in_flight + num_sequences > self._max_in_flight:
            raise ApiError(
                429,
                "The server has as many requests as it can take. Please try again shortly.",
                type="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        self.num_in_flight += num_sequences
        try:
            yield
        finally:
            self.num_in_flight -= num_sequences
