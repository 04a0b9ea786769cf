"""When requests arrive, and how long they are: drawn at random, or read from a published trace. Pure functions."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from tandem.workers.errors import UserError

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens that one entry of `hash_ids` stands for."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come: `at_s` after the start, with so many tokens in and out."""

    at_s: float
    input_len: int
    output_len: int
    content_ids: tuple[int, ...] = ()
    """Equal ids stand for equal content: the prompt's first `content_block_len` tokens, the next ones, and so on."""
    content_block_len: int = 0


def lengths(rng: np.random.Generator, input_len: int, spread: int, output_len: int) -> tuple[int, int]:
    """Draw one request's lengths: input uniform in input_len +- spread, at least 1; output as given."""
    return max(1, int(rng.integers(input_len - spread, input_len + spread + 1))), output_len


def steady(seed: int, input_len: int, spread: int, output_len: int) -> Iterator[Arrival]:
    """Requests without end that are all there at the start, for a closed loop."""
    rng = np.random.default_rng(seed)
    while True:
        yield Arrival(0.0, *lengths(rng, input_len, spread, output_len))


def poisson(rate: float, seed: int, input_len: int, spread: int, output_len: int) -> Iterator[Arrival]:
    """Requests without end, with independent exponential gaps of mean 1/rate seconds."""
    rng = np.random.default_rng(seed)
    at_s = 0.0
    while True:
        at_s += float(rng.exponential(1.0 / rate))
        yield Arrival(at_s, *lengths(rng, input_len, spread, output_len))


def bounded(arrivals: Iterable[Arrival], duration_s: float, max_requests: int | None) -> Iterator[Arrival]:
    """The arrivals within `duration_s`, and no more than `max_requests` of them."""
    for number, arrival in enumerate(arrivals):
        if arrival.at_s > duration_s or (max_requests is not None and number >= max_requests):
            return
        yield arrival


def read_trace(path: Path, *, time_scale: float, length_scale: float) -> list[Arrival]:
    """Read a Mooncake trace (JSON lines) or an Azure trace (CSV), by the file's first character.

    Times are multiplied by `time_scale` (2 halves the rate) and start at 0; lengths are multiplied by `length_scale`
    and are at least 1. Raises `UserError` naming file and line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            is_json = lines.read(1) == "{"
            lines.seek(0)
            parse = _mooncake if is_json else _azure
            arrivals = sorted(parse(lines, path, length_scale), key=lambda arrival: arrival.at_s)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if not arrivals:
        raise UserError(f"{path}: holds no request")
    first_s = arrivals[0].at_s
    return [
        Arrival(
            (arrival.at_s - first_s) * time_scale,
            arrival.input_len,
            arrival.output_len,
            arrival.content_ids,
            arrival.content_block_len,
        )
        for arrival in arrivals
    ]


def _mooncake(lines: Iterable[str], path: Path, length_scale: float) -> Iterator[Arrival]:
    """`timestamp` in ms, `input_length` and `output_length` in tokens, `hash_ids` of the prompt's 512-token blocks."""
    block_len = _scaled(MOONCAKE_BLOCK_TOKENS, length_scale)
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _at_line(path, number, lambda: _mooncake_row(json.loads(line), block_len, length_scale))  # noqa: B023


def _mooncake_row(row: dict[str, object], block_len: int, length_scale: float) -> Arrival:
    hash_ids = row.get("hash_ids", [])
    if not isinstance(hash_ids, list):
        raise ValueError("hash_ids is not a list")
    return Arrival(
        float(str(row["timestamp"])) / 1000.0,
        _scaled(int(str(row["input_length"])), length_scale),
        _scaled(int(str(row["output_length"])), length_scale),
        tuple(int(hash_id) for hash_id in hash_ids),
        block_len,
    )


def _azure(lines: Iterable[str], path: Path, length_scale: float) -> Iterator[Arrival]:
    """`TIMESTAMP` (date and time), `ContextTokens`, `GeneratedTokens`."""
    reader = csv.DictReader(lines)
    wanted = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    missing = wanted - set(reader.fieldnames or ())
    if missing:
        raise UserError(f"{path}: neither a Mooncake nor an Azure trace: no column {', '.join(sorted(missing))}")
    for row in reader:
        yield _at_line(path, reader.line_num, lambda: _azure_row(row, length_scale))  # noqa: B023


def _azure_row(row: dict[str, str], length_scale: float) -> Arrival:
    # Seven digits of a second in the published file; the parser takes at most six.
    moment = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
    return Arrival(
        (moment - datetime(2000, 1, 1)).total_seconds(),
        _scaled(int(row["ContextTokens"]), length_scale),
        _scaled(int(row["GeneratedTokens"]), length_scale),
    )


def _at_line(path: Path, number: int, parse: Callable[[], Arrival]) -> Arrival:
    try:
        return parse()
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}:{number}: not a request of a trace: {type(error).__name__} {error}") from error


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale))
