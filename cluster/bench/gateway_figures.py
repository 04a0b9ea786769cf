"""When which token was sent and when it was read, put together. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NUM_FIRST_EVENTS = 1
"""Events before the first token: the one with the role."""


@dataclass(frozen=True, slots=True)
class Way:
    """All tokens that were sent within a time."""

    num_tokens: int
    """That were read within that time."""
    num_reads: int
    latencies: list[float]
    """Of those sent within that time, in seconds."""


def ways(
    stamps: Mapping[str, Any], reads: Mapping[str, Sequence[tuple[float, int]]], began: float, ended: float
) -> Way:
    """`stamps`: as `gateway_workers` tells them. `reads`: as `gateway_load` does. A client sees one event per token,
    behind `NUM_FIRST_EVENTS` others."""
    latencies: list[float] = []
    num_tokens = num_reads = 0
    for name, told in stamps["told"].items():
        steps = stamps["steps"][told["worker"]]
        first = told["first_step"]
        sent = [told["first_at"], *steps[first : first + told["num_tokens"] - 1]]
        stream = reads.get(name, ())
        num_reads += sum(began <= at < ended and count > 0 for at, count in stream)
        for sent_at, read_at in zip(sent, _token_times(stream), strict=False):
            num_tokens += began <= read_at < ended
            if began <= sent_at < ended:
                latencies.append(read_at - sent_at)
    return Way(num_tokens, num_reads, latencies)


def _token_times(stream: Sequence[tuple[float, int]]) -> Iterator[float]:
    """When each token of a stream was read."""
    skipped = 0
    for at, count in stream:
        for _ in range(count):
            if skipped < NUM_FIRST_EVENTS:
                skipped += 1
            else:
                yield at
