"""What the gateway knows of its workers between two snapshots."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.router.accounts import NUM_STALE_NOTES, FleetSpeeds, WorkerAccount
from tandem.router.cost_model import Speeds
from tandem.workers.types import BlockCounts, WorkerAddress, WorkerSnapshot, WorkerSpeeds


def snapshot(**fields: Any) -> WorkerSnapshot:
    given: dict[str, Any] = {"num_running": 0, "num_waiting": 0, "num_waiting_tokens": 0}
    blocks = BlockCounts(total=100, free=60, cached=30, used=10, incoming=0, quarantined=0)
    return WorkerSnapshot(
        worker_id="w", epoch=0, role="decode", pid=1, blocks=blocks, max_model_len=512, **(given | fields)
    )


@pytest.fixture
def account() -> WorkerAccount:
    account = WorkerAccount(WorkerAddress(worker_id="w", epoch=0, role="decode", host="", port=0), FleetSpeeds())
    account.take_snapshot(snapshot())
    return account


def test_what_was_just_sent_counts(account: WorkerAccount) -> None:
    charge = account.charge(num_sequences=2, num_tokens=100)
    assert (account.view().num_sequences, account.view().num_waiting_tokens) == (2, 100)
    account.release(charge)
    assert (account.view().num_sequences, account.view().num_waiting_tokens) == (0, 0)


def test_what_was_sent_since_comes_on_top_of_others_requests(account: WorkerAccount) -> None:
    account.charge(num_sequences=1, num_tokens=10)
    account.take_snapshot(snapshot(num_running=4, num_waiting=1, num_waiting_tokens=500))  # ours among them
    assert (account.view().num_sequences, account.view().num_waiting_tokens) == (5, 500)
    charge = account.charge(num_sequences=1, num_tokens=100)
    assert (account.view().num_sequences, account.view().num_waiting_tokens) == (6, 600)
    account.release(charge)
    assert (account.view().num_sequences, account.view().num_waiting_tokens) == (5, 500)


def test_our_own_count_is_exact_where_the_snapshot_is_late(account: WorkerAccount) -> None:
    for _ in range(3):
        account.charge(num_sequences=1, num_tokens=50)
    account.take_snapshot(snapshot())  # taken before they arrived
    assert (account.view().num_sequences, account.view().num_waiting_tokens) == (3, 150)


def test_view_is_made_once(account: WorkerAccount) -> None:
    assert account.view() is account.view()
    assert account.view().num_available_blocks == 90
    account.take_pairs(frozenset({"p1"}), {"p0": 1e9})
    assert (account.view().unpaired, account.view().bytes_per_s) == ({"p1"}, {"p0": 1e9})


def test_nothing_measured_anywhere() -> None:
    assert FleetSpeeds().of("w") == Speeds()


def test_newcomer_is_taken_to_be_like_the_others() -> None:
    fleet = FleetSpeeds()
    for number, seconds in enumerate((0.01, 0.02, 0.09)):
        fleet.note(f"w{number}", WorkerSpeeds(prefill_token_s=seconds))
    fleet.note("new", WorkerSpeeds(decode_step_s=0.5))
    for _ in range(4):
        fleet.note("new", WorkerSpeeds(decode_step_s=0.5))
    assert fleet.of("new").prefill_token_s == 0.02
    assert fleet.of("w0").decode_step_s == 0.5
    assert fleet.of("w0").decode_sequence_s == Speeds().decode_sequence_s


def test_noise_does_not_make_one_worker_the_better_one() -> None:
    fleet = FleetSpeeds()
    for number, seconds in enumerate((0.0100, 0.0107, 0.0093, 0.02)):
        fleet.note(f"w{number}", WorkerSpeeds(prefill_token_s=seconds))
    assert len({fleet.of(f"w{number}") for number in range(3)}) == 1
    assert fleet.of("w3").prefill_token_s == 0.02


def test_handover_is_learned_and_an_outlier_says_little() -> None:
    fleet = FleetSpeeds()
    for _ in range(50):
        fleet.note_handover(0.004)
    fleet.note_handover(3.0)
    assert 0.004 < fleet.of("w").handover_s < 0.0055


def test_worker_that_is_gone_is_forgotten() -> None:
    fleet = FleetSpeeds()
    fleet.note("w0", WorkerSpeeds(prefill_token_s=5.0))
    fleet.forget("w0")
    fleet.note("w1", WorkerSpeeds(prefill_token_s=0.001))
    assert fleet.of("w2").prefill_token_s == 0.001


def test_a_worker_that_was_slow_once_is_asked_again() -> None:
    fleet = FleetSpeeds()
    for round_number in range(NUM_STALE_NOTES + 2):
        fleet.note("busy", WorkerSpeeds(prefill_token_s=0.01 + 1e-5 * round_number))
        fleet.note("idle", WorkerSpeeds(prefill_token_s=0.09))
        if round_number < NUM_STALE_NOTES - 1:
            assert fleet.of("idle").prefill_token_s > fleet.of("busy").prefill_token_s
    assert fleet.of("idle") == fleet.of("busy")
    fleet.note("idle", WorkerSpeeds(prefill_token_s=0.08))
    assert fleet.of("idle").prefill_token_s == 0.08  # it was, and is slow indeed


def test_what_nobody_has_measured_lately_still_is_the_best_guess() -> None:
    fleet = FleetSpeeds()
    for _ in range(NUM_STALE_NOTES + 2):
        fleet.note("w0", WorkerSpeeds(prefill_token_s=0.01))
        fleet.note("w1", WorkerSpeeds(prefill_token_s=0.03))
    assert fleet.of("w0").prefill_token_s == fleet.of("w1").prefill_token_s == 0.02


def test_slow_handovers_are_forgotten_when_there_are_no_others() -> None:
    fleet = FleetSpeeds()
    fleet.note("w0", WorkerSpeeds())
    fleet.note("w1", WorkerSpeeds())
    fleet.note_handover(5.0)
    for _ in range(NUM_STALE_NOTES):
        fleet.note("w0", WorkerSpeeds())
        fleet.note("w1", WorkerSpeeds())
    assert fleet.of("w0").handover_s == 5.0
    fleet.note("w0", WorkerSpeeds())
    assert fleet.of("w0").handover_s == Speeds().handover_s
