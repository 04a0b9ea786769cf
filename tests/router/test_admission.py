"""The gate: who is let in, who waits, who is sent away. A prediction is a number here; the clock is the test's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.router import admission
from tandem.router.admission import Gate, Prediction
from tandem.router.cost_model import RequestView, WorkerView
from tandem.router.embedding import choose_reader, predicted
from tandem.router.errors import ApiError
from tandem.workers.protocol import Embed, Submit


@dataclass
class Desk:
    """Requests in front of a gate. `queue_s` is what lies ahead of whoever comes; each that is let in adds to it."""

    gate: Gate
    queue_s: float = 0.0
    itl_s: float = 0.01
    is_alone: bool = False
    let_in: list[str] = field(default_factory=list)
    now: float = 0.0

    def ask(self, name: str, read_s: float = 1.0, priority: int = 0) -> asyncio.Task[None]:
        def book() -> None:
            self.let_in.append(name)
            self.queue_s += read_s

        def predict() -> Prediction:
            return Prediction(self.queue_s + read_s, self.queue_s, self.itl_s, self.is_alone)

        return asyncio.create_task(self.gate.enter(predict, book, self.now, priority))

    def finish(self, seconds: float) -> None:
        self.queue_s -= seconds
        self.gate.notify()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def refusal(task: asyncio.Task[None]) -> ApiError:
    error = task.exception()
    assert isinstance(error, ApiError)
    assert error.status == 429
    return error


def retry_after(error: ApiError) -> int:
    return int(dict(error.headers)["retry-after"])


def desk(slo_ttft_s: float | None = 3.0, slo_itl_s: float | None = None, max_queue: int = 8) -> Desk:
    made = Desk(Gate(slo_ttft_s, slo_itl_s, max_queue, clock=lambda: made.now))
    return made


async def test_what_meets_the_limit_is_let_in_at_once() -> None:
    house = desk()
    await house.ask("a")
    await house.ask("b")
    await house.ask("c")
    assert house.let_in == ["a", "b", "c"]  # 1, 2 and 3 s


async def test_what_would_miss_it_waits_and_enters_in_order() -> None:
    house = desk()
    tasks = [house.ask(name) for name in "abcde"]
    await settle()
    assert (house.let_in, house.gate.num_waiting) == (["a", "b", "c"], 2)
    house.finish(1.0)
    await settle()
    assert (house.let_in, house.gate.num_waiting) == (["a", "b", "c", "d"], 1)
    house.finish(1.0)
    await asyncio.gather(*tasks)
    assert house.let_in == ["a", "b", "c", "d", "e"]


async def test_short_one_does_not_overtake() -> None:
    house = desk()
    house.queue_s = 2.5
    first, second = house.ask("long"), house.ask("short", read_s=0.1)
    await settle()
    assert house.let_in == []
    house.finish(0.5)
    await settle()
    assert house.let_in == ["long"]
    house.finish(1.0)
    await asyncio.gather(first, second)


async def test_who_has_a_priority_lets_others_pass_for_a_while() -> None:
    house = desk(slo_ttft_s=None, slo_itl_s=0.05)
    house.itl_s = 0.06
    tasks = [house.ask(name, priority=priority) for name, priority in (("c", 2), ("b", 1), ("a", 0))]
    await settle()
    house.now += 9.0
    tasks += [house.ask("a, later"), house.ask("c, later", priority=2)]
    await settle()
    house.now += 2.0
    tasks.append(house.ask("too late to pass b"))
    await settle()
    house.itl_s = 0.05
    house.gate.notify()
    await asyncio.gather(*tasks)
    assert house.let_in == ["a", "a, later", "b", "too late to pass b", "c", "c, later"]


async def test_who_comes_before_all_that_wait_is_looked_at_at_once() -> None:
    house = desk()
    house.queue_s = 2.5
    background = house.ask("long", read_s=0.6, priority=1)
    await settle()
    await house.ask("short", read_s=0.4)
    assert (house.let_in, background.done()) == (["short"], False)
    background.cancel()


async def test_too_late_for_it_is_refused_with_the_time_that_is_missing() -> None:
    house = desk(slo_ttft_s=1.02)
    house.queue_s = 7.0
    task = house.ask("a")  # needs 1 s of its 1.02 s: may wait for 20 ms
    await asyncio.wait([task], timeout=2)
    assert retry_after(refusal(task)) == 7
    assert house.gate.num_waiting == 0
    assert house.let_in == []


async def test_what_could_never_meet_it_does_not_wait() -> None:
    task = desk().ask("a", read_s=5.0)
    await settle()
    assert retry_after(refusal(task)) == 2


async def test_line_is_bounded() -> None:
    house = desk(max_queue=2)
    house.queue_s = 2.5
    tasks = [house.ask(name) for name in "abc"]
    await settle()
    assert [task.done() for task in tasks] == [False, False, True]
    refusal(tasks[2])
    house.finish(2.5)
    await asyncio.gather(*tasks[:2])
    assert house.let_in == ["a", "b"]


async def test_waiting_counts_as_part_of_the_time() -> None:
    house = desk()
    house.queue_s = 2.5
    task = house.ask("a")
    await settle()
    house.now = 1.5
    house.finish(1.5)  # 1.5 s waited + 1.0 s queue + 1.0 s: too late still
    await settle()
    assert not task.done()
    house.finish(0.9)
    await task


async def test_time_between_tokens_is_a_limit_of_its_own() -> None:
    house = desk(slo_ttft_s=None, slo_itl_s=0.05)
    await house.ask("a")
    house.itl_s = 0.06
    task = house.ask("b")
    await settle()
    assert not task.done()
    house.itl_s = 0.05
    house.gate.notify()
    await task


async def test_slow_memory_of_an_idle_house_is_put_to_the_test() -> None:
    """Speeds are learned from requests: were all refused because of them, they would never change again."""
    house = desk(slo_ttft_s=None, slo_itl_s=0.05)
    house.itl_s, house.is_alone = 0.4, True
    await house.ask("probe")
    house.now += admission.PROBE_S - 1
    early = house.ask("early")
    await settle()
    assert not early.done()
    house.now += 1
    house.gate.notify()
    await early
    house.now += admission.PROBE_S
    house.is_alone = False
    late = house.ask("late")
    await settle()
    assert not late.done()
    late.cancel()


async def test_predictions_are_looked_at_again_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "POLL_S", 0.01)
    house = desk()
    house.queue_s = 2.5
    task = house.ask("a")
    await settle()
    house.queue_s = 0.0  # nobody says so
    await asyncio.wait_for(task, 1.0)


async def test_client_that_leaves_makes_place() -> None:
    house = desk()
    house.queue_s = 2.5
    first, second = house.ask("a"), house.ask("b")
    await settle()
    first.cancel()
    await settle()
    assert house.gate.num_waiting == 1
    house.finish(2.5)
    await second
    assert house.let_in == ["b"]


async def test_whoever_cannot_be_served_is_told_why() -> None:
    house = desk()
    house.queue_s = 2.5
    task = house.ask("a")
    await settle()

    def nobody() -> Prediction:
        raise ApiError(503, "gone")

    house.gate._waiting[0].predict = nobody
    house.gate.notify()
    await asyncio.wait([task])
    error = task.exception()
    assert isinstance(error, ApiError)
    assert error.status == 503


# In the house

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me a long story about foxes and dogs."}]}


async def test_limits_hold_requests_back_then_refuse_them(open_house: Any, saying: Any) -> None:
    """Each sequence adds 0.5 ms to a step of 20 ms: the fourth at once would make it 22 ms."""
    house = await open_house(saying("Once upon a time.", delay_s=0.01), slo_itl_s=0.0216, max_queue=2)
    responses = await asyncio.gather(*(house.http.post("/v1/chat/completions", json=BODY) for _ in range(8)))
    refused = [response for response in responses if response.status_code == 429]
    assert [response.status_code for response in responses].count(200) == 5
    assert len(refused) == 3
    assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
    assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"
    submitted = [message for message in house.workers["decode-0"].received if isinstance(message, Submit)]
    assert len(submitted) == 5  # what was refused was never begun
    assert await house.outcomes() == {"ok": 5, "rejected": 3}
    assert house.gateway.workers.get("decode-0").account.num_sequences == 0


async def test_client_leaves_while_it_is_held_back(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Once upon a time.", delay_s=0.05), slo_itl_s=0.0206)
    first = asyncio.create_task(house.http.post("/v1/chat/completions", json=BODY))
    await house.until(lambda: house.workers["decode-0"].num_running == 1)
    second = asyncio.create_task(house.http.post("/v1/chat/completions", json=BODY))
    await house.until(lambda: house.gateway.gate.num_waiting == 1)
    assert house.gateway.metrics.registry.get_sample_value("tandem_requests_held_back") == 1
    second.cancel()
    await house.until(lambda: house.gateway.gate.num_waiting == 0)
    assert (await first).status_code == 200
    assert await house.outcomes() == {"ok": 1, "cancelled": 1}


async def test_prompts_of_one_request_enter_together(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes."), slo_ttft_s=10.0)
    answer = await house.client.completions.create(model="tiny", prompt=["One.", "Two.", "Three."])
    assert len(answer.choices) == 3
    value = house.gateway.metrics.registry.get_sample_value
    assert value("tandem_predicted_time_to_first_token_seconds_count") == 3
    assert value("tandem_time_to_first_token_over_predicted_count") == 3
    assert house.gateway.workers.get("decode-0").account.num_prefill_tokens == 0


async def test_without_limits_nothing_is_held_back(open_house: Any, saying: Any) -> None:
    house = await open_house(saying("Yes.", delay_s=0.01), max_in_flight=3)
    responses = await asyncio.gather(*(house.http.post("/v1/chat/completions", json=BODY) for _ in range(5)))
    assert sorted(response.status_code for response in responses) == [200, 200, 200, 429, 429]
    assert await house.outcomes() == {"ok": 3, "rejected": 2}


async def test_texts_to_embed_wait_in_the_same_line(open_house: Any) -> None:
    """A token is read in 0.4 ms: three texts of 2,500 are 3 s, and what a text adds is on the account at once."""
    house = await open_house(slo_ttft_s=3.2, max_queue=1, max_model_len=4096)
    worker = house.workers["prefill-0"]
    worker.embedding = lambda message: None  # it is busy for ever
    body = {"model": "tiny", "input": [7] * 2500}
    asking = [asyncio.create_task(house.http.post("/v1/embeddings", json=body)) for _ in range(5)]
    await house.until(lambda: house.gateway.gate.num_waiting == 1 and any(task.done() for task in asking))
    refused = next(task for task in asking if task.done()).result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "retry-after" in refused.headers
    assert len([message for message in worker.received if isinstance(message, Embed)]) == 3
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert await house.outcomes() == {"cancelled": 4, "rejected": 1}
    link = house.gateway.workers.get("prefill-0")
    assert link.account.num_prefill_tokens == 0


def test_what_reading_a_text_is_predicted_to_do() -> None:
    view = RequestView(num_prompt_tokens=100)
    busy = WorkerView("a", "aggregated", num_sequences=4, num_waiting_tokens=50)
    reader = WorkerView("p", "prefill", num_waiting_tokens=50)

    def prediction(worker: WorkerView) -> Prediction:
        choice = choose_reader(view, [worker])
        assert choice is not None
        return predicted(choice)

    assert prediction(busy) == Prediction(pytest.approx(0.06), pytest.approx(0.02), pytest.approx(0.022))
    assert prediction(reader) == Prediction(pytest.approx(0.06), pytest.approx(0.02), 0.0)
    assert prediction(WorkerView("d", "decode")) == Prediction(pytest.approx(0.04), 0.0, 0.0, is_alone=True)
