"""How candidates are compared: interleaved rounds, medians, and the noise of this very measurement.

1. Each candidate runs once to warm up, then three times, in turn with the others. Those whose fastest run takes more
   than `ABSURD` times the fastest of all are out.
2. In a round every candidate that is left is timed once, in a shuffled order, and the fastest of step 1 twice: it has a
   twin. A sample is the fastest of three runs of calls, each about `RUN_S` long: on a busy machine one of them meets a
   scheduler's slice, hardly all. A candidate's score is the median over the rounds of its time divided by the median
   of that round: whatever slowed the whole round down drops out. After `FIRST_ROUNDS` those above `HOPELESS` times the
   fastest are out, too, unless that may be noise.
3. Noise is what one candidate shows against itself: the distance of the twin's median ratio from 1, plus `NUM_ERRORS`
   standard errors of a ratio of two such medians, from the scatter of all samples.
4. The winner is the first candidate, in the fixed order, within max(`TIE`, noise) of the fastest.
5. Rounds go on while the noise is above `TIE`, or the gap of anybody up to the winner is within the noise of the limit;
   at most `MAX_ROUNDS`, or until the time is up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from statistics import median

from tandem.kernels.tuning import Candidate, CandidateUnavailable, Tunable

Clock = Callable[[], float]

ABSURD = 4.0
HOPELESS = 1.5
TIE = 0.08
"""Smaller gaps come and go from one tuning to the next (README.md): not worth a choice that changes."""
NUM_ERRORS = 3
"""With ten candidates, the luckiest of them seems 1.5 errors better than it is."""
FIRST_ROUNDS = 3
MIN_ROUNDS = 5
MAX_ROUNDS = 60
RUN_S = 0.4e-3
"""Long beside the clock's resolution, short beside a scheduler's slice of 4 to 16 ms."""
NUM_RUNS = 3
LONG_CALL_S = 10e-3
"""A call of this length is a sample of its own: it contains slices anyway, and nobody wants to wait for three."""
LEAST_CALL_S = 1e-6
"""Calls are not repeated more often than if they took so long."""
SHORTEST_S = 1e-9
"""A clock may see nothing at all."""


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

    def keep(self, places: Sequence[int]) -> None:
        """Forget all candidates but these; the twin's original must be among them. They are renumbered from 0."""
        self._rounds = [[*(samples[place] for place in places), samples[-1]] for samples in self._rounds]
        self._num_candidates = len(places)
        self._twin_of = places.index(self._twin_of)

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
        """Relative: how far from itself a candidate may seem, by what its twin shows and by how all samples scatter."""
        pairs = [(samples[-1], samples[self._twin_of]) for samples in self._rounds]
        gap = abs(median(twin / original for twin, original in pairs) - 1)
        shares = [[one / median(samples) for one in samples] for samples in self._rounds]
        spread = median(_spread([share[place] for share in shares]) for place in range(self._num_candidates + 1))
        # 1.4826 makes a standard deviation of it, 1.2533 is how much less sure a median is than a mean, 2 are compared
        standard_error = 1.4826 * 1.2533 * sqrt(2) * spread / sqrt(len(shares))
        return gap + NUM_ERRORS * standard_error

    def winner(self) -> int:
        """The first candidate that is not measurably slower than the fastest."""
        tolerance = max(TIE, self.noise())
        return next(place for place, gap in enumerate(self._gaps()) if gap <= tolerance)

    def is_clear(self) -> bool:
        """Whether more rounds would hardly change the winner: nobody up to him is a toss-up.

        Never so while the noise is above `TIE`.
        """
        noise = self.noise()
        return all(abs(gap - TIE) > noise for gap in self._gaps()[: self.winner() + 1])

    def _gaps(self) -> list[float]:
        """How much slower than the fastest each candidate is, relative."""
        seconds = self.seconds()
        return [one / min(seconds) - 1 for one in seconds]


def _spread(numbers: Sequence[float]) -> float:
    """Median distance from the median, relative to it."""
    middle = median(numbers)
    return median(abs(number - middle) for number in numbers) / middle


@dataclass(slots=True)
class _Runner:
    candidate: Candidate
    call: Callable[[], None]
    alone_s: float = inf
    """The fastest of the first calls."""


def measure(tunable: Tunable, *, enough_at: float, deadline: float, clock: Clock) -> Measurement:
    """Compare the candidates. From `enough_at` on (of the clock) a judgement is made as soon as one can be.

    Raises `NotMeasured` if `deadline` passes before `MIN_ROUNDS`, or if no candidate can be run.
    """
    stopwatch = _Stopwatch(tunable.timer, clock, deadline)
    runners, unavailable = _prepare(tunable, stopwatch)
    for _ in range(NUM_RUNS):
        for runner in runners:
            runner.alone_s = min(runner.alone_s, stopwatch.time(runner.call, num_runs=1))
    fastest = min(runners, key=lambda runner: runner.alone_s)
    seconds = {runner.candidate.name: runner.alone_s for runner in runners}
    live = [runner for runner in runners if runner.alone_s <= ABSURD * fastest.alone_s]
    winner, noise, num_rounds = fastest.candidate, 0.0, 0
    if len(live) > 1:
        outcome = _run_rounds(live, fastest, stopwatch, enough_at)
        seconds |= outcome.seconds
        winner, noise, num_rounds = outcome.winner, outcome.noise, outcome.num_rounds
    seconds = {name: one / tunable.ops_per_call for name, one in seconds.items()}
    return Measurement(winner, seconds, unavailable, noise, num_rounds)


class _Stopwatch:
    """Times calls with one clock, and looks at the deadline on another."""

    def __init__(self, timer: Clock, clock: Clock, deadline: float) -> None:
        self._timer = timer
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
            began = self._timer()
            for _ in range(num_calls):
                call()
            fastest = min(fastest, self._timer() - began)
        return max(fastest / num_calls, SHORTEST_S)


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


def _run_rounds(live: list[_Runner], fastest: _Runner, stopwatch: _Stopwatch, enough_at: float) -> Measurement:
    """At least `MIN_ROUNDS`. Raises `NotMeasured` where there is no time for them."""
    num_calls = ceil(RUN_S / max(fastest.alone_s, LEAST_CALL_S))
    num_runs = NUM_RUNS if fastest.alone_s < LONG_CALL_S else 1
    rounds = Rounds(len(live), live.index(fastest))
    dropped: dict[str, float] = {}
    while len(rounds) < MIN_ROUNDS or (
        len(rounds) < MAX_ROUNDS and stopwatch.clock() < enough_at and not rounds.is_clear()
    ):
        slots = [*live, fastest]
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
        if len(rounds) == FIRST_ROUNDS:
            live, slow = _split(live, fastest, rounds)
            dropped |= slow
    seconds = dropped | {runner.candidate.name: one for runner, one in zip(live, rounds.seconds(), strict=True)}
    return Measurement(live[rounds.winner()].candidate, seconds, (), rounds.noise(), len(rounds))


def _split(live: list[_Runner], fastest: _Runner, rounds: Rounds) -> tuple[list[_Runner], dict[str, float]]:
    """Who stays, and the seconds of those who do not: `rounds` forgets them."""
    seconds = rounds.seconds()
    limit = (HOPELESS + 2 * rounds.noise()) * min(seconds)
    stay = [place for place, one in enumerate(seconds) if one <= limit or live[place] is fastest]
    rounds.keep(stay)
    slow = {runner.candidate.name: seconds[place] for place, runner in enumerate(live) if place not in stay}
    return [live[place] for place in stay], slow
