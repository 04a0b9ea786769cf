"""Slots of a tier: none is lost, none has two owners, and what is read stays until it was read."""

from __future__ import annotations

import pytest

from tandem.workers.offload.records import Record, pack
from tandem.workers.offload.shelf import Entry, Shelf


def record(number: int, priority: int = 35) -> Record:
    return Record(bytes([number]) * 16, None, pack([number]), priority)


def filled(num_slots: int, *priorities: int) -> Shelf:
    shelf = Shelf(num_slots)
    for number, priority in enumerate(priorities):
        slot = shelf.take_free()
        assert slot is not None
        shelf.put(record(number, priority), slot)
    return shelf


def entry(shelf: Shelf, number: int) -> Entry:
    found = shelf.find(record(number).key, None, pack([number]))
    assert found is not None
    return found


def test_the_lowest_priority_goes_first_but_not_what_is_read() -> None:
    shelf = filled(3, 50, 10, 10)
    assert shelf.take_free() is None
    read = entry(shelf, 1)
    shelf.begin_read(read)
    given_up = [shelf.pop_first(), shelf.pop_first(), shelf.pop_first()]
    assert [None if one is None else one.record.priority for one in given_up] == [10, 50, None]
    shelf.end_read(read)
    assert shelf.pop_first() is read


def test_a_slot_is_free_when_the_last_reader_of_what_was_forgotten_has_gone() -> None:
    shelf = filled(1, 35)
    damaged = entry(shelf, 0)
    shelf.begin_read(damaged)
    shelf.begin_read(damaged)
    assert shelf.forget(damaged)
    assert not shelf.forget(damaged), "the second reader found it out, too"
    shelf.end_read(damaged)
    assert shelf.take_free() is None
    shelf.end_read(damaged)
    shelf.check()
    assert shelf.take_free() == damaged.slot


def test_what_is_found_twice_is_held_once() -> None:
    shelf = Shelf(3)
    assert shelf.adopt([(record(1), 2), (record(2), 0), (record(1), 1)]) == [record(1), record(2)]
    shelf.check()
    assert (entry(shelf, 1).slot, shelf.take_free(), shelf.take_free()) == (2, 1, None)


def test_a_key_of_other_tokens_is_not_found() -> None:
    shelf = filled(1, 35)
    assert shelf.find(record(0).key, None, pack([9])) is None
    assert shelf.find(record(0).key, b"parent", pack([0])) is None


def test_a_lost_slot_is_noticed() -> None:
    shelf = filled(2, 35)
    shelf.take_free()
    with pytest.raises(AssertionError, match="lost"):
        shelf.check()
