"""Phases of a worker's start: told, timed, summed up; and the tuner as one of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.kernels.autotune import (
    Candidate,
    Choices,
    DeviceKey,
    Tunable,
    TuningKey,
    TuningWorkload,
)
from tandem.kernels.ops import PackedLinear
from tandem.kernels.reference import ReferenceOps
from tandem.workers.models.config import ModelConfig, RopeConfig
from tandem.workers.warm_up import WarmUp, tuning_workload

CONFIG = ModelConfig(
    architecture="mistral",
    vocab_size=40,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    rope=RopeConfig(theta=10000.0),
    sliding_window=(16, None),
)


class FakeOps(ReferenceOps):
    """A backend with one choice between two ways of doing nothing."""

    def __init__(self) -> None:
        self.used: list[Choices] = []

    def device_key(self) -> DeviceKey:
        return DeviceKey("a machine", 1, {})

    def tunables(self, workload: TuningWorkload) -> Sequence[Tunable]:
        key = TuningKey("linear", "32x64", 1, workload.dtype)
        return [Tunable(key, (Candidate.of(a=1), Candidate.of(a=2)), lambda candidate: lambda: None)]

    def use_choices(self, choices: Choices) -> None:
        self.used.append(choices)


@pytest.fixture
def workload() -> TuningWorkload:
    return tuning_workload(
        CONFIG,
        (PackedLinear(32, 64),),
        dtype="float32",
        block_size=32,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        max_model_len=64,
    )


def test_phases_are_told_timed_and_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    now = [0.0]
    warm_up = WarmUp(told.append, clock=lambda: now[0])

    def capture() -> None:
        with warm_up.phase("capturing steps"):
            for done in range(40):
                warm_up.advance(done, 40)
            now[0] += 1.5
            raise ValueError

    with caplog.at_level(logging.INFO):
        with warm_up.phase("loading weights"):
            now[0] += 2
        with pytest.raises(ValueError):
            capture()
    assert told == ["loading weights", "capturing steps", *(f"capturing steps: {ten} %" for ten in range(10, 100, 10))]
    assert caplog.messages == ["loading weights took 2.0 s", "capturing steps took 1.5 s"]
    assert warm_up.summary() == "loading weights 2.0 s, capturing steps 1.5 s"


def test_the_workload_is_what_a_worker_with_these_limits_asks_for(workload: TuningWorkload) -> None:
    assert (workload.num_heads, workload.num_kv_heads, workload.head_dim) == (4, 2, 16)
    assert (workload.max_rows, workload.max_seqs, workload.max_context) == (512, 16, 64)
    assert workload.windows == frozenset({16, None})


def test_the_backend_uses_what_was_chosen(tmp_path: Path, workload: TuningWorkload) -> None:
    ops, told = FakeOps(), list[str]()
    warm_up = WarmUp(told.append)
    report = warm_up.tune(ops, workload, tmp_path / "tuning.json", deadline_s=60)
    assert report is not None
    assert report.count("measured") == 1
    (choices,) = ops.used
    assert choices.get(TuningKey("linear", "32x64", 4, "float32")) is not None
    assert told == ["tuning kernels", "tuning kernels: 100 %"]
    again = warm_up.tune(ops, workload, tmp_path / "tuning.json", deadline_s=60)
    assert again is not None
    assert again.count("cache") == 1


def test_a_deadline_that_was_too_short_is_said(workload: TuningWorkload, caplog: pytest.LogCaptureFixture) -> None:
    ops = FakeOps()
    WarmUp(lambda phase: None).tune(ops, workload, None, deadline_s=1e-9)
    assert caplog.messages == ["no time to tune 1 kernels of 1: they keep their defaults"]
    assert len(ops.used) == 1


def test_a_backend_without_choices_is_left_alone(workload: TuningWorkload) -> None:
    warm_up = WarmUp(lambda phase: None)
    assert warm_up.tune(ReferenceOps(), workload, None, deadline_s=60) is None
    assert warm_up.phases == []
