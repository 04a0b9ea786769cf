"""The policy in scenarios of a few lines."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tandem.router.policy import RequestView, Route, WorkerView, pick_prefill, route

P0, P1 = WorkerView("p0", "prefill"), WorkerView("p1", "prefill")
D0, D1 = WorkerView("d0", "decode"), WorkerView("d1", "decode")
A0 = WorkerView("a0", "aggregated")
LONG = RequestView(num_prompt_tokens=1024)


def test_one_of_each() -> None:
    assert route(LONG, [P0, D0]) == Route("p0", "d0")


def test_nobody_decodes() -> None:
    assert route(LONG, [P0, P1]) is None
    assert route(LONG, []) is None


def test_no_prefill_worker_means_local() -> None:
    assert route(LONG, [D0]) == Route(None, "d0")


def test_short_prompt_is_read_where_it_is_decoded() -> None:
    assert route(replace(LONG, num_prompt_tokens=64), [P0, D0]) == Route(None, "d0")
    assert route(replace(LONG, num_prompt_tokens=65), [P0, D0]) == Route("p0", "d0")


def test_decode_worker_that_holds_most_of_it_reads_the_rest() -> None:
    assert route(replace(LONG, overlap={"d0": 28}), [P0, D0]) == Route(None, "d0")  # misses 128 of 1,024
    assert route(replace(LONG, overlap={"d0": 27}), [P0, D0]) == Route("p0", "d0")  # misses 160
    huge = RequestView(num_prompt_tokens=32 * 1000, overlap={"d0": 900})  # a tenth, but 3,200 tokens
    assert route(huge, [P0, D0]) == Route("p0", "d0")


def test_aggregated_worker_does_both() -> None:
    assert route(LONG, [P0, A0]) == Route(None, "a0")


def test_prefix_overlap_attracts() -> None:
    assert route(replace(LONG, overlap={"p1": 16}), [P0, P1, D0]) == Route("p1", "d0")
    assert route(replace(LONG, overlap={"d1": 16}), [P0, D0, D1]) == Route("p0", "d1")


def test_load_outweighs_overlap() -> None:
    busy = replace(P1, num_waiting_tokens=2000)
    assert route(replace(LONG, overlap={"p1": 16}), [P0, busy, D0]) == Route("p0", "d0")
    full = replace(D1, num_sequences=8)
    assert route(replace(LONG, overlap={"d1": 16}), [P0, D0, full]) == Route("p0", "d0")


def test_worker_without_room_is_a_last_resort() -> None:
    full = replace(D0, num_available_blocks=0)
    assert route(LONG, [P0, full, replace(D1, num_sequences=3)]) == Route("p0", "d1")
    assert route(LONG, [P0, full]) == Route("p0", "d0")


def test_refused_pair_is_not_used() -> None:
    picky = replace(D0, unpaired=frozenset({"p0"}))
    assert route(LONG, [P0, P1, picky]) == Route("p1", "d0")
    assert route(LONG, [P0, picky]) == Route(None, "d0")


def test_workers_that_failed_are_avoided() -> None:
    assert route(LONG, [P0, D0, D1], {"d0"}) == Route("p0", "d1")
    assert route(LONG, [P0, D0], {"d0"}) is None
    assert pick_prefill(LONG, [P0, P1, D0], D0, {"p0"}) == "p1"
    assert pick_prefill(LONG, [P0, D0], D0, {"p0"}) is None


def test_ties_are_spread_evenly() -> None:
    routed: Counter[str | None] = Counter()
    for _ in range(60):
        workers = [replace(worker, num_routed=routed[worker.worker_id]) for worker in (P0, P1, D0, D1)]
        chosen = route(LONG, workers)
        assert chosen is not None
        routed.update((chosen.prefill, chosen.decode))
    assert set(routed.values()) == {30}


def test_order_of_workers_does_not_matter() -> None:
    workers = [P0, P1, D0, D1, A0]
    assert route(LONG, workers) == route(LONG, workers[::-1])
