"""The garbage collector of a process that serves."""

from __future__ import annotations

import gc
import weakref

from tandem.cluster.collector import NUM_YOUNG, settled_collector


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.next = self


def test_what_was_loaded_is_left_alone_and_cycles_are_still_found() -> None:
    before, loaded = gc.get_threshold(), Ring()
    with settled_collector():
        assert gc.get_threshold()[0] == NUM_YOUNG
        assert gc.get_freeze_count() > 0
        assert not any(each is loaded for each in gc.get_objects())
        lost = weakref.ref(Ring())
        gc.collect(0)
        assert lost() is None
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
