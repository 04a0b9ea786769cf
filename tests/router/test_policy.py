"""The policy in scenarios of a few lines. Unless said otherwise a token of a prompt takes 0.4 ms to read, a decode step
20 ms and 0.5 ms per sequence, a handover 10 ms, and bytes take no time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tandem.router import cost_model, policy
from tandem.router.cost_model import EXPECTED_TOKENS
from tandem.router.policy import (
    POLICIES,
    PolicyName,
    RequestView,
    Route,
    Source,
    Speeds,
    WorkerView,
    pick_prefill,
    route,
)
from tandem.router.rendezvous import key_of
from tandem.router.roster import Roster
from tandem.workers.types import Role

P0, P1 = WorkerView("p0", "prefill"), WorkerView("p1", "prefill")
D0, D1 = WorkerView("d0", "decode"), WorkerView("d1", "decode")
A0 = WorkerView("a0", "aggregated")
LONG = RequestView(num_prompt_tokens=1024)
EVERY_POLICY = pytest.mark.parametrize("policy", sorted(POLICIES))


def chosen(request: RequestView, workers: Sequence[WorkerView], policy: PolicyName = "cost") -> Route:
    found = route(request, workers, policy=policy)
    assert found is not None
    return found


# Who is there


@EVERY_POLICY
def test_one_of_each(policy: PolicyName) -> None:
    assert route(LONG, [P0, D0], policy=policy) == Route("p0", "d0")


@EVERY_POLICY
def test_nobody_decodes(policy: PolicyName) -> None:
    assert route(LONG, [P0, P1], policy=policy) is None
    assert route(LONG, [], policy=policy) is None


@EVERY_POLICY
def test_no_prefill_worker_means_local(policy: PolicyName) -> None:
    assert route(LONG, [D0], policy=policy) == Route(None, "d0")


@EVERY_POLICY
def test_aggregated_worker_does_both(policy: PolicyName) -> None:
    assert route(LONG, [P0, A0], policy=policy) == Route(None, "a0")


@EVERY_POLICY
def test_refused_pair_is_not_used(policy: PolicyName) -> None:
    picky = replace(D0, unpaired=frozenset({"p0"}))
    assert route(LONG, [P0, P1, picky], policy=policy) == Route("p1", "d0")
    assert route(LONG, [P0, picky], policy=policy) == Route(None, "d0")


def test_refused_pairs_leave_the_others_however_many_are_better() -> None:
    crowd = [WorkerView(f"x{number}", "prefill") for number in range(20)]
    picky = replace(D0, unpaired=frozenset(worker.worker_id for worker in crowd))
    assert route(LONG, [*crowd, replace(P0, num_waiting_tokens=500), picky]) == Route("p0", "d0")


@EVERY_POLICY
def test_workers_that_failed_are_avoided(policy: PolicyName) -> None:
    assert route(LONG, [P0, D0, D1], {"d0"}, policy) == Route("p0", "d1")
    assert route(LONG, [P0, D0], {"d0"}, policy) is None


def test_another_prefill_worker() -> None:
    assert pick_prefill(LONG, [P0, P1, D0], D0, {"p0"}) == Route("p1", "d0")
    assert pick_prefill(LONG, [P0, D0], D0, {"p0"}) == Route(None, "d0")
    assert pick_prefill(replace(LONG, overlap={"p1": 16}), [P0, P1, D0], D0) == Route("p1", "d0")


# The prefill worker: queue ahead + what is missing, at its own speed


def test_prefix_overlap_attracts() -> None:
    assert route(replace(LONG, overlap={"p1": 16}), [P0, P1, D0]) == Route("p1", "d0")
    assert chosen(replace(LONG, overlap={"p1": 16}), [P0, P1, D0]).num_tokens == 512


def test_queue_outweighs_overlap() -> None:
    """Prefill workers have no fast path between them, so what the one holds is not fetched by the other."""
    request = replace(LONG, overlap={"p1": 16}, block_bytes=20_000_000)
    near = replace(D0, bytes_per_s={"p0": 1e11, "p1": 1e11}, num_sequences=4)
    assert chosen(request, [P0, replace(P1, num_waiting_tokens=600), near]).prefill == "p0"
    assert chosen(request, [P0, replace(P1, num_waiting_tokens=400), near]).prefill == "p1"


def test_faster_worker_may_have_a_longer_queue() -> None:
    fast = replace(P1, speeds=Speeds(prefill_token_s=0.0001), num_waiting_tokens=2000)
    assert route(LONG, [P0, fast, D0]) == Route("p1", "d0")  # 3,024 tokens at 0.1 ms; 1,024 at 0.4 ms
    assert route(replace(LONG, num_prompt_tokens=500), [P0, fast, D0]) == Route("p0", "d0")


def test_attention_makes_long_prompts_dearer() -> None:
    """The one is fast for short prompts, the other for long ones."""
    growing = replace(P0, speeds=Speeds(prefill_token_s=0.0001, prefill_attended_s=1e-6))
    flat = replace(P1, speeds=Speeds(prefill_token_s=0.0005))
    assert chosen(replace(LONG, num_prompt_tokens=500), [growing, flat, D0]).prefill == "p0"
    assert chosen(replace(LONG, num_prompt_tokens=2000), [growing, flat, D0]).prefill == "p1"
    assert chosen(LONG, [growing, D0]).ttft_s == pytest.approx(1024 * (0.0001 + 1e-6 * 512) + 0.01)


# The decode worker


def test_fewer_sequences_mean_faster_tokens() -> None:
    assert route(LONG, [P0, replace(D0, num_sequences=3), D1]) == Route("p0", "d1")
    assert chosen(replace(LONG, num_choices=4), [P0, replace(D0, num_sequences=3)]).itl_s == pytest.approx(0.0235)


def test_faster_decode_worker_may_have_more_sequences() -> None:
    fast = replace(D1, speeds=Speeds(decode_step_s=0.01), num_sequences=12)
    assert route(LONG, [P0, D0, fast]) == Route("p0", "d1")


def test_worker_without_blocks_is_a_last_resort() -> None:
    full = replace(D0, num_available_blocks=0)
    assert route(LONG, [P0, full, replace(D1, num_sequences=3)]) == Route("p0", "d1")
    assert route(LONG, [P0, full]) == Route("p0", "d0")


def test_worker_without_a_place_is_a_last_resort() -> None:
    full = replace(D0, num_sequences=4, max_num_seqs=4)
    assert route(LONG, [P0, full, replace(D1, num_sequences=9)]) == Route("p0", "d1")
    assert chosen(LONG, [P0, full]).ttft_s > 0.4096 + 0.01 + EXPECTED_TOKENS * 0.02 / 4


def test_held_blocks_need_not_be_pulled() -> None:
    """The pair together: D1 has one sequence more, but pulling 200 MB takes longer than that costs."""
    request = replace(LONG, block_bytes=100 << 20, overlap={"d1": 30})
    assert chosen(request, [P0, replace(D0, num_sequences=0), replace(D1, num_sequences=1)]).decode == "d1"
    assert chosen(replace(request, block_bytes=1 << 10), [P0, D0, replace(D1, num_sequences=9)]).decode == "d0"


def test_faster_path_is_taken() -> None:
    near = replace(D0, bytes_per_s={"p0": 1e9, "p1": 1e8}, num_sequences=4)
    workers = [replace(P0, num_waiting_tokens=1000), P1, near]
    assert chosen(replace(LONG, block_bytes=10 << 20), workers).prefill == "p0"
    assert chosen(replace(LONG, block_bytes=1 << 10), workers).prefill == "p1"


# Reading where one decodes: the same comparison


def test_short_prompt_is_read_where_it_is_decoded() -> None:
    """Two times 20 tokens (for it, and for whoever may come) take less than a handover."""
    assert route(replace(LONG, local_prefill_tokens=0, num_prompt_tokens=20), [P0, D0]) == Route(None, "d0")
    assert route(replace(LONG, local_prefill_tokens=0, num_prompt_tokens=30), [P0, D0]) == Route("p0", "d0")
    assert route(replace(LONG, num_prompt_tokens=64), [P0, D0]) == Route(None, "d0")  # a decode worker's own rule
    assert route(replace(LONG, num_prompt_tokens=65), [P0, D0]) == Route("p0", "d0")


def test_decode_worker_that_holds_most_of_it_reads_the_rest() -> None:
    """It has 96 tokens left, and two times those take less than a fetch of 29 blocks, those, and a handover."""
    request = replace(LONG, block_bytes=1_000_000, overlap={"d0": 29})
    assert route(request, [P0, D0]) == Route(None, "d0")
    assert route(replace(request, overlap={"d0": 10}), [P0, D0]) == Route("p0", "d0", Source("d0", 10))


def test_streams_count() -> None:
    request = replace(LONG, block_bytes=1_000_000, overlap={"d0": 29})
    assert chosen(request, [P0, replace(D0, num_sequences=1)]).prefill is None
    assert chosen(request, [P0, replace(D0, num_sequences=8)]).prefill == "p0"  # each of 8 would lose 38 ms


def test_long_queue_for_prefill_is_passed_by() -> None:
    assert chosen(LONG, [replace(P0, num_waiting_tokens=500), D0]).prefill == "p0"
    assert chosen(LONG, [replace(P0, num_waiting_tokens=2000), D0]).prefill is None


def test_streams_are_not_pushed_beyond_the_limit() -> None:
    """A chunk of 512 tokens makes one step of 20 ms into one of 225 ms."""
    queue = [replace(P0, num_waiting_tokens=20_000), replace(D0, num_sequences=1)]
    assert chosen(LONG, queue).prefill is None
    assert chosen(replace(LONG, slo_itl_s=0.1), queue).prefill == "p0"
    assert chosen(replace(LONG, slo_itl_s=0.3), queue).prefill is None
    assert chosen(replace(LONG, slo_itl_s=0.1), [replace(queue[0]), D0]).prefill is None  # nobody is hurt
    assert chosen(replace(LONG, slo_itl_s=0.1), [queue[0], replace(queue[1], chunk_tokens=32)]).prefill is None


def test_where_nothing_is_known_of_prefixes_prompts_go_to_prefill_workers() -> None:
    """An index that is down must not send prompts to decode workers."""
    for num_tokens in (65, 200, 1024, 30_000):
        assert chosen(replace(LONG, num_prompt_tokens=num_tokens, overlap={}), [P0, P1, D0, D1]).prefill is not None


# Fetching from a peer


def test_history_on_a_decode_worker_is_fetched_by_prefill() -> None:
    request = replace(LONG, block_bytes=700_000, overlap={"d0": 20})
    found = chosen(request, [P0, D0])
    assert found == Route("p0", "d0", Source("d0", 20))
    assert found.num_tokens == 1024 - 20 * 32
    assert found.ttft_s == pytest.approx(0.01 + 20 * 700_000 / 1e9 + 384 * 0.0004 + 0.01)


def test_a_source_is_named_also_where_computing_is_predicted_to_be_faster() -> None:
    """The worker decides, who knows what it holds. Else a turn would cost the answer before it again, where that is
    short and decoding goes on elsewhere: d0, who has it, could not say so."""
    busy = replace(D0, num_sequences=4)
    slow = replace(LONG, block_bytes=20_000_000, overlap={"d0": 20})  # 20 ms a block; computing one takes 12.8 ms
    found = chosen(slow, [P0, busy])
    assert (found, found.num_tokens) == (Route("p0", "d0", Source("d0", 20)), 1024)
    found = chosen(replace(slow, block_bytes=10_000_000), [P0, busy])
    assert (found, found.num_tokens) == (Route("p0", "d0", Source("d0", 20)), 1024 - 20 * 32)
    answered = replace(LONG, block_bytes=3_000_000, overlap={"p0": 29, "d0": 30})  # 13 ms with a handover's 10
    found = chosen(answered, [P0, replace(D0, num_sequences=50), D1])
    assert (found, found.num_tokens) == (Route("p0", "d1", Source("d0", 30)), 96)


def test_idle_prefill_worker_fetches_from_the_busy_one() -> None:
    request = replace(LONG, block_bytes=700_000, overlap={"p0": 30})
    busy = replace(P0, num_waiting_tokens=1000)
    assert route(request, [busy, P1, D0]) == Route("p1", "d0", Source("p0", 30))


def test_source_that_holds_no_more_is_none() -> None:
    request = replace(LONG, block_bytes=1000, overlap={"p0": 20, "d0": 20})
    assert route(request, [P0, D0]) == Route("p0", "d0")


def test_nothing_is_fetched_where_kv_must_not_travel() -> None:
    strangers = replace(D0, unpaired=frozenset({"p1"}))
    request = replace(LONG, block_bytes=1000, overlap={"d0": 30})
    assert pick_prefill(request, [P1, strangers, D1], D1) == Route("p1", "d1")


def test_aggregated_workers_fetch_and_lend() -> None:
    request = replace(LONG, block_bytes=1000, overlap={"a0": 30})
    busy, idle = replace(A0, num_sequences=99), WorkerView("a1", "aggregated")
    assert chosen(request, [busy, idle]) == Route(None, "a1", Source("a0", 30))
    assert chosen(request, [P0, busy, D0]) == Route("p0", "d0", Source("a0", 30))


def test_decode_worker_fetches_too() -> None:
    """Nobody else can read it, and a peer that reads prompts no more still holds it."""
    elsewhere = replace(D1, num_sequences=50)
    request = replace(LONG, block_bytes=700_000, overlap={"d1": 31})
    assert route(request, [D0, elsewhere]) == Route(None, "d0", Source("d1", 31))


# No herd


def test_ties_are_spread_evenly() -> None:
    routed: Counter[str | None] = Counter()
    for _ in range(60):
        workers = [replace(worker, num_routed=routed[worker.worker_id]) for worker in (P0, P1, D0, D1)]
        found = chosen(LONG, workers)
        routed.update((found.prefill, found.decode))
    assert set(routed.values()) == {30}


def test_hot_prefix_spreads_once_its_queue_is_longer_than_a_recompute() -> None:
    """40 requests at once for a prompt of which only p0 holds 24 blocks of 32."""
    workers = {f"p{number}": WorkerView(f"p{number}", "prefill") for number in range(4)}
    busy = replace(D0, num_sequences=60)
    given: Counter[str | None] = Counter()
    for _ in range(40):
        found = chosen(replace(LONG, overlap={"p0": 24}, block_bytes=10_000_000), [*workers.values(), busy])
        assert found.prefill is not None
        given[found.prefill] += 1
        worker = workers[found.prefill]
        workers[found.prefill] = replace(worker, num_waiting_tokens=worker.num_waiting_tokens + found.num_tokens)
    assert len(given) == 4
    assert given.most_common(1)[0][0] == "p0"


@EVERY_POLICY
def test_order_of_workers_does_not_matter(policy: PolicyName) -> None:
    workers = [P0, P1, D0, D1, A0]
    assert route(LONG, workers, policy=policy) == route(LONG, workers[::-1], policy=policy)


# A client's key


def with_key(label: str, workers: Sequence[WorkerView], request: RequestView = LONG) -> Route:
    return chosen(replace(request, preferred=Roster(workers).preferred(key_of(label))), workers)


def several(role: Role, count: int) -> list[WorkerView]:
    return [WorkerView(f"{role}-{number}", role, num_routed=number) for number in range(count)]


LABELS = [f"key {number}" for number in range(20)]


@pytest.mark.parametrize("count", [3, 300])
def test_among_equals_a_key_decides(count: int) -> None:
    """The same way in whatever order workers are known, and whatever they were given before."""
    workers = [*several("prefill", count), *several("decode", count)]
    others = [replace(worker, num_routed=7) for worker in reversed(workers)]
    routes = [with_key(label, workers) for label in LABELS]
    assert [with_key(label, others) for label in LABELS] == routes
    assert len({route.decode for route in routes}) > 1
    assert len({route.prefill for route in routes}) > 1
    assert {(route.prefill, route.decode) for route in routes} != {("prefill-0", "decode-0")}


@pytest.mark.parametrize("count", [3, 300])
@pytest.mark.parametrize("label", LABELS[:5])
def test_a_key_outweighs_no_load_and_no_prefix(label: str, count: int) -> None:
    workers = {worker.worker_id: worker for worker in [*several("prefill", count), *several("decode", count)]}
    first = with_key(label, list(workers.values()))
    assert first.prefill is not None
    busy = replace(workers[first.decode], num_sequences=1)
    elsewhere = with_key(label, list((workers | {first.decode: busy}).values()))
    assert elsewhere.decode != first.decode
    assert with_key(label, list((workers | {first.decode: busy}).values())[::-1]) == elsewhere  # its next choice
    queue = replace(workers[first.prefill], num_waiting_tokens=LONG.block_size)
    assert with_key(label, list((workers | {first.prefill: queue}).values())).prefill != first.prefill
    holder = next(name for name in workers if name.startswith("prefill") and name != first.prefill)
    assert with_key(label, list(workers.values()), replace(LONG, overlap={holder: 1})).prefill == holder


@pytest.mark.parametrize("num_tokens", [65, 200, 1024])
def test_a_key_changes_no_path(num_tokens: int) -> None:
    request, workers = replace(LONG, num_prompt_tokens=num_tokens), [P0, P1, D0, D1]
    for label in LABELS:
        assert (with_key(label, workers, request).prefill is None) == (chosen(request, workers).prefill is None)


def test_keys_are_spread_evenly_and_stay_when_others_go() -> None:
    workers = several("decode", 10)
    labels = [f"key {number}" for number in range(600)]
    before = {label: with_key(label, workers).decode for label in labels}
    assert all(30 < count < 95 for count in Counter(before.values()).values())
    after = {label: with_key(label, workers[1:]).decode for label in labels}
    assert {before[label] for label in labels if before[label] != after[label]} == {workers[0].worker_id}
    assert len({after[label] for label in labels if before[label] == workers[0].worker_id}) == 9


# Limits


def test_pair_that_meets_the_limits_is_preferred() -> None:
    slow_tokens = replace(D0, speeds=Speeds(decode_step_s=0.05, handover_s=0.0))
    slow_start = replace(D1, num_available_blocks=0)  # waits 1.3 s for blocks
    assert chosen(replace(LONG, slo_itl_s=0.1, slo_ttft_s=9), [P0, slow_tokens, slow_start]).decode == "d1"
    assert chosen(replace(LONG, slo_itl_s=0.04), [P0, slow_tokens, slow_start]).decode == "d1"
    assert chosen(replace(LONG, slo_ttft_s=1.0), [P0, slow_tokens, slow_start]).decode == "d0"


# Many workers


def test_first_choice_among_hundreds_is_that_among_all() -> None:
    """The best pair is found although pairs are formed of a few only."""
    prefills = [WorkerView(f"p{number}", "prefill", num_waiting_tokens=100 * (number % 37)) for number in range(300)]
    decodes = [WorkerView(f"d{number}", "decode", num_sequences=1 + number % 23) for number in range(300)]
    best_prefill, best_decode = replace(P0, worker_id="best p"), replace(D0, worker_id="best d")
    assert route(LONG, [*prefills[1:], *decodes, best_prefill, best_decode]) == Route("best p", "best d")
    holder = replace(decodes[200], num_sequences=2)
    request = replace(LONG, block_bytes=30_000_000, overlap={"d200": 32})
    assert route(request, [*prefills, *decodes[:200], holder]) == Route(None, "d200")


# The other rules


def test_round_robin_takes_turns() -> None:
    busy = replace(P1, num_waiting_tokens=10_000)
    assert route(LONG, [replace(P0, num_routed=5), busy, D0], policy="round-robin") == Route("p1", "d0")
    assert chosen(LONG, [P0, replace(D0, num_routed=5), replace(D1, num_sequences=99)], "round-robin").decode == "d1"


def test_least_loaded_ignores_what_is_held() -> None:
    request = replace(LONG, overlap={"p1": 31, "d1": 31})
    workers = [P0, replace(P1, num_waiting_tokens=1), D0, replace(D1, num_sequences=1)]
    assert route(request, workers, policy="least-loaded") == Route("p0", "d0")


def test_prefix_ignores_load_until_prefixes_are_equal() -> None:
    busy = [replace(P1, num_waiting_tokens=10_000), replace(D1, num_sequences=99)]
    assert route(replace(LONG, overlap={"p1": 1, "d1": 1}), [P0, D0, *busy], policy="prefix") == Route("p1", "d1")
    assert route(LONG, [P0, D0, *busy], policy="prefix") == Route("p0", "d0")


def test_few_candidates_lose_little_against_all_pairs() -> None:
    """Brute force over every pair, in random houses with fast and slow paths."""
    rng = random.Random(0)
    num_equal = 0
    for _ in range(40):
        prefills = [
            WorkerView(
                f"p{number}",
                "prefill",
                num_waiting_tokens=rng.choice([0, rng.randrange(4000)]),
                speeds=Speeds(prefill_token_s=rng.uniform(3e-4, 5e-4)),
            )
            for number in range(24)
        ]
        decodes = [
            WorkerView(
                f"d{number}",
                "decode",
                num_sequences=rng.randrange(20),
                num_available_blocks=rng.choice([10, 5000]),
                speeds=Speeds(decode_step_s=rng.uniform(0.01, 0.03)),
                bytes_per_s={worker.worker_id: rng.choice([5e8, 1e10]) for worker in prefills},
            )
            for number in range(24)
        ]
        workers = [*prefills, *decodes]
        holders = rng.sample(workers, rng.choice([0, 3, 24]))
        request = RequestView(
            num_prompt_tokens=2000,
            block_bytes=rng.choice([700_000, 5_000_000]),
            overlap={worker.worker_id: rng.randrange(1, 60) for worker in holders},
        )
        sources = cost_model.find_sources(request, workers)
        options = [policy._local(request, decode, sources) for decode in decodes]
        for prefill in prefills:
            reading = cost_model.read(request, prefill, sources)
            options += [policy._remote(request, prefill, decode, reading) for decode in decodes]
        costs = {option.route: option.cost_s for option in options}
        found = costs[chosen(request, workers)]
        assert found <= 1.2 * min(costs.values())
        num_equal += found == min(costs.values())
    assert num_equal >= 38
