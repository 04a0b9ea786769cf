"""What a worker learns of its own speed."""

from __future__ import annotations

import random

import pytest

from tandem.workers.speeds import Line, LineEstimate, SpeedMeter
from tandem.workers.types import WorkerSpeeds

START = Line(at_zero=2.0, slope=0.1)


def test_nothing_measured_is_not_told() -> None:
    assert LineEstimate(START).line() is None
    assert SpeedMeter().speeds() == WorkerSpeeds()


def test_one_size_scales_the_start() -> None:
    estimate = LineEstimate(START)
    estimate.observe(10, 6.0)  # the start line says 3
    assert estimate.line() == Line(at_zero=4.0, slope=0.2)


def test_noisy_line_is_found() -> None:
    rng, estimate = random.Random(0), LineEstimate(START)
    for _ in range(2000):
        x = rng.randrange(1, 64)
        estimate.observe(x, (20 + 0.5 * x) * rng.uniform(0.7, 1.3))
    line = estimate.line()
    assert line is not None
    assert line.at_zero == pytest.approx(20, rel=0.1)
    assert line.slope == pytest.approx(0.5, rel=0.25)


def test_outlier_moves_little_and_a_lasting_change_gets_through() -> None:
    estimate = LineEstimate(Line(1.0, 0.0))
    for _ in range(50):
        estimate.observe(8, 10.0)
    estimate.observe(8, 1000.0)
    line = estimate.line()
    assert line is not None
    assert 10 < line.at_zero < 13
    for _ in range(80):
        estimate.observe(8, 100.0)
    line = estimate.line()
    assert line is not None
    assert line.at_zero == pytest.approx(100, rel=0.05)


def test_long_hours_at_one_load_do_not_forget_the_others() -> None:
    estimate = LineEstimate(START)
    for x in (1, 2, 4, 8, 16, 32) * 10:
        estimate.observe(x, 10 + x)
    for _ in range(5000):
        estimate.observe(4, 14)
    line = estimate.line()
    assert line is not None
    assert (line.at_zero, line.slope) == (pytest.approx(10), pytest.approx(1))


def test_sizes_side_by_side_say_nothing_about_the_slope() -> None:
    estimate = LineEstimate(Line(1.0, 0.0))
    estimate.observe(63, 1.0)
    estimate.observe(64, 1.2)
    assert estimate.line() == Line(pytest.approx(1.1), 0.0)


@pytest.mark.parametrize("points", [[(1, 5.0), (64, 3.0)], [(10, 1.0), (1000, 1000.0)]])
def test_neither_part_is_negative(points: list[tuple[int, float]]) -> None:
    estimate = LineEstimate(START)
    for x, y in points:
        estimate.observe(x, y)
    line = estimate.line()
    assert line is not None
    assert line.at_zero >= 0
    assert line.slope >= 0


def test_mixed_steps_are_taken_apart() -> None:
    """Decoding takes 10 ms + 1 ms a sequence; a prompt's token 0.2 ms + 0.1 us per token that it attends to."""
    meter = SpeedMeter()
    for num in (1, 4, 16, 32):
        meter.observe_step(0.01 + 0.001 * num, num_decodes=num, num_prefill_tokens=0, num_attended=0)
    for start in (0, 512, 1024, 4096):
        attended = 512 * start + 512 * 513 // 2
        seconds = 0.001 * 8 + 512 * 0.0002 + attended * 1e-7
        meter.observe_step(seconds, num_decodes=8, num_prefill_tokens=512, num_attended=attended)
    speeds = meter.speeds()
    assert speeds.decode_step_s == pytest.approx(0.01)
    assert speeds.decode_sequence_s == pytest.approx(0.001)
    assert speeds.prefill_token_s == pytest.approx(0.0002)
    assert speeds.prefill_attended_s == pytest.approx(1e-7)
