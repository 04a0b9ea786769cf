"""Who hangs, who is slow, who fails: told apart by calls of which some never return."""

from __future__ import annotations

import threading

from tandem.cluster.pulse import MISSES, MOST_CALLS, Pulse

LONG_S = 10.0


class Ray:
    """Answers while it `runs`; whoever asks while it does not is held until it does."""

    def __init__(self) -> None:
        self.runs = threading.Event()
        self.runs.set()
        self.num_asked = 0

    def ask(self) -> None:
        self.num_asked += 1
        self.runs.wait()


def test_who_answers_is_asked_at_each_beat() -> None:
    ray = Ray()
    pulse = Pulse(ray.ask)
    for _ in range(3 * MISSES):
        pulse.beat()
        pulse.settle(LONG_S)
        assert not pulse.is_hung
    assert ray.num_asked == 3 * MISSES


def test_who_hangs_is_found_out_and_forgiven() -> None:
    ray = Ray()
    ray.runs.clear()
    pulse = Pulse(ray.ask)
    told = []
    for _ in range(3 * MISSES):
        pulse.beat()
        told.append(pulse.is_hung)
    assert told == [False] * MISSES + [True] * 2 * MISSES
    assert ray.num_asked == MOST_CALLS, "no more threads than that hang"
    ray.runs.set()
    pulse.settle(LONG_S)
    pulse.beat()
    assert not pulse.is_hung


def test_who_is_slow_does_not_hang() -> None:
    """Each answer takes nearly as long as is allowed."""
    ray = Ray()
    pulse = Pulse(ray.ask)
    for _ in range(3):
        ray.runs.clear()
        for _ in range(MISSES):
            pulse.beat()
            assert not pulse.is_hung
        ray.runs.set()
        pulse.settle(LONG_S)
    assert not pulse.is_hung


def test_an_error_is_no_answer() -> None:
    def fail() -> None:
        raise ConnectionError("nobody there")

    pulse = Pulse(fail)
    for _ in range(MISSES + 1):
        assert not pulse.is_hung
        pulse.beat()
        pulse.settle(LONG_S)
    assert pulse.is_hung


def test_whoever_waits_for_a_call_that_hangs_waits_no_longer_than_allowed() -> None:
    ray = Ray()
    ray.runs.clear()
    pulse = Pulse(ray.ask)
    pulse.beat()
    pulse.settle(0.0)
    ray.runs.set()
    pulse.settle(LONG_S)
