"""Workers that compute something else than those that serve get nothing to do, and the operator a line about it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.router.scripted_worker import ScriptedWorker, scripted_identity
from tandem.workers.errors import UserError
from tandem.workers.protocol import Pair, Submit
from tandem.workers.types import Role

KEY = b"cluster key of the tests"
TEXT = "Once upon a time there was a quick brown fox."
OURS, THEIRS = "cpu/amx_bf16/1a", "cpu/avx512/1a"
REASON = f"numerics differs: ours '{OURS}', theirs '{THEIRS}'; --cpu-level avx512 makes all workers compute the same"


class Mixed:
    """A house whose workers have numerics of their own."""

    def __init__(self, house: Any, script: Any) -> None:
        self.house, self.script = house, script
        self.workers = house.gateway.workers

    async def add(self, worker_id: str, role: Role, numerics: str, epoch: int = 0) -> ScriptedWorker:
        identity = scripted_identity(numerics=numerics)
        worker = ScriptedWorker(worker_id, role, self.script, key=KEY, identity=identity, epoch=epoch)
        self.workers.add(await worker.start())
        self.house.workers[f"{worker_id} {epoch}"] = worker
        await self.house.until(lambda: self.state(worker_id) in ("ready", "refused"))
        return worker

    def state(self, worker_id: str) -> str:
        (link,) = [link for link in self.workers.links() if link.worker_id == worker_id]
        return str(link.state)

    async def ask(self) -> str:
        answer = await self.house.client.chat.completions.with_raw_response.create(
            model="tiny", messages=[{"role": "user", "content": "Tell me a long story about foxes and dogs."}]
        )
        return str(answer.headers["x-tandem-decode-worker"])


@pytest.fixture
async def mixed(open_house: Any, saying: Any) -> Mixed:
    return Mixed(await open_house(decode=0, prefill=0, num_decode=2), saying(TEXT))


async def test_a_worker_that_computes_something_else_is_given_nothing(mixed: Mixed) -> None:
    house = mixed.house
    await mixed.add("decode-0", "decode", OURS)
    stranger = await mixed.add("decode-1", "decode", THEIRS)
    reader = await mixed.add("prefill-0", "prefill", THEIRS)
    assert {await mixed.ask() for _ in range(4)} == {"decode-0"}
    assert not any(isinstance(message, Submit | Pair) for message in (*stranger.received, *reader.received))
    assert [view.worker_id for view in mixed.workers.roster()] == ["decode-0"]
    assert (await house.http.get("/ready")).json() == {
        "status": "degraded",
        "reasons": [f"{name} gets no requests: {REASON}" for name in ("decode-1", "prefill-0")],
    }
    workers = (await house.admin.get("/cluster")).json()["workers"]
    assert [(one["state"], one["numerics"]) for one in workers] == [
        *(("ready", OURS), ("refused", THEIRS), ("refused", THEIRS)),
    ]


async def test_who_computes_something_else_takes_over_when_nobody_else_decodes(mixed: Mixed) -> None:
    """And those that come back then are the strangers, until all are gone."""
    house = mixed.house
    first = await mixed.add("decode-0", "decode", OURS)
    await mixed.add("prefill-0", "prefill", OURS)
    await mixed.add("decode-1", "decode", THEIRS)
    assert await mixed.ask() == "decode-0"
    first.kill()
    await house.until(lambda: mixed.state("decode-1") == "ready")
    assert mixed.state("prefill-0") == "refused"
    assert await mixed.ask() == "decode-1"
    await mixed.add("decode-0", "decode", OURS, epoch=1)
    assert mixed.state("decode-0") == "refused"
    house.workers["decode-1 0"].kill()
    await house.until(lambda: mixed.state("decode-0") == mixed.state("prefill-0") == "ready")
    assert await mixed.ask() == "decode-0"


@pytest.mark.parametrize("roles", [("decode", "decode"), ("prefill", "decode"), ("decode", "prefill")])
async def test_a_cluster_that_is_started_with_both_is_refused(mixed: Mixed, roles: tuple[Role, Role]) -> None:
    first = await mixed.add(f"{roles[0]}-0", roles[0], OURS)
    await mixed.add(f"{roles[1]}-1", roles[1], THEIRS)
    with pytest.raises(UserError) as raised:
        await asyncio.wait_for(mixed.house.gateway.wait_ready(), 5)
    assert OURS in str(raised.value)
    assert THEIRS in str(raised.value)
    assert str(raised.value).endswith("--cpu-level avx512 makes all workers compute the same")
    assert "\n" not in str(raised.value)
    assert first.worker_id in str(raised.value) or f"{roles[1]}-1" in str(raised.value)
