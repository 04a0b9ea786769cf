"""How much is let into the house: a bound on sequences in flight, and the door that closes for a shutdown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tandem.router.errors import ApiError, bad_request, shutting_down


class Admission:
    """Counts sequences from admission to their end. Whether they run or wait is the workers' affair."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self.num_in_flight = 0
        self.is_draining = False

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
