"""The rules of the autotuner, with a clock and timings that the tests hold in their hands."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tandem.kernels.autotune import (
    Candidate,
    CandidateUnavailable,
    Choices,
    DeviceKey,
    Tunable,
    TuningKey,
    TuningReport,
    TuningResult,
    bucket_of,
    buckets_up_to,
    tune,
)
from tandem.kernels.tuning_cache import Remembered, TuningLock, merge_results, read_results
from tandem.kernels.tuning_rounds import MIN_ROUNDS, TIE, Rounds

DEVICE = DeviceKey("a machine", 1, {"torch": "2.13"})
SLICE_S = 8e-3


class Machine:
    """A device on which a candidate takes as long as it is told to; its clock moves only when something runs.

    `jitter` is relative and one-sided, `slices` the chance per millisecond that the scheduler takes 8 ms away.
    """

    def __init__(self, *, seed: int = 0, jitter: float = 0.0, slices: float = 0.0) -> None:
        self.now = 100.0
        self.calls: dict[tuple[int, str], int] = {}
        self.released: list[int] = []
        self._random = random.Random(seed)
        self._jitter = jitter
        self._slices = slices

    def clock(self) -> float:
        return self.now

    def tunable(
        self,
        seconds: Mapping[str, float],
        *,
        bucket: int = 1,
        unavailable: str = "",
        on_call: Callable[[], None] | None = None,
    ) -> Tunable:
        """One tunable whose candidates take `seconds`, in that order."""

        def prepare(candidate: Candidate) -> Callable[[], None]:
            if candidate.name == unavailable:
                raise CandidateUnavailable
            return lambda: call(candidate.name)

        def call(name: str) -> None:
            self.calls[bucket, name] = self.calls.get((bucket, name), 0) + 1
            took = seconds[name] * (1 + abs(self._random.gauss(0, self._jitter)))
            self.now += took + (SLICE_S if self._random.random() < self._slices * took / 1e-3 else 0)
            if on_call is not None:
                on_call()

        candidates = tuple(Candidate(name, {}) for name in seconds)
        return Tunable(key(bucket), candidates, prepare, timer=self.clock, release=lambda: self.released.append(bucket))

    def tune(self, *tunables: Tunable, cache: Path | None = None, **options: Any) -> TuningReport:
        options = {"deadline_s": 60.0, "progress": ignore, **options}
        return tune(tunables, DEVICE, cache, clock=self.clock, **options)


def ignore(message: str, done: int, total: int) -> None:
    pass


def key(bucket: int, shape: str = "576x960") -> TuningKey:
    return TuningKey("linear", shape, bucket, "bfloat16")


def chosen(report: TuningReport) -> list[str]:
    return [result.choice.name for result in report.results]


# Candidates and choices


def test_the_fastest_wins_by_a_gap_that_is_real() -> None:
    machine = Machine()
    report = machine.tune(machine.tunable({"slow": 1.2e-4, "fast": 1e-4, "other": 1.1e-4}))
    (result,) = report.results
    assert (result.choice.name, result.source) == ("fast", "measured")
    assert result.seconds == pytest.approx({"slow": 1.2e-4, "fast": 1e-4, "other": 1.1e-4})
    assert result.noise == pytest.approx(0)
    assert result.num_rounds == MIN_ROUNDS
    assert machine.released == [1]


@pytest.mark.parametrize(("gap", "winner"), [(0.0, "first"), (TIE - 0.002, "first"), (TIE + 0.002, "second")])
def test_within_a_tie_the_first_in_the_fixed_order_wins(gap: float, winner: str) -> None:
    machine = Machine()
    assert chosen(machine.tune(machine.tunable({"first": (1 + gap) * 1e-4, "second": 1e-4, "third": 1e-4}))) == [winner]


@pytest.mark.parametrize(("jitter", "slices"), [(0.01, 0.0), (0.05, 0.02), (0.1, 0.1)])
def test_fifty_tunings_of_a_noisy_machine_choose_the_same(jitter: float, slices: float) -> None:
    def one(seed: int) -> list[str]:
        machine = Machine(seed=seed, jitter=jitter, slices=slices)
        real_gap = machine.tunable({"a": 1.15e-4, "b": 1e-4, "c": 1.2e-4})
        no_gap = machine.tunable({"a": 1.002e-4, "b": 1e-4, "c": 1.001e-4}, bucket=2)
        return chosen(machine.tune(real_gap, no_gap))

    assert {tuple(one(seed)) for seed in range(50)} == {("b", "a")}


def test_rounds_go_on_while_it_is_noisy() -> None:
    quiet, noisy = Machine(jitter=0.002), Machine(jitter=2.0)
    seconds = {"a": 1.05e-4, "b": 1e-4}
    few, many = (machine.tune(machine.tunable(seconds)).results[0].num_rounds for machine in (quiet, noisy))
    assert few < 8
    assert many > 2 * few


def test_the_noise_is_what_one_candidate_shows_against_itself() -> None:
    rounds = Rounds(num_candidates=2, twin_of=1)
    for _ in range(9):
        rounds.add([1.00, 1.04, 1.04 * 1.12])
    assert rounds.noise() == pytest.approx(0.12)
    assert rounds.winner() == 0
    rounds = Rounds(num_candidates=2, twin_of=0)
    for _ in range(9):
        rounds.add([1.10, 1.00, 1.10 * 1.12])
    assert rounds.winner() == 0  # 10 % slower, but 12 % is what nothing at all makes
    rounds = Rounds(num_candidates=2, twin_of=0)
    for _ in range(9):
        rounds.add([1.10, 1.00, 1.10])
    assert rounds.winner() == 1


@pytest.mark.parametrize(
    ("seconds", "noise", "is_clear"),
    [
        ([1.01, 1.00, 1.30], 0.02, True),
        ([1.20, 1.00, 1.07], 0.02, True),  # who comes behind the winner need not be known better
        ([1.07, 1.00, 1.30], 0.02, False),  # a tie, or not?
        ([1.09, 1.00, 1.30], 0.02, False),
        ([1.09, 1.00, 1.30], 0.005, True),
        ([1.01, 1.00, 1.30], 0.09, False),
    ],
)
def test_rounds_go_on_while_the_winner_is_a_toss_up(seconds: list[float], noise: float, is_clear: bool) -> None:
    rounds = Rounds(num_candidates=3, twin_of=1)
    for _ in range(9):
        rounds.add([*seconds, 1.00 * (1 + noise)])
    assert rounds.is_clear() == is_clear


def test_a_slow_candidate_is_dropped_after_the_first_rounds() -> None:
    machine = Machine()
    report = machine.tune(machine.tunable({"slow": 2e-4, "a": 1e-4, "b": 1.1e-4}))
    assert chosen(report) == ["a"]
    assert machine.calls[1, "slow"] < 0.7 * machine.calls[1, "b"]
    assert report.results[0].seconds == pytest.approx({"slow": 2e-4, "a": 1e-4, "b": 1.1e-4})


def test_what_slows_down_a_whole_round_changes_nothing() -> None:
    rounds = Rounds(num_candidates=2, twin_of=0)
    for load in (1, 3, 1, 1.5, 4, 2, 1):
        rounds.add([1.1 * load, 1.0 * load, 1.1 * load])
    assert rounds.noise() == pytest.approx(0)
    slow, fast = rounds.seconds()
    assert slow / fast == pytest.approx(1.1)


def test_an_absurd_candidate_is_dropped_after_its_first_runs() -> None:
    machine = Machine()
    report = machine.tune(machine.tunable({"absurd": 5e-4, "a": 1e-4, "b": 1.1e-4}))
    assert chosen(report) == ["a"]
    assert machine.calls[1, "absurd"] == 1 + 3
    assert machine.calls[1, "a"] > 2 * MIN_ROUNDS
    assert report.results[0].seconds["absurd"] == pytest.approx(5e-4)


def test_if_all_others_are_absurd_there_is_nothing_to_measure() -> None:
    machine = Machine()
    report = machine.tune(machine.tunable({"absurd": 5e-4, "a": 1e-4}))
    assert chosen(report) == ["a"]
    assert report.results[0].source == "measured"
    assert machine.calls[1, "a"] == 4


def test_a_candidate_that_the_device_cannot_run_is_left_out() -> None:
    machine = Machine()
    report = machine.tune(machine.tunable({"big": 5e-5, "a": 1e-4, "b": 1.1e-4}, unavailable="big"))
    assert chosen(report) == ["a"]
    assert report.results[0].unavailable == ("big",)


def test_one_candidate_is_not_measured() -> None:
    machine = Machine()
    report = machine.tune(machine.tunable({"only": 1e-4}))
    assert (chosen(report), report.results[0].source, machine.calls) == (["only"], "only", {})


def test_seconds_are_those_of_one_op_however_many_a_call_runs() -> None:
    machine = Machine()
    one = machine.tunable({"a": 1e-4, "b": 2e-4})
    many = Tunable(one.key, one.candidates, one.prepare, ops_per_call=10, timer=machine.clock)
    assert machine.tune(many).results[0].seconds == pytest.approx({"a": 1e-5, "b": 2e-5})


# Time


def test_at_the_deadline_what_is_left_keeps_its_default() -> None:
    machine = Machine()
    seconds = {"default": 2e-3, "better": 1.5e-3}
    tunables = [machine.tunable(seconds, bucket=bucket) for bucket in (1, 2, 4, 8)]
    report = machine.tune(*tunables, deadline_s=0.2)
    assert [result.source for result in report.results] == ["measured", "measured", "default", "default"]
    assert chosen(report) == ["better", "better", "default", "default"]
    assert 0.2 <= report.elapsed_s < 0.2 + 2e-3
    assert machine.released == [1, 2, 4]  # what was begun is released, too
    assert report.choices.get(key(8)) == tunables[0].candidates[0]


def test_a_noisy_tunable_takes_no_more_than_its_share() -> None:
    machine = Machine(jitter=0.5)
    report = machine.tune(*(machine.tunable({"a": 1e-3, "b": 1e-3}, bucket=1 << n) for n in range(10)), deadline_s=2)
    assert report.count("measured") == 10
    assert report.elapsed_s < 2 + 5e-3


def test_no_time_at_all() -> None:
    machine = Machine()
    report = machine.tune(machine.tunable({"a": 2e-4, "b": 1e-4}), deadline_s=0)
    assert (chosen(report), report.count("default"), machine.calls) == (["a"], 1, {})


def test_progress_tells_how_many_are_done() -> None:
    machine = Machine()
    seen: list[tuple[str, int, int]] = []
    machine.tune(
        *(machine.tunable({"a": 1e-4, "b": 1e-4}, bucket=bucket) for bucket in (1, 2)),
        progress=lambda *told: seen.append(told),
    )
    assert seen == [
        ("tuning linear 576x960 at 1", 0, 2),
        ("tuning linear 576x960 at 2", 1, 2),
        ("tuned", 2, 2),
    ]


# Memory


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    cache = tmp_path / "tuning.json"
    machine = Machine()
    tunable = machine.tunable({"a": 2e-4, "b": 1.5e-4, "c": 1e-3})
    first = machine.tune(tunable, cache=cache)
    machine.calls.clear()
    second = machine.tune(tunable, cache=cache)
    assert machine.calls == {}
    assert second.results[0].source == "cache"
    assert chosen(second) == chosen(first) == ["b"]
    assert second.results[0].seconds == first.results[0].seconds
    machine.tune(tunable, cache=cache, force=True)
    assert machine.calls != {}


def test_what_was_measured_in_a_busy_moment_is_measured_again(tmp_path: Path) -> None:
    machine, cache = Machine(), tmp_path / "tuning.json"
    tunables = [machine.tunable({"a": 2e-4, "b": 1.5e-4}, bucket=bucket) for bucket in (1, 2)]
    busy = Remembered(choice="a", seconds={"a": 1.0, "b": 0.9}, noise=0.2, num_rounds=5)
    quiet = Remembered(choice="a", seconds={"a": 1.0, "b": 1.0}, noise=0.01, num_rounds=5)
    merge_results(cache, DEVICE, {key(1): busy, key(2): quiet})
    assert chosen(machine.tune(*tunables, cache=cache)) == ["a", "a"]
    assert machine.calls == {}
    late = machine.tune(*tunables, cache=cache, max_noise=0.1, deadline_s=0)
    assert [result.source for result in late.results] == ["cache", "cache"]
    report = machine.tune(*tunables, cache=cache, max_noise=0.1)
    assert [result.source for result in report.results] == ["measured", "cache"]
    assert chosen(machine.tune(*tunables, cache=cache)) == chosen(report) == ["b", "a"]


def test_an_even_noisier_result_changes_nothing(tmp_path: Path) -> None:
    machine, cache = Machine(jitter=3.0), tmp_path / "tuning.json"
    busy = Remembered(choice="a", seconds={"a": 1.0, "b": 0.9}, noise=0.001, num_rounds=5)
    merge_results(cache, DEVICE, {key(1): busy})
    report = machine.tune(machine.tunable({"a": 1.5e-4, "b": 1.2e-4}), cache=cache, max_noise=0.0)
    assert machine.calls != {}
    assert (chosen(report), report.results[0].source) == (["a"], "cache")
    assert read_results(cache, DEVICE) == {key(1): busy}


def test_another_device_measures_for_itself(tmp_path: Path) -> None:
    machine = Machine()
    tunable = machine.tunable({"a": 2e-4, "b": 1.5e-4})
    machine.tune(tunable, cache=tmp_path / "tuning.json")
    other = DeviceKey("a machine", 1, {"torch": "2.14"})
    report = tune([tunable], other, tmp_path / "tuning.json", deadline_s=9, progress=ignore, clock=machine.clock)
    assert report.results[0].source == "measured"


@pytest.mark.parametrize(
    ("offered", "source", "choice"),
    [
        ({"a": 2e-4, "best": 1e-4}, "cache", "best"),  # a loser is no longer there
        ({"best": 1e-4, "b": 1.5e-4, "a": 2e-4}, "cache", "best"),  # another order
        ({"a": 2e-4, "b": 1.5e-4}, "measured", "b"),  # the winner is no longer there
        ({"a": 2e-4, "b": 1.5e-4, "best": 1e-4, "new": 8e-5}, "measured", "new"),
    ],
)
def test_candidates_that_come_and_go(tmp_path: Path, offered: dict[str, float], source: str, choice: str) -> None:
    machine = Machine()
    machine.tune(machine.tunable({"a": 2e-4, "b": 1.5e-4, "best": 1e-4}), cache=tmp_path / "tuning.json")
    report = machine.tune(machine.tunable(offered), cache=tmp_path / "tuning.json")
    assert (report.results[0].source, chosen(report)) == (source, [choice])


def test_an_interrupted_tuning_keeps_what_it_has(tmp_path: Path) -> None:
    machine = Machine()

    def interrupt() -> None:
        raise KeyboardInterrupt

    seconds = {"a": 2e-4, "b": 1.5e-4}
    with pytest.raises(KeyboardInterrupt):
        machine.tune(
            machine.tunable(seconds),
            machine.tunable(seconds, bucket=2, on_call=interrupt),
            cache=tmp_path / "tuning.json",
        )
    assert machine.released == [1, 2]
    report = machine.tune(machine.tunable(seconds), cache=tmp_path / "tuning.json")
    assert report.results[0].source == "cache"


def test_long_tunings_are_saved_on_the_way(tmp_path: Path) -> None:
    machine, cache = Machine(), tmp_path / "tuning.json"
    sizes: list[int] = []
    machine.tune(
        *(machine.tunable({"a": 0.2, "b": 0.1}, bucket=1 << n) for n in range(12)),
        cache=cache,
        progress=lambda *_: sizes.append(cache.stat().st_size if cache.exists() else 0),
    )
    assert sizes[0] == 0
    assert len(set(sizes)) >= 3


def test_whoever_waits_for_another_takes_what_he_found(tmp_path: Path) -> None:
    machine, cache = Machine(), tmp_path / "tuning.json"
    tunables = [machine.tunable({"a": 2e-4, "b": 1.5e-4}, bucket=bucket) for bucket in (1, 2)]
    found = Remembered(choice="a", seconds={"a": 1.0, "b": 2.0}, noise=0.0, num_rounds=5)
    seen: list[str] = []
    with ExitStack() as other:
        lock = other.enter_context(TuningLock(cache))
        assert lock.try_acquire(is_too_late=lambda: True, on_wait=lambda: None)

        def watch(message: str, done: int, total: int) -> None:
            seen.append(message)
            if len(seen) == 1:
                merge_results(cache, DEVICE, {key(1): found})
                other.close()

        report = machine.tune(*tunables, cache=cache, progress=watch)
    assert seen[:2] == ["waiting for another process that tunes", "tuning linear 576x960 at 2"]
    assert [result.source for result in report.results] == ["cache", "measured"]
    assert chosen(report) == ["a", "b"]


def test_whoever_waits_too_long_takes_defaults(tmp_path: Path) -> None:
    machine, cache = Machine(), tmp_path / "tuning.json"
    with TuningLock(cache) as other:
        assert other.try_acquire(is_too_late=lambda: True, on_wait=lambda: None)
        report = machine.tune(machine.tunable({"a": 2e-4, "b": 1.5e-4}), cache=cache, deadline_s=0)
    assert (chosen(report), report.count("default"), machine.calls) == (["a"], 1, {})


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    machine = Machine()
    with caplog.at_level(logging.WARNING):
        report = machine.tune(machine.tunable({"a": 2e-4, "b": 1.5e-4}), cache=tmp_path / "file" / "tuning.json")
    assert chosen(report) == ["b"]
    assert any("cannot be kept" in message for message in caplog.messages)


# Look-up


def test_a_bucket_without_a_choice_takes_that_of_the_nearest_lower_one() -> None:
    one, eight = Candidate.of(rows=1), Candidate.of(rows=8)
    choices = Choices({key(1): one, key(8): eight, key(64, "other"): one})
    assert [choices.get(key(bucket)) for bucket in (1, 2, 4, 8, 512)] == [one, one, one, eight, eight]
    assert choices.get(key(32, "other")) is None
    assert choices.get(TuningKey("linear", "576x960", 8, "float32")) is None
    assert len(choices) == 3


def test_buckets_are_powers_of_two() -> None:
    assert [bucket_of(rows) for rows in (1, 2, 3, 4, 7, 8, 513)] == [1, 2, 2, 4, 4, 8, 512]
    assert buckets_up_to(48) == (1, 2, 4, 8, 16, 32)
    assert buckets_up_to(300, first=32) == (32, 64, 128, 256)
    with pytest.raises(ValueError, match="at least 1"):
        bucket_of(0)


def test_candidates_are_named_after_their_parameters() -> None:
    candidate = Candidate.of(rows=4, unroll=2)
    assert candidate.name == "rows=4 unroll=2"
    assert candidate["unroll"] == 2
    assert candidate in {Candidate.of(rows=4, unroll=2)}
    with pytest.raises(ValueError, match="distinct names"):
        Tunable(key(1), (candidate, candidate), lambda _: lambda: None)


def test_results_of_a_report_can_be_counted() -> None:
    result = TuningResult(key(1), Candidate.of(a=1), "cache", {})
    assert TuningReport((result, result), 0.0).count("cache") == 2
