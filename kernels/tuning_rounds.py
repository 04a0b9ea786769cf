"""How candidates are compared: interleaved rounds, medians, and the noise of this very measurement.

1. Each candidate runs once to warm up, then three times alone, of which the fastest counts. Those above `HOPELESS`
   times the fastest are out.
2. In a round every candidate that is left is timed once, in a shuffled order, and the fastest of step 1 twice: it has a
   twin. A sample is the fastest of three runs of calls, each about `RUN_S` long: on a busy machine one of them meets a
   scheduler's slice, hardly all. A candidate's score is the median over the rounds of its time divided by the median
   of that round: whatever slowed the whole round down drops out.
3. Noise is what the twin shows against its original: the distance of the median ratio from 1, plus two standard errors
   of that median.
4. The winner is the first candidate, in the fixed order, within max(`TIE`, noise) of the fastest.
5. Rounds go on until the noise is below `TIE` and the winner has not changed for `STEADY_ROUNDS`, or the time is up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from statistics import median

from tandem.kernels.tuning import Candidate, CandidateUnavailable, Tunable

Clock = Callable[[], float]

HOPELESS = 2.0
TIE = 0.02
"""Nobody notices 2 % of one op, and hardly a machine holds them from run to run."""
MIN_ROUNDS = 5
MAX_ROUNDS = 60
STEADY_ROUNDS = 4
RUN_S = 0.4e-3
"""Long beside the clock's resolution, short beside a scheduler's slice of 4 to 16 ms."""
NUM_RUNS = 3
LONG_CALL_S = 10e-3
"""A call of this length is a sample of its own: it contains slices anyway, and nobody wants to wait for three."""
SHORTEST_CALL_S = 1e-6
"""A clock may see less, even nothing."""


class NotMeasured(Exception):
    """The deadline came before there was enough to judge by, or the device can run no candidate."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was seen of one tunable. Names are candidates' names, seconds those of one run of the op."""

    winner: Candidate
    seconds: dict[str, float]
    unavailable: tuple[str, ...]
    noise: float
    num_rounds: int


class Rounds:
    """The samples of some candidates, and what follows from them. No clock in here."""

    def __init__(self, num_candidates: int, twin_of: int) -> None:
        self._num_candidates = num_candidates
        self._twin_of = twin_of
        self._rounds: list[list[float]] = []

    def add(self, seconds: Sequence[float]) -> None:
        """One round: a sample per candidate in the fixed order, the twin's last."""
        self._rounds.append(list(seconds))

    def __len__(self) -> int:
        return len(self._rounds)

    def seconds(self) -> list[float]:
        """Per candidate: its median share of a round, in seconds of the median round."""
        middles = [median(samples) for samples in self._rounds]
        scores = [
            median(samples[place] / middle for samples, middle in zip(self._rounds, middles))
            for place in range(self._num_candidates)
        ]
        return [score * median(middles) for score in scores]

    def noise(self) -> float:
        """Relative: what one candidate shows against itself."""
        ratios = [samples[-1] / samples[self._twin_of] for samples in self._rounds]
        middle = median(ratios)
        spread = median(abs(ratio - middle) for ratio in ratios)
        # 1.4826 makes a standard deviation of it, 1.2533 is how much less sure a median is than a mean
        standard_error = 1.4826 * 1.2533 * spread / sqrt(len(ratios))
        return abs(middle - 1) + 2 * standard_error

    def winner(self) -> int:
        """The first candidate that is not measurably slower than the fastest."""
        seconds = self.seconds()
        limit = min(seconds) * (1 + max(TIE, self.noise()))
        return next(place for place, one in enumerate(seconds) if one <= limit)


@dataclass(slots=True)
class _Runner:
    candidate: Candidate
    call: Callable[[], None]
    alone_s: float = 0.0
    """The fastest call of the screening."""


