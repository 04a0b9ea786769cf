"""The prefix index over a real Redis-protocol server: right, and whole again whatever was lost."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from tandem.router.index import publisher as publisher_module
from tandem.router.index import reader as reader_module
from tandem.router.index.publisher import IndexPublisher
from tandem.router.index.reader import IndexReader, parse_answer
from tandem.router.index.scripts import LOOK_UP, NUM_BUCKETS, PUBLISH, owner_tag
from tandem.workers.block_key import block_keys, root_key
from tandem.workers.protocol import Submit

KEYS = [random.Random(number).randbytes(16) for number in range(20)]
W0 = ("w0", 3)


def bucket(key: bytes) -> bytes:
    return b"pfx:{n}:b:" + key[:2]


def lease(worker_id: str, epoch: int) -> bytes:
    return b"pfx:{n}:w:" + owner_tag((worker_id, epoch))


async def test_longest_prefix(publisher: IndexPublisher, reader: IndexReader, publish: Any, until: Any) -> None:
    await publish(publisher, KEYS[:7])
    assert await reader.longest_prefix(KEYS, [W0, ("w1", 0)]) == {"w0": 7}
    assert await reader.longest_prefix(KEYS[:5], [W0]) == {"w0": 5}
    assert await reader.longest_prefix(KEYS[10:], [W0]) == {}
    assert await reader.longest_prefix([], [W0]) == {}
    assert await reader.longest_prefix(KEYS, []) == {}
    publisher.record("removed", KEYS[6])
    publisher.record("removed", KEYS[5])
    publisher.record("removed", b"never stored....")
    await until(lambda: publisher.is_settled)
    assert await reader.longest_prefix(KEYS, [W0]) == {"w0": 5}


@pytest.mark.parametrize(("num_blocks", "num_workers"), [(1, 3), (2, 3), (20, 22), (300, 9), (900, 40)])
def test_every_length_of_every_worker_is_found(server: Any, num_blocks: int, num_workers: int) -> None:
    """The scripts alone, against the truth."""
    rng = random.Random(num_blocks)
    keys = [rng.randbytes(16) for _ in range(num_blocks)]
    tags = {owner_tag((f"w{number}", 0)): f"w{number}" for number in range(num_workers)}
    lengths = {worker_id: rng.randint(0, num_blocks) for worker_id in tags.values()}
    lengths |= {"w1": num_blocks, "w2": lengths["w0"]}
    for tag, worker_id in tags.items():
        names = b"".join(key[:10] for key in keys[: lengths[worker_id]])
        masks = b"\1" * lengths[worker_id]
        server.execute("EVAL", PUBLISH.source, 1, "pfx:{n}:", tag, 1, 1, 60, "era", masks, names, b"")
    for num_asked in (num_blocks, *rng.choices(range(1, num_blocks + 1), k=20)):
        answer = server.execute("EVAL", LOOK_UP.source, 1, "pfx:{n}:", b"".join(keys[:num_asked]))
        expected = {worker_id: min(length, num_asked) for worker_id, length in lengths.items() if length}
        assert parse_answer(answer, tags, num_asked).lengths == expected


def test_litter_makes_answers_coarse_and_not_wrong(server: Any) -> None:
    """Entries of a dead worker, half of them swept: no two neighbours need be alike."""
    rng = random.Random(3)
    keys = [rng.randbytes(16) for _ in range(4000)]
    for worker_id, held in (("dead", [key for key in keys if rng.random() < 0.5]), ("w0", keys[:2500])):
        names = b"".join(key[:10] for key in held)
        tag = owner_tag((worker_id, 0))
        server.execute("EVAL", PUBLISH.source, 1, "pfx:{n}:", tag, 1, 1, 60, "era", b"\1" * len(held), names, b"")
    answer = server.execute("EVAL", LOOK_UP.source, 1, "pfx:{n}:", b"".join(keys))
    found = parse_answer(answer, {owner_tag(("w0", 0)): "w0"}, 4000).lengths["w0"]
    assert 2500 - 32 <= found <= 2500


async def test_earlier_incarnations_do_not_count(publisher: IndexPublisher, reader: IndexReader, publish: Any) -> None:
    await publish(publisher, KEYS)
    assert await reader.longest_prefix(KEYS, [("w0", 4)]) == {}


async def test_a_block_is_held_until_it_leaves_its_last_tier(
    publisher: IndexPublisher, reader: IndexReader, publish: Any, until: Any
) -> None:
    await publish(publisher, KEYS[:3])
    publisher.record("stored", KEYS[2], "host")
    publisher.record("removed", KEYS[2], "pool")
    publisher.record("stored", KEYS[1], "disk")
    await until(lambda: publisher.is_settled)
    assert await reader.longest_prefix(KEYS, [W0]) == {"w0": 3}
    publisher.record("removed", KEYS[2], "host")
    await until(lambda: publisher.is_settled)
    assert await reader.longest_prefix(KEYS, [W0]) == {"w0": 2}


async def test_the_last_word_about_a_block_counts(server: Any, publisher: IndexPublisher, until: Any) -> None:
    for kind in ("stored", "removed", "stored", "removed"):
        publisher.record(kind, KEYS[0])  # type: ignore[arg-type]
    for kind in ("removed", "stored"):
        publisher.record(kind, KEYS[1])  # type: ignore[arg-type]
    await until(lambda: publisher.is_settled)
    assert server.num_entries() == 1
    assert server.execute("HGET", bucket(KEYS[1]), KEYS[1][2:10]) == owner_tag(W0) + b"\1"


async def test_a_worker_lives_on_a_lease_and_gives_it_back(
    server: Any, publisher: IndexPublisher, publish: Any
) -> None:
    await publish(publisher, KEYS)
    assert 0 < server.execute("TTL", lease(*W0)) <= 30
    assert 0 < server.execute("TTL", bucket(KEYS[0])) <= 1800  # what a dead cluster leaves goes away by itself
    await publisher.stop()
    assert server.execute("EXISTS", lease(*W0)) == 0


async def test_the_dead_are_swept_and_the_living_stay(
    server: Any, publishing: Any, reader: IndexReader, publish: Any, until: Any
) -> None:
    dead = await publishing("dead", 0, beat_s=60)
    await publish(dead, KEYS)
    living = await publishing("living", 0)
    await publish(living, KEYS[:6])
    server.execute("HSET", bucket(KEYS[0]), "of a stranger", "who knows")
    server.execute("SET", b"pfx:{n}:b:\0\0", "a string of a stranger")
    await dead.stop()
    first = 0
    while first < NUM_BUCKETS:
        first, _ = await living._sweep_buckets(first, NUM_BUCKETS)
    assert server.num_entries() == 6
    assert await reader.longest_prefix(KEYS, [("living", 0), ("dead", 0)]) == {"living": 6}


async def test_someone_sweeps_without_being_asked(
    server: Any, publishing: Any, publish: Any, until: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(publisher_module, "SWEEP_SLICES", 4)
    dead = await publishing("dead", 0)
    await publish(dead, KEYS[:1])
    await dead.stop()
    await publishing("living", 0)
    await publishing("living too", 0)
    await until(lambda: server.num_entries() == 0)


async def test_overflow_states_everything_again_and_withdraws_the_rest(
    server: Any, publishing: Any, publish: Any, until: Any
) -> None:
    publisher = await publishing(max_pending=15)
    await publish(publisher, KEYS[:10])
    for key in KEYS[5:10]:
        publisher.record("removed", key)
    for key in KEYS[10:]:
        publisher.record("stored", key)
    for key in KEYS[19:15:-1]:
        publisher.record("removed", key)
    publisher._must_restate()  # what the 16th change does; forgets that 5 to 9 have gone
    await until(lambda: publisher.is_settled)
    assert server.num_entries() == 11
    for key in KEYS[16:]:
        publisher.record("stored", key)
    assert publisher._restating is None
    for key in KEYS[:12]:
        publisher.record("removed" if key in KEYS[:5] else "stored", key)
    for key in KEYS[12:16]:
        publisher.record("removed", key)
    assert publisher._restating is not None  # 4 + 12 - 1 + 4 changes
    await until(lambda: publisher.is_settled)
    assert server.num_entries() == 11


async def test_a_server_dies_and_comes_back_empty(
    server: Any, publisher: IndexPublisher, reader: IndexReader, publish: Any, until: Any
) -> None:
    await publish(publisher, KEYS[:5])
    server.kill()
    assert await reader.longest_prefix(KEYS, [W0]) == {}
    assert not reader.is_up
    publisher.record("stored", KEYS[5])
    await until(lambda: not publisher.is_up)
    publisher.record("stored", KEYS[6])
    with pytest.raises(StopIteration) as answered:  # the breaker does not even ask: there is nothing to wait for
        reader.longest_prefix(KEYS, [W0]).send(None)
    assert answered.value.value == {}
    server.start()
    await until(lambda: reader.is_up and publisher.is_up and publisher.is_settled)
    assert await reader.longest_prefix(KEYS, [W0]) == {"w0": 7}


async def test_a_flush_is_noticed_within_a_beat(
    server: Any, publisher: IndexPublisher, publish: Any, until: Any
) -> None:
    await publish(publisher, KEYS)
    server.execute("FLUSHALL")
    await until(lambda: server.num_entries() == 20)


async def test_a_lease_that_somebody_else_wrote_is_noticed(
    server: Any, publisher: IndexPublisher, publish: Any, until: Any
) -> None:
    """As after a failover to a replica that had missed the last batches."""
    await publish(publisher, KEYS)
    for key in KEYS[3:10]:
        server.execute("DEL", bucket(key))
    server.execute("HSET", bucket(b"gone"), b"ne block", owner_tag(W0) + b"\1")
    server.execute("SET", lease(*W0), "12:1")
    await until(lambda: server.num_entries() == 21)
    await until(lambda: server.num_entries() == 20 and publisher.is_settled)


async def test_lost_entries_are_stated_again(server: Any, publisher: IndexPublisher, publish: Any, until: Any) -> None:
    """As after an eviction by a Redis that is short of memory."""
    await publish(publisher, KEYS)
    server.execute("DEL", bucket(KEYS[3]))
    await until(lambda: server.num_entries() == 20)
    publisher._last_restated = time.monotonic()  # not everything again, so soon
    server.execute("DEL", bucket(KEYS[4]))
    await until(lambda: server.num_entries() == 20)


async def test_restating_leaves_what_is_there(server: Any, publishing: Any, reader: IndexReader, publish: Any) -> None:
    publisher = await publishing(beat_s=60)
    await publish(publisher, KEYS)
    publisher._must_restate()
    publisher._wake.set()
    while not publisher.is_settled:
        assert await reader.longest_prefix(KEYS, [W0]) == {"w0": 20}


async def test_restating_much_holds_nobody_up(server: Any, publishing: Any, publish: Any) -> None:
    publisher = await publishing(max_batch=256, max_pending=1000, beat_s=60)
    for number in range(5_000):
        publisher.record("stored", number.to_bytes(16, "little"))
    longest, before = 0.0, time.perf_counter()
    while not publisher.is_settled:
        await asyncio.sleep(0.001)
        longest, before = max(longest, time.perf_counter() - before), time.perf_counter()
    assert server.num_entries() == 5_000
    assert longest < 0.5  # an idle machine: 0.01


async def test_poisoned_entries_do_no_harm(
    server: Any, publisher: IndexPublisher, reader: IndexReader, publish: Any, until: Any
) -> None:
    await publish(publisher, KEYS[:5])
    assert await reader.longest_prefix(KEYS, [W0]) == {"w0": 5}
    tag = owner_tag(("w2", 0))
    server.execute("HSET", bucket(KEYS[18]), KEYS[18][2:10], tag + b"\1")  # holes: not prefix-closed
    server.execute("HSET", bucket(KEYS[9]), KEYS[9][2:10], b"not records")
    server.execute("SET", bucket(KEYS[8]), "not a hash")
    server.execute("SET", bucket(KEYS[19]), "not a hash")
    server.execute("DEL", "pfx:{n}:era")
    server.execute("LPUSH", "pfx:{n}:era", "not a string")
    answer = await reader.longest_prefix(KEYS, [("w1", 0), W0, ("w2", 0)])
    assert answer["w0"] == 5
    assert "w1" not in answer
    assert reader.is_up
    server.execute("SCRIPT", "FLUSH")
    assert (await reader.longest_prefix(KEYS, [W0])) == {"w0": 5}
    await publish(publisher, KEYS[5:])
    assert (await reader.longest_prefix(KEYS, [W0])) == {"w0": 20}


@pytest.mark.parametrize("name", ["lease", "bucket", "turn", "cursor", "routes"])
async def test_a_publisher_survives_a_key_of_the_wrong_type(
    server: Any, publishing: Any, reading: Any, publish: Any, name: str
) -> None:
    key = {"lease": lease(*W0), "bucket": bucket(KEYS[0])}.get(name, f"pfx:{{n}}:{name}".encode())
    server.execute("LPUSH", key, "in the way")
    publisher = await publishing()
    reader = await reading()
    await publish(publisher, KEYS)
    server.execute("DEL", key)
    server.execute("LPUSH", key, "in the way again")
    publisher.record("removed", KEYS[19])
    await publish(publisher, [])
    await asyncio.sleep(0.1)
    await publish(publisher, [])
    assert publisher.is_up
    assert (await reader.longest_prefix(KEYS, [W0])).get("w0") == 19


async def test_slow_answers_cost_the_budget_and_no_more(
    server: Any, publisher: IndexPublisher, reading: Any, publish: Any, until: Any
) -> None:
    await publish(publisher, KEYS)
    reader = await reading(budget_s=0.005)
    server.execute("CLIENT", "PAUSE", "400", "ALL")
    for _ in range(3):
        began = time.perf_counter()
        assert await reader.longest_prefix(KEYS, [W0]) == {}
        assert time.perf_counter() - began < 0.3  # the pause is longer
    assert not reader.is_up  # too slow three times in a row
    reader._budget_s = 1.0
    await until(lambda: reader.is_up)
    assert await reader.longest_prefix(KEYS, [W0]) == {"w0": 20}


async def test_no_server_at_all(reading: Any, publishing: Any) -> None:
    reader = await reading("redis://127.0.0.1:1/0")
    publisher = await publishing(url="redis://127.0.0.1:1/0")
    publisher.record("stored", KEYS[0])
    assert await reader.longest_prefix(KEYS, [W0]) == {}
    assert not reader.is_up


# What was routed lately


async def test_what_was_routed_bridges_the_moment_until_the_worker_says_so(
    publisher: IndexPublisher, reader: IndexReader, publish: Any, monkeypatch: Any
) -> None:
    await publish(publisher, KEYS[:5])
    reader.note_routed(KEYS[:9], [W0, ("w1", 0)])
    assert await reader.longest_prefix(KEYS, [W0, ("w1", 0)]) == {"w0": 9, "w1": 9}
    assert await reader.longest_prefix(KEYS, [W0, ("w1", 1)]) == {"w0": 9}  # another incarnation
    await publisher._beat()
    await reader._look()
    monkeypatch.setattr(reader_module, "BRIDGE_S", 0.0)
    # w0 has told everything by now; w1 has not said a word
    assert await reader.longest_prefix(KEYS, [W0, ("w1", 0)]) == {"w0": 5, "w1": 9}


@pytest.mark.parametrize("fault", ["killed", "flushed", "damaged"])
async def test_memory_answers_while_the_index_cannot(
    server: Any, publishing: Any, reader: IndexReader, publish: Any, monkeypatch: Any, fault: str
) -> None:
    publisher = await publishing(beat_s=60)
    await publish(publisher, KEYS[:8])
    await publisher._beat()
    reader.note_routed(KEYS[:8], [W0])
    await reader.longest_prefix(KEYS, [W0])
    await reader._look()
    monkeypatch.setattr(reader_module, "BRIDGE_S", 0.0)
    if fault == "killed":
        server.kill()
    elif fault == "flushed":
        server.execute("FLUSHALL")
    else:
        for key in KEYS:
            server.execute("SET", bucket(key), "garbage")
    for _ in range(5):
        assert await reader.longest_prefix(KEYS, [W0]) == {"w0": 8}


async def test_gateways_see_each_others_routing_and_start_warm(server: Any, reader: IndexReader, reading: Any) -> None:
    other = await reading()

    async def heard(keys: list[bytes], holders: list[tuple[str, int]], lengths: dict[str, int]) -> None:
        async with asyncio.timeout(1.0):
            while await reader.longest_prefix(keys, holders) != lengths:  # noqa: ASYNC110  nobody tells us
                await asyncio.sleep(0.02)

    other.note_routed(KEYS, [W0, ("w1", 0)])
    await heard(KEYS, [W0, ("w1", 0)], {"w0": 20, "w1": 20})
    third = await reading()
    assert await third.longest_prefix(KEYS, [W0]) == {"w0": 20}
    server.execute("XADD", "pfx:{n}:routes", "*", "g", "a stranger", "r", b"\xff\x00 not routes")
    server.execute("XADD", "pfx:{n}:routes", "*", "a stranger", "who writes other fields")
    other.note_routed(KEYS[1:], [("w2", 0)])
    await heard(KEYS[1:], [("w2", 0)], {"w2": 19})


# Through the gateway


async def test_requests_follow_the_index(
    open_house: Any, saying: Any, server: Any, publishing: Any, publish: Any
) -> None:
    """End to end: what a worker published attracts the request, and a dead Redis fails nobody."""
    house = await open_house(saying("Yes."), prefill=2, decode=1, redis_url=server.url, index_budget_s=0.5)
    prompt = [7 + position % 100 for position in range(200)]
    identity = house.gateway.workers.identity()
    keys = block_keys(b"cluster key of the tests", root_key(b"cluster key of the tests", identity, ""), prompt, 32)
    await publish(await publishing("prefill-1", 0, namespace="default"), keys)

    async def ask(prompt: list[int]) -> str:
        response = await house.http.post("/v1/completions", json={"model": "tiny", "prompt": prompt})
        assert response.status_code == 200
        return str(response.headers["x-tandem-prefill-worker"])

    assert await ask(prompt) == "prefill-1"
    assert (await house.admin.get("/cluster")).json()["redis"] == {"up": True}
    assert "tandem_prefix_index_up 1.0" in (await house.admin.get("/metrics")).text
    server.kill()
    for start in range(3):
        await ask(prompt[start + 1 :])
    assert (await house.admin.get("/cluster")).json()["redis"] == {"up": False}
    assert "tandem_prefix_index_up 0.0" in (await house.admin.get("/metrics")).text


async def test_the_memory_sends_prompts_where_the_index_does(
    open_house: Any, saying: Any, server: Any, publishing: Any, until: Any
) -> None:
    """The same conversations, with the index there and without it: as many prompts go to prefill workers."""
    answer = "Yes, of course. " * 8
    turns = [
        [(7 * talk + position) % 300 for position in range(96 * (turn + 1))] for talk in range(4) for turn in range(3)
    ]

    async def share(url: str, publish: bool) -> list[bool]:
        house = await open_house(saying(answer), redis_url=url, index_budget_s=0.5, local_prefill_tokens=64)
        dispatcher = house.gateway._open_house().dispatcher
        publishers = {
            name: await publishing(name, 0, namespace="default", max_batch=64, beat_s=60)
            for name in house.workers
            if publish
        }
        remote = []
        for prompt in [*turns, *turns]:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 40}
            response = await house.http.post("/v1/completions", json=body)
            names = {response.headers[f"x-tandem-{role}-worker"] for role in ("prefill", "decode")}
            remote.append("prefill-0" in names)
            (submit,) = [m for m in house.workers["decode-0"].received if isinstance(m, Submit)][-1:]
            for name in names if publish else ():
                for key in dispatcher.block_keys(submit.request):
                    publishers[name].record("stored", key)
            await until(lambda: all(each.is_settled for each in publishers.values()))
        return remote

    with_index = await share(server.url, publish=True)
    without = await share("redis://127.0.0.1:1/0", publish=False)
    assert with_index == without
    assert 0 < sum(without) < len(without)
