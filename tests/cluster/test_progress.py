"""What the user sees of a start."""

from __future__ import annotations

import io

from rich.console import Console

from tandem.cluster.progress import PlainProgress, StartProgress, TableProgress, create_progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def play(progress: StartProgress, clock: Clock) -> None:
    progress.phase("ray", "starting")
    clock.now += 2
    progress.phase("decode-0", "importing")
    progress.phase("decode-0", "importing")
    clock.now += 1.5
    progress.done("ray")
    progress.phase("decode-0", "loading weights")
    progress.update("model", "downloading", 30, 120)


def test_lines_tell_when_who_and_what() -> None:
    clock, stream = Clock(), io.StringIO()
    play(PlainProgress(stream, clock), clock)
    assert stream.getvalue().splitlines() == [
        "[  0.0 s] ray           starting",
        "[  2.0 s] decode-0      importing",
        "[  3.5 s] ray           ready (3.5 s)",
        "[  3.5 s] decode-0      loading weights",
        "[  3.5 s] model         downloading",
    ]


def test_phases_keep_their_length() -> None:
    clock = Clock()
    progress = StartProgress(clock)
    play(progress, clock)
    assert progress.parts["decode-0"].phases == [("importing", 1.5)]
    assert progress.seconds("ray") == 3.5


def test_the_table_shows_every_part_and_percent() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = TableProgress(Console(file=stream, force_terminal=True, width=100), clock)
    with progress.showing():
        play(progress, clock)
    shown = stream.getvalue()
    for text in ("ray", "decode-0", "loading weights", "downloading 25 %"):
        assert text in shown


def test_lines_where_there_is_no_terminal() -> None:
    assert isinstance(create_progress(io.StringIO()), PlainProgress)
