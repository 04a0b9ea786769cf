"""Columns over all workers say the same as the formulas for one of them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tandem.router import cost_model
from tandem.router.cost_model import EXPECTED_TOKENS, RequestView, Speeds, WorkerView
from tandem.router.roster import Roster, Side

RANDOM = random.Random(3)


def some_worker(number: int, role: str) -> WorkerView:
    source = RANDOM
    return WorkerView(
        f"{role}-{number:03}",
        "prefill" if role == "prefill" else "decode",
        num_sequences=source.randrange(12),
        num_waiting_tokens=source.randrange(5000),
        num_available_blocks=source.choice([0, 20, 30, 40, 1 << 30]),
        num_routed=source.randrange(3),
        max_num_seqs=source.choice([None, 4, 8]),
        speeds=Speeds(
            prefill_token_s=source.uniform(1e-4, 1e-3),
            prefill_attended_s=source.choice([0.0, 1e-7]),
            decode_step_s=source.uniform(0.01, 0.03),
            decode_sequence_s=source.uniform(0.0, 0.001),
            handover_s=source.uniform(0.0, 0.02),
        ),
        bytes_per_s={f"prefill-{other:03}": source.uniform(1e8, 1e10) for other in range(0, 40, 2)},
    )


PREFILLS = [some_worker(number, "prefill") for number in range(40)]
DECODES = [some_worker(number, "decode") for number in range(40)]


def some_request() -> RequestView:
    holders = RANDOM.sample([*PREFILLS, *DECODES], RANDOM.choice([0, 1, 10, 80]))
    return RequestView(
        num_prompt_tokens=RANDOM.choice([1, 31, 32, 1000, 1024]),
        num_choices=RANDOM.choice([1, 4]),
        block_bytes=RANDOM.choice([1000, 700_000, 5_000_000]),
        overlap={worker.worker_id: RANDOM.randrange(1, 33) for worker in holders} | {"nobody": 5},
        preferred=RANDOM.choice([{}, {"prefill-003": 1.0, "decode-007": 1.0, "decode-001": 0.5, "nobody": 0.75}]),
    )


@pytest.mark.parametrize("case", range(40))
def test_columns_are_the_formulas(case: int) -> None:
    request = some_request()
    roster = Roster([*PREFILLS, *DECODES])
    sources = cost_model.find_sources(request, roster.holders(request))[:1]
    readings = [cost_model.read(request, worker, sources) for worker in PREFILLS]
    expected = [
        worker.queue_s + reading.read_s + cost_model.stray_s(request, worker)
        for worker, reading in zip(PREFILLS, readings)
    ]
    if not sources or sources[0].role == "decode":  # otherwise the source itself, and paths that nobody measured
        assert roster.prefills.prefill_costs_s(request, sources) == pytest.approx(expected, rel=1e-12)
    costs_s = [
        EXPECTED_TOKENS * cost_model.itl_s(request, worker)
        + cost_model.room_s(request, worker)
        + cost_model.stray_s(request, worker)
        for worker in DECODES
    ]
    assert roster.decodes.decode_costs_s(request) == pytest.approx(costs_s, rel=1e-12)
    held = [request.num_held_tokens(worker.worker_id) for worker in DECODES]
    assert list(roster.decodes.held_tokens(request)) == held


def test_the_best_are_the_cheapest_then_those_given_less_then_the_first_by_name() -> None:
    side = Side([WorkerView(name, "decode", num_routed=routed) for name, routed in zip("dcba", (1, 0, 1, 1))])
    names = [worker.worker_id for worker in side.best(side.num_routed * 0.0, 3)]
    assert names == ["c", "a", "b"]
    assert [worker.worker_id for worker in side.best(-side.num_routed, 2)] == ["a", "b"]
    assert len(side.best(side.num_routed, 9)) == 4


def test_what_is_put_shows_in_views_and_columns() -> None:
    roster = Roster([*DECODES, *PREFILLS[::-1]])
    roster.put(replace(PREFILLS[7], num_waiting_tokens=9_999_999, max_num_seqs=3))
    assert roster.get("prefill-007") == replace(PREFILLS[7], num_waiting_tokens=9_999_999, max_num_seqs=3)
    assert (roster.prefills.num_waiting_tokens[7], roster.prefills.max_num_seqs[7]) == (9_999_999, 3)
    assert roster.prefills.num_waiting_tokens.tolist().count(9_999_999) == 1
    assert list(roster) == [*PREFILLS[:7], roster.get("prefill-007"), *PREFILLS[8:], *DECODES]


def test_a_roster_without_some_leaves_the_other_as_it_was() -> None:
    roster = Roster([*PREFILLS, *DECODES])
    assert list(roster.without({"prefill-000", "decode-039"})) == [*PREFILLS[1:], *DECODES[:-1]]
    assert len(list(roster)) == 80


async def test_the_live_set_keeps_its_roster_up_to_date(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes."), decode=2)
    workers = house.gateway.workers
    before = workers.roster()
    link = workers.get("decode-0")
    charge = link.account.charge(num_sequences=70, num_tokens=7_000)
    assert workers.roster() is before
    assert before.get("decode-0").num_sequences >= 70
    assert before.decodes.num_waiting_tokens[before.decodes.row("decode-0")] >= 7_000
    await house.workers["decode-0"].stop()
    while workers.get("decode-0") is not None:
        await workers.wait_changed()
    link.account.release(charge)  # of an incarnation that is gone: nobody's row
    assert {view.worker_id for view in workers.roster()} == {view.worker_id for view in before} - {"decode-0"}
    assert workers.roster() is workers.roster()