def measure(tunable: Tunable, *, enough_at: float, deadline: float, clock: Clock) -> Measurement:
    """Compare the candidates. From `enough_at` on (of the clock) a judgement is made as soon as one can be.

    Raises `NotMeasured` if `deadline` passes before `MIN_ROUNDS`, or if no candidate can be run.
    """
    stopwatch = _Stopwatch(clock, deadline)
    runners, unavailable = _prepare(tunable, stopwatch)
    for runner in runners:
        runner.alone_s = stopwatch.time(runner.call, num_runs=NUM_RUNS)
    fastest = min(runners, key=lambda runner: runner.alone_s)
    live = [runner for runner in runners if runner.alone_s <= HOPELESS * fastest.alone_s]
    seconds = {runner.candidate.name: runner.alone_s for runner in runners}
    winner, noise, num_rounds = fastest.candidate, 0.0, 0
    if len(live) > 1:
        rounds = _run_rounds(live, live.index(fastest), stopwatch, enough_at)
        seconds |= {runner.candidate.name: one for runner, one in zip(live, rounds.seconds(), strict=True)}
        winner, noise, num_rounds = live[rounds.winner()].candidate, rounds.noise(), len(rounds)
    seconds = {name: one / tunable.ops_per_call for name, one in seconds.items()}
    return Measurement(winner, seconds, unavailable, noise, num_rounds)


class _Stopwatch:
    def __init__(self, clock: Clock, deadline: float) -> None:
        self.clock = clock
        self._deadline = deadline

    def check(self) -> None:
        """Raises `NotMeasured` when it is too late to begin anything."""
        if self.clock() >= self._deadline:
            raise NotMeasured

    def time(self, call: Callable[[], None], *, num_runs: int, num_calls: int = 1) -> float:
        """Seconds of one call in the fastest of `num_runs` runs of `num_calls`. Raises `NotMeasured`."""
        fastest = inf
        for _ in range(num_runs):
            self.check()
            began = self.clock()
            for _ in range(num_calls):
                call()
            fastest = min(fastest, self.clock() - began)
        return fastest / num_calls


def _prepare(tunable: Tunable, stopwatch: _Stopwatch) -> tuple[list[_Runner], tuple[str, ...]]:
    """The candidates that can be run, each run once; and the names of the others."""
    runners: list[_Runner] = []
    unavailable: list[str] = []
    for candidate in tunable.candidates:
        stopwatch.check()
        try:
            call = tunable.prepare(candidate)
        except CandidateUnavailable:
            unavailable.append(candidate.name)
            continue
        call()
        runners.append(_Runner(candidate, call))
    if not runners:
        raise NotMeasured
    return runners, tuple(unavailable)


def _run_rounds(live: list[_Runner], twin_of: int, stopwatch: _Stopwatch, enough_at: float) -> Rounds:
    """At least `MIN_ROUNDS`. Raises `NotMeasured` where there is no time for them."""
    slots = [*live, live[twin_of]]
    alone_s = max(live[twin_of].alone_s, SHORTEST_CALL_S)
    num_calls, num_runs = ceil(RUN_S / alone_s), NUM_RUNS if alone_s < LONG_CALL_S else 1
    rounds = Rounds(len(live), twin_of)
    winners: list[int] = []
    while not _is_enough(rounds, winners) and (len(rounds) < MIN_ROUNDS or stopwatch.clock() < enough_at):
        order = random.Random(len(rounds)).sample(range(len(slots)), len(slots))
        try:
            samples = {
                place: stopwatch.time(slots[place].call, num_runs=num_runs, num_calls=num_calls) for place in order
            }
        except NotMeasured:
            if len(rounds) < MIN_ROUNDS:
                raise
            break
        rounds.add([samples[place] for place in range(len(slots))])
        winners.append(rounds.winner())
    return rounds


def _is_enough(rounds: Rounds, winners: Sequence[int]) -> bool:
    if len(rounds) < MIN_ROUNDS:
        return False
    return len(rounds) >= MAX_ROUNDS or (rounds.noise() < TIE and len(set(winners[-STEADY_ROUNDS:])) == 1)
