"""The order of eviction against a list that is sorted each time; the estimates that decide on a fill."""

from __future__ import annotations

import random

import pytest

from tandem.workers.offload.rates import (
    FORGETTING_S,
    UNKNOWN_TOKEN_S,
    MeasuredPath,
    PathSpeed,
    compute_seconds,
)
from tandem.workers.offload.records import EvictionOrder
from tandem.workers.types import WorkerSpeeds


def test_eviction_order_against_a_twin() -> None:
    rng = random.Random(1)
    order, twin = EvictionOrder(), dict[bytes, tuple[int, int]]()
    for tick in range(20_000):
        key = bytes([rng.randrange(60)])
        match rng.randrange(4):
            case 0:
                priority = rng.choice([0, 35, 35, 35, 100])
                order.add(key, priority)
                twin[key] = (priority, tick)
            case 1:
                order.touch(key)
                if key in twin:
                    twin[key] = (twin[key][0], tick)
            case 2:
                order.remove(key)
                twin.pop(key, None)
            case 3:
                first = order.first()
                assert first == min(twin, key=lambda key: twin[key], default=None)
                if first is not None and rng.random() < 0.5:
                    order.remove(first)
                    del twin[first]
        assert len(order) == len(twin)


def test_the_price_of_computing() -> None:
    assert compute_seconds(WorkerSpeeds(), 32, 64) == pytest.approx(32 * UNKNOWN_TOKEN_S)
    speeds = WorkerSpeeds(prefill_token_s=0.001, prefill_attended_s=0.00001)
    whole = compute_seconds(speeds, 0, 100)
    assert whole == pytest.approx(0.1 + 0.00001 * sum(range(1, 101)))
    assert compute_seconds(speeds, 0, 60) + compute_seconds(speeds, 60, 100) == pytest.approx(whole)


def test_a_path_is_learned_and_its_bad_moments_are_forgotten() -> None:
    now = 0.0
    path = MeasuredPath(PathSpeed(bytes_per_s=1e9, latency_s=0.001), clock=lambda: now)
    assert path.speed.seconds(10**9) == pytest.approx(1.001)
    for _ in range(50):
        path.observe(10**6, 0.101)  # 10 MB/s
    assert path.speed.bytes_per_s == pytest.approx(1e7, rel=0.05)
    now = FORGETTING_S + 1
    assert path.speed.bytes_per_s == 1e9
    path.observe(10**6, 0.101)
    assert path.speed.bytes_per_s == pytest.approx(1e7, rel=0.05)
