"""What tests of the engine do to it: run it to its end, and play the part of everybody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tandem.workers.batch import BatchItem, SampledToken, SampleSpec
from tandem.workers.engine import Engine
from tandem.workers.fake_runner import FakeRunner
from tandem.workers.sequence import Sequence, Status
from tandem.workers.types import Request

MakeEngine = Callable[..., Engine]
MakeRequest = Callable[..., Request]

IN_ORDER = pytest.mark.parametrize("overlaps", [False], ids=["in_order"], indirect=True)
"""For tests that look into the engine between two steps, or decide a step themselves."""


def run(engine: Engine, max_steps: int = 2000) -> dict[tuple[str, int], list[int]]:
    """Step until nothing is left, checking all books each time. Tokens by request and choice."""
    tokens: dict[tuple[str, int], list[int]] = {}
    for _ in range(max_steps):
        if engine.is_idle:
            return tokens
        for output in engine.step():
            assert output.error is None
            if output.token is not None:
                key = (output.sequence.request_id, output.sequence.choice)
                tokens.setdefault(key, []).append(output.token.token_id)
        engine.check()
    raise AssertionError(f"not finished after {max_steps} steps: {engine.counts()}")


def runner_of(engine: Engine) -> FakeRunner:
    assert isinstance(engine.runner, FakeRunner)
    return engine.runner


def fill(engine: Engine, sequence: Sequence, start: int, end: int) -> None:
    """What a perfect pull does: the KV of tokens `start` to `end`, as another worker would have computed it."""
    runner_of(engine)._write(BatchItem(sequence.token_ids[start:end], start, sequence.block_ids, None))


def next_token(engine: Engine, sequence: Sequence) -> SampledToken:
    """What the other worker sends with the last part: the token after all that the sequence has."""
    tokens = sequence.token_ids
    spec = SampleSpec(sequence.params, sequence.choice, len(tokens), tokens, sequence.num_prompt_tokens)
    token = runner_of(engine)._sample(BatchItem(tokens, 0, sequence.block_ids, spec))
    assert token is not None
    return token


async def until(is_true: Callable[[], bool]) -> None:
    """Let the loop run until it is so, at most some seconds."""
    for _ in range(5000):
        if is_true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("waited in vain")


def start_handover(engine: Engine, request: Request) -> Sequence:
    [sequence] = engine.add(request, wants_remote=True)
    assert engine.step() == []
    assert sequence.status is Status.INCOMING
    return sequence
