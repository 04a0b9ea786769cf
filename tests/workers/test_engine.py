"""The engine over a runner whose tokens betray every wrong block: how requests live, share, and end."""

from __future__ import annotations

import pytest
from engine_play import IN_ORDER, MakeEngine, MakeRequest, run, runner_of

from tandem.workers.batch import Batch, SampledToken
from tandem.workers.block_pool import BlockState
from tandem.workers.fake_runner import expected_tokens
from tandem.workers.sequence import Status
from tandem.workers.steps import STEP_FAILED, StepOutput

# Tokens do not depend on how they were computed


@pytest.mark.parametrize("budget", [4, 8, 20, 128])
def test_chunks_and_company_do_not_change_tokens(
    make_engine: MakeEngine, make_request: MakeRequest, budget: int
) -> None:
    engine = make_engine(200, max_num_batched_tokens=budget)
    for length in range(1, 40, 3):
        engine.add(make_request(str(length), range(length), seed=length))
    assert run(engine) == {(str(n), 0): expected_tokens(range(n), 8, seed=n) for n in range(1, 40, 3)}


def test_pool_for_one_and_a_fifth_of_a_request_serves_eight(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(12)  # each request ends with 10 blocks
    prompts = {str(i): [100 * i + j for j in range(10 + i)] for i in range(8)}
    for i, (request_id, prompt) in enumerate(prompts.items()):
        engine.add(make_request(request_id, prompt, max_tokens=30 - i, seed=i))
    tokens = run(engine)
    assert engine.scheduler.num_preemptions > 0, "the pool was large enough: this shows nothing"
    for i, (request_id, prompt) in enumerate(prompts.items()):
        assert tokens[request_id, 0] == expected_tokens(prompt, 30 - i, seed=i)
    assert engine.counts().used == 0


def test_second_time_comes_from_the_cache(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50)
    for turn, num_cached in enumerate([0, 29]):
        [sequence] = engine.add(make_request(str(turn), range(30)))
        assert run(engine)[str(turn), 0] == expected_tokens(range(30), 8, seed=0)
        assert sequence.cached.total == num_cached


def test_generated_blocks_are_cached_too(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50)
    engine.add(make_request("first", range(10), max_tokens=20))
    answer = run(engine)["first", 0]
    [sequence] = engine.add(make_request("second", [*range(10), *answer, 5]))
    run(engine)
    assert sequence.cached.total == 28, "29 tokens had KV: all but the last generated one"


def test_tenants_share_nothing(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(50)
    for salt in ("red", "blue"):
        [sequence] = engine.add(make_request(salt, range(30), salt=salt))
        run(engine)
        assert sequence.cached.total == 0


def test_continued_request_goes_on_as_if_nothing_had_happened(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    whole = expected_tokens(range(10), 12, seed=3, choice=2)
    engine = make_engine(50)
    engine.add(make_request("r", range(10), max_tokens=12, seed=3, emitted={2: whole[:5]}))
    assert run(engine) == {("r", 2): whole[5:]}


# Choices


def test_choices_share_the_prompt_that_the_first_computes(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(100)
    sequences = engine.add(make_request("r", range(41), emitted={0: [], 3: [], 1: []}))
    assert [sequence.choice for sequence in sequences] == [0, 1, 3]
    assert (engine.num_running, engine.num_waiting) == (0, 3)
    for _ in range(3):
        assert [output.sequence.choice for output in engine.step()] == [0]
    assert [sequence.status for sequence in sequences] == [Status.RUNNING, Status.WAITING, Status.WAITING]
    tokens = run(engine)
    assert [sequence.cached.total for sequence in sequences] == [0, 40, 40]
    for choice in (1, 3):
        assert tokens["r", choice] == expected_tokens(range(41), 8, seed=0, choice=choice)


def test_choices_may_have_different_pasts(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    whole = [expected_tokens(range(9), 10, seed=0, choice=choice) for choice in range(3)]
    engine = make_engine(100)
    engine.add(make_request("r", range(9), max_tokens=10, emitted={c: whole[c][: 3 * c] for c in range(3)}))
    assert run(engine) == {("r", choice): whole[choice][3 * choice :] for choice in range(3)}


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_siblings_go_on_without_their_leader(
    make_engine: MakeEngine, make_request: MakeRequest, num_steps: int
) -> None:
    engine = make_engine(100)
    engine.add(make_request("r", range(30), emitted={0: [], 1: []}))
    for _ in range(num_steps):
        engine.step()
    engine.cancel("r", 0)
    engine.check()
    assert run(engine)["r", 1] == expected_tokens(range(30), 8, seed=0, choice=1)


# How a sequence ends


def test_stop_token_is_part_of_the_output(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    tokens = expected_tokens(range(5), 8, seed=0)
    engine = make_engine(20)
    engine.add(make_request("r", range(5), stop_token_ids=(tokens[3],)))
    outputs: list[StepOutput] = []
    while not engine.is_idle:
        outputs += engine.step()
    assert [output.token.token_id for output in outputs if output.token] == tokens[:4]
    assert [output.finish_reason for output in outputs] == [None, None, None, "stop"]


def test_length_counts_what_was_emitted_before(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(20)
    engine.add(make_request("r", range(5), max_tokens=3, emitted={0: [1, 2]}))
    [output] = engine.step()
    assert output.finish_reason == "length"
    assert engine.is_idle
    assert output.sequence.finished_at is not None


@IN_ORDER
def test_a_failed_step_ends_its_sequences_and_no_others(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(12, max_num_seqs=1)
    runner = runner_of(engine)
    engine.add(make_request("bad", range(8), emitted={0: [], 1: []}))
    engine.add(make_request("good", range(50, 60)))

    def explode(batch: Batch) -> list[SampledToken | None]:
        raise RuntimeError("no such thing as a free lunch")

    runner.execute, execute = explode, runner.execute  # type: ignore[method-assign]
    [output] = engine.step()
    assert (output.sequence.request_id, output.sequence.choice, output.error) == ("bad", 0, STEP_FAILED)
    assert output.finish_reason is None
    engine.check()
    assert engine.counts().free == 12, "half-written blocks must not be cached"
    runner.execute = execute  # type: ignore[method-assign]
    tokens = run(engine)
    assert tokens["good", 0] == expected_tokens(range(50, 60), 8, seed=0)
    assert tokens["bad", 1] == expected_tokens(range(8), 8, seed=0, choice=1)


def test_a_runner_that_forgets_results_fails_the_step(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(12)
    engine.add(make_request("r", range(8)))
    runner_of(engine).execute = lambda batch: []  # type: ignore[method-assign]
    assert [output.error for output in engine.step()] == [STEP_FAILED]


# Cancel


@IN_ORDER
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_cancel_between_steps_frees_everything_at_once(
    make_engine: MakeEngine, make_request: MakeRequest, num_steps: int
) -> None:
    """Queued, reading its prompt, decoding; siblings blocked, queued, decoding."""
    engine = make_engine(50)
    engine.add(make_request("r", range(30), emitted={0: [], 1: []}))
    for _ in range(num_steps):
        engine.step()
    assert engine.cancel("r") == []
    engine.check()
    assert engine.is_idle
    assert engine.counts().used == 0
    assert engine.step() == []
    assert engine.cancel("r") == [], "once more is fine"


@IN_ORDER
def test_cancel_in_flight_keeps_the_blocks_until_apply(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(12)
    engine.add(make_request("gone", range(8)))
    engine.add(make_request("stays", range(50, 58)))
    step = engine.schedule()
    assert step is not None
    engine.cancel("gone")
    assert engine.counts().used == 4
    assert all(engine.pool.state(b) is BlockState.USED for item in step.batch.items for b in item.block_ids)
    outputs = engine.apply(step, runner_of(engine).execute(step.batch))
    engine.check()
    assert [output.sequence.request_id for output in outputs] == ["stays"]
    assert engine.counts().used == 2
    assert outputs[0].token is not None
    assert [outputs[0].token.token_id, *run(engine)["stays", 0]] == expected_tokens(range(50, 58), 8, seed=0)


@IN_ORDER
def test_cancel_in_flight_of_a_step_that_fails(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(12)
    engine.add(make_request("gone", range(8)))
    step = engine.schedule()
    assert step is not None
    engine.cancel("gone")
    assert engine.apply(step, None) == []
    engine.check()
    assert engine.counts().free == 12
