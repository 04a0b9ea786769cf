"""What tests of the engine share: an engine over the fake runner, and requests for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.workers.config import WorkerConfig
from tandem.workers.engine import Engine
from tandem.workers.fake_runner import FakeRunner, LaggingRunner
from tandem.workers.prefix_cache import CacheEvent
from tandem.workers.types import Choice, ModelIdentity, Request, Retention, SamplingParams


@pytest.fixture
def make_config() -> Callable[..., WorkerConfig]:
    def make(**changes: Any) -> WorkerConfig:
        values: dict[str, Any] = {"block_size": 4, "max_model_len": 256, "max_num_batched_tokens": 16}
        values |= {"model_path": Path("model"), "model_name": "fake", "role": "aggregated", "worker_id": "w0"}
        return WorkerConfig(**(values | changes))

    return make


@pytest.fixture(params=[False, True], ids=["in_order", "overlapping"])
def overlaps(request: pytest.FixtureRequest) -> bool:
    """Whether steps overlap. What looks into the engine between two steps asks for `IN_ORDER` (engine_play.py)."""
    return bool(request.param)


@pytest.fixture
def make_engine(make_config: Callable[..., WorkerConfig], overlaps: bool) -> Callable[..., Engine]:
    """An engine over a `FakeRunner` with a pool of the same size: 4 tokens per block, 16 tokens per step.

    Where steps overlap, the runner's device lags: it computes as late as it can.
    """

    def make(num_blocks: int, on_cache_event: CacheEvent | None = None, **changes: Any) -> Engine:
        config = make_config(**changes)
        identity = ModelIdentity(
            protocol_version=1,
            model="fake",
            revision="0",
            dtype="uint64",
            numerics="any",
            layout_version=1,
            block_size=config.block_size,
            block_bytes=8 * config.block_size,
            max_model_len=config.max_model_len,
        )
        runner = (LaggingRunner if overlaps else FakeRunner)(num_blocks, config.block_size)
        vocab_size = runner.vocab_size
        return Engine(runner, config, num_blocks, identity, on_cache_event, vocab_size=vocab_size, overlaps=overlaps)

    return make


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """A request by id and prompt; `emitted` is {choice: tokens that the client has}; the rest are sampling fields."""

    def make(
        request_id: str,
        prompt: list[int] | range,
        *,
        max_tokens: int = 8,
        seed: int = 0,
        salt: str = "",
        emitted: dict[int, list[int]] | None = None,
        retention: Retention | None = None,
        **sampling: Any,
    ) -> Request:
        choices = (emitted or {0: []}).items()
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, seed=seed, **sampling),
            choices=tuple(Choice(index=index, emitted_token_ids=tuple(ids)) for index, ids in choices),
            salt=salt,
            retention=retention or Retention(),
        )

    return make
