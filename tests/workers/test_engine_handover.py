"""The engine as half of a pair: prompts computed for others and held, or computed by others and handed over."""

from __future__ import annotations

import pytest
from engine_play import MakeEngine, MakeRequest, fill, next_token, run, runner_of, start_handover

from tandem.workers.batch import SampledToken
from tandem.workers.fake_runner import expected_tokens
from tandem.workers.sequence import Sequence, Status

# Prefill worker: hold and release


def test_held_sequence_keeps_its_blocks_until_release(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(12)
    [sequence] = engine.add(make_request("r", range(30), max_tokens=100), hold=True)
    first, last = engine.step() + engine.step()
    assert (first.num_computed, first.token) == (16, None)
    assert (last.num_computed, last.finish_reason) == (30, None)
    assert last.token is not None
    assert last.token.token_id == expected_tokens(range(30), 1, seed=0)[0]
    assert sequence.status is Status.HELD
    assert engine.step() == []
    engine.check()
    assert engine.counts().used == 8
    assert not engine.is_idle
    engine.release(sequence)
    engine.release(sequence)
    engine.check()
    assert (engine.counts().cached, engine.counts().free) == (7, 5)
    assert engine.is_idle


def test_cancel_of_a_held_sequence_frees_it(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(12)
    [sequence] = engine.add(make_request("r", range(8)), hold=True)
    engine.step()
    assert engine.cancel("r") == []
    assert engine.counts().used == 0
    engine.release(sequence)
    engine.check()


def test_blocks_that_wait_for_release_hold_up_newcomers_and_no_longer(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(8)
    [held] = engine.add(make_request("a", range(20)), hold=True)
    [waits] = engine.add(make_request("b", range(50, 70)), hold=True)
    engine.step()
    engine.step()
    assert (held.status, waits.status) == (Status.HELD, Status.WAITING)
    engine.release(held)
    engine.step()
    assert engine.step()[0].sequence is waits


# Decode worker: handover


def test_handover_joins_the_batch(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50, local_prefill_tokens=8)
    incoming: list[Sequence] = []
    engine.on_incoming = incoming.append
    sequence = start_handover(engine, make_request("r", range(30)))
    assert incoming == [sequence]
    assert engine.counts().incoming == 8
    fill(engine, sequence, 0, 30)
    output = engine.handover_finished(sequence, next_token(engine, sequence))
    engine.check()
    assert output is not None
    assert output.token is not None
    assert output.num_computed == 30
    assert [output.token.token_id, *run(engine)["r", 0]] == expected_tokens(range(30), 8, seed=0)
    assert sum(batch.num_tokens for batch in runner_of(engine).batches) == 7


def test_first_token_from_elsewhere_may_be_the_last(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50, local_prefill_tokens=8)
    sequence = start_handover(engine, make_request("r", range(30), max_tokens=1))
    output = engine.handover_finished(sequence, SampledToken(5, None))
    assert output is not None
    assert output.finish_reason == "length"
    assert engine.is_idle
    engine.check()


def test_siblings_use_the_prompt_that_was_handed_over(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50, local_prefill_tokens=8)
    leader, sibling = engine.add(make_request("r", range(30), emitted={0: [], 1: []}), wants_remote=True)
    engine.step()
    fill(engine, leader, 0, 30)
    engine.handover_finished(leader, next_token(engine, leader))
    assert run(engine)["r", 1] == expected_tokens(range(30), 8, seed=0, choice=1)
    assert sibling.cached.total == 29, "the last, partly filled block included"


@pytest.mark.parametrize("num_valid", [0, 3, 4, 17, 32])
def test_abandoned_handover_is_computed_here(
    make_engine: MakeEngine, make_request: MakeRequest, num_valid: int
) -> None:
    engine = make_engine(50, local_prefill_tokens=8)
    sequence = start_handover(engine, make_request("r", range(32)))
    fill(engine, sequence, 0, num_valid)
    engine.fill_ended(sequence, num_valid)
    engine.check()
    assert engine.counts().incoming == 0
    assert run(engine)["r", 0] == expected_tokens(range(32), 8, seed=0)
    computed = sum(batch.num_tokens for batch in runner_of(engine).batches)
    assert computed == 32 - min(num_valid, 31) // 4 * 4 + 7


def test_late_writes_into_quarantined_blocks_harm_nobody(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(20, local_prefill_tokens=8)
    sequence = start_handover(engine, make_request("r", range(30)))
    late = sequence.block_ids[2:5]
    fill(engine, sequence, 0, 30)
    assert engine.quarantine(sequence, late)
    assert engine.counts().quarantined == 3
    engine.fill_ended(sequence, 8)
    engine.add(make_request("other", range(100, 130)))
    while not engine.is_idle:
        runner_of(engine).kv[late] = 666
        assert not any(set(item.block_ids) & set(late) for batch in runner_of(engine).batches for item in batch.items)
        engine.step()
        engine.check()
    assert sequence.token_ids[30:] == expected_tokens(range(30), 8, seed=0)
    engine.end_quarantine(late)
    engine.check()
    assert engine.counts().quarantined == 0


def test_quarantine_without_a_spare_block_sends_the_sequence_back(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(10, local_prefill_tokens=8)
    sequence = start_handover(engine, make_request("r", range(30)))
    late = sequence.block_ids[0:3]
    assert not engine.quarantine(sequence, late)
    assert sequence.status is Status.WAITING
    assert engine.step() == [], "seven blocks are left for eight"
    engine.end_quarantine(late)
    assert run(engine)["r", 0] == expected_tokens(range(30), 8, seed=0)


def test_cancelled_handover_keeps_its_blocks_until_the_pull_has_ended(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(20, local_prefill_tokens=8)
    sequence = start_handover(engine, make_request("r", range(30)))
    assert engine.cancel("r") == [sequence]
    engine.check()
    assert engine.counts().incoming == 8
    assert engine.release_incoming(sequence)
    assert not engine.release_incoming(sequence)
    engine.check()
    assert engine.counts().free == 20


@pytest.mark.parametrize("end", ["finished", "abandoned", "quarantined"])
def test_every_end_of_a_cancelled_handover_only_frees(
    make_engine: MakeEngine, make_request: MakeRequest, end: str
) -> None:
    engine = make_engine(20, local_prefill_tokens=8)
    sequence = start_handover(engine, make_request("r", range(30)))
    engine.cancel("r")
    if end == "finished":
        assert engine.handover_finished(sequence, SampledToken(5, None)) is None
    elif end == "abandoned":
        engine.fill_ended(sequence, 30)
    else:
        late = sequence.block_ids[:2]
        assert engine.quarantine(sequence, late)
        engine.check()
        engine.release_incoming(sequence)
        assert engine.counts().free == 18
        engine.end_quarantine(late)
    engine.check()
    assert engine.counts().free == 20


def test_handover_may_end_inside_the_callback(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50, local_prefill_tokens=8)
    engine.on_incoming = lambda sequence: engine.fill_ended(sequence, 0)
    engine.add(make_request("r", range(30)), wants_remote=True)
    assert run(engine)["r", 0] == expected_tokens(range(30), 8, seed=0)
