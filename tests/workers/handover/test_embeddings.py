"""Embeddings of real workers: Hugging Face's hidden states, the same bits wherever, with whom and in what chunks."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers

from tandem.router.config import GatewayConfig
from tandem.router.gateway import Gateway
from tandem.workers.connection import Connection, connect
from tandem.workers.protocol import Cancel, Embed, Embedded, Failed
from tandem.workers.types import KVSource, Request, WorkerSpeeds

LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 100, 129, 200, 700]
MODES = {"last": "lasttoken", "mean": "mean_tokens", "first": "cls_token"}


def texts(content: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(content)
    return [tuple(torch.randint(3, 97, (length,), generator=generator).tolist()) for length in LENGTHS]


class Asker:
    """The gateway's end of a connection, for embeddings alone."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.answers: dict[str, asyncio.Future[Embedded | Failed]] = {}
        self.reader = asyncio.create_task(self._read())

    def ask(self, name: str, token_ids: tuple[int, ...], **more: Any) -> asyncio.Future[Embedded | Failed]:
        self.connection.send(Embed(request_id=name, token_ids=token_ids, **more))
        self.answers[name] = asyncio.get_running_loop().create_future()
        return self.answers[name]

    async def all_of(self, inputs: list[tuple[int, ...]], name: str = "", **more: Any) -> list[bytes]:
        answers = await asyncio.gather(*(self.ask(f"{name}{n}", each, **more) for n, each in enumerate(inputs)))
        assert all(isinstance(answer, Embedded) for answer in answers), answers
        return [answer.embedding for answer in answers if isinstance(answer, Embedded)]

    async def _read(self) -> None:
        while True:
            message = await self.connection.receive()
            assert isinstance(message, Embedded | Failed), message
            self.answers[message.request_id].set_result(message)


@pytest.fixture
async def asker(bench: Any) -> AsyncIterator[Callable[..., Any]]:
    askers: list[Asker] = []

    async def make(worker: Any) -> Asker:
        askers.append(Asker(await connect(worker.address, key=b"test key", peer="gateway")))
        return askers[-1]

    yield make
    for one in askers:
        one.reader.cancel()
        one.connection.abort()
    await asyncio.gather(*(one.reader for one in askers), return_exceptions=True)


@pytest.fixture
def model_with(tiny_model: Path, tmp_path: Path) -> Callable[[str], Path]:
    """The tiny model with the files of sentence-transformers that ask for this way of pooling."""

    def make(mode: str) -> Path:
        folder = tmp_path / mode
        shutil.copytree(tiny_model, folder)
        modules = [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        flags = {f"pooling_mode_{name}": name == MODES[mode] for name in (*MODES.values(), "max_tokens")}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **flags}))
        return folder

    return make


def expected(folder: Path, mode: str, inputs: list[tuple[int, ...]]) -> list[Any]:
    model = transformers.LlamaModel.from_pretrained(folder, dtype=torch.float32).eval()
    vectors = []
    for token_ids in inputs:
        with torch.no_grad():
            hidden = model(torch.tensor(token_ids)[None]).last_hidden_state[0]
        pooled = {"last": hidden[-1], "first": hidden[0], "mean": hidden.mean(0)}[mode]
        vectors.append((pooled / pooled.norm()).numpy())
    return vectors


@pytest.mark.parametrize("mode", list(MODES))
async def test_every_way_gives_the_same_bits_and_hugging_faces_numbers(
    bench: Any, asker: Any, model_with: Callable[[str], Path], make_request: Callable[..., Request], mode: str
) -> None:
    bench.model = model_with(mode)
    inputs = texts()
    whole = await asker(await bench.worker("prefill", "whole", max_num_batched_tokens=1024))
    alone = [(await whole.all_of([each], f"alone {n} ", salt=str(n)))[0] for n, each in enumerate(inputs)]
    for given, right in zip(alone, expected(bench.model, mode, inputs), strict=True):
        np.testing.assert_allclose(np.frombuffer(given, "<f4"), right, atol=2e-5)
        assert abs(np.linalg.norm(np.frombuffer(given, "<f4").astype(np.float64)) - 1) < 1e-6
    for role, chunk in (("prefill", 32), ("decode", 64), ("aggregated", 48)):
        worker = await bench.worker(role, f"{role}-{chunk}", max_num_batched_tokens=chunk)
        crowd = await asker(worker)
        decoding = None
        if role != "prefill":
            gateway = await bench.gateway(worker)
            decoding = gateway.submit(make_request("beside", 20, max_tokens=400, num_logprobs=None))
            await decoding.first_token.wait()
        assert await crowd.all_of(inputs, "cold ") == alone
        assert await crowd.all_of(inputs, "cached ") == alone
        cached = [crowd.answers[f"cached {n}"].result().cached.total for n in range(len(inputs))]
        assert (max(cached) > 600) == (mode == "last")
        if decoding is not None:
            while not decoding.finish:
                await decoding.done.wait()
    await bench.settled()


async def test_a_reading_that_is_broken_off_begins_anew(
    bench: Any, asker: Any, model_with: Callable[[str], Path], make_request: Callable[..., Request]
) -> None:
    """Two that decode beside it grow into a pool that is too small; the youngest gives way in the middle of it."""
    bench.model = model_with("mean")
    text = tuple(3 + n % 90 for n in range(900))
    right = await (await asker(await bench.worker("prefill", "roomy"))).all_of([text])
    kv_cache_bytes = 84 * 16 * 2 * 2 * 2 * 16 * 4  # 76 blocks, and those of the probe
    worker = await bench.worker("aggregated", "small", kv_cache_memory_bytes=kv_cache_bytes, max_num_batched_tokens=32)
    gateway = await bench.gateway(worker)
    others = [gateway.submit(make_request(f"o{index}", 100, content=index, max_tokens=150)) for index in range(2)]
    assert await (await asker(worker)).all_of([text]) == right
    assert worker.engine.scheduler.num_preemptions > 0
    for answer in others:
        while not answer.finish:
            await answer.done.wait()
    await bench.settled()


async def test_a_peers_blocks_are_fetched(bench: Any, asker: Any) -> None:
    text = texts()[-1]
    holder, reader = await bench.worker("prefill", "holder"), await bench.worker("prefill", "reader")
    right = await (await asker(holder)).all_of([text])
    reader.role.filler._speeds = lambda: WorkerSpeeds(prefill_token_s=0.05)
    other = await asker(reader)
    assert await other.all_of([text], source=KVSource(address=holder.address, num_blocks=43)) == right
    assert other.answers["0"].result().cached.peer == 43 * 16
    await bench.settled()


async def test_lower_tiers_give_blocks_back(bench: Any, asker: Any) -> None:
    """A pool for one text and a half, over host memory: what was given up comes back, with the same bits."""
    inputs = [tuple(3 + (n * number) % 90 for n in range(900)) for number in (1, 2, 3)]
    right = await (await asker(await bench.worker("prefill", "roomy"))).all_of(inputs)
    sizes = {"kv_cache_memory_bytes": 90 * 8192, "kv_host_memory_bytes": 4 << 20}
    small = await bench.worker("prefill", "small", **sizes)
    small.role.filler._speeds = lambda: WorkerSpeeds(prefill_token_s=0.05)
    one = await asker(small)
    for round_ in ("first ", "second "):
        for number, each in enumerate(inputs):
            assert await one.all_of([each], f"{round_}{number} ") == [right[number]]
    assert one.answers["second 0 0"].result().cached.host > 500
    await bench.settled()


async def test_a_prefill_worker_that_dies_is_followed_by_another(bench: Any) -> None:
    """Through a whole gateway: nobody learns of it but by the header."""
    workers = [await bench.worker("prefill", f"p{number}", max_num_batched_tokens=32) for number in range(2)]
    decode = await bench.worker("decode", "d")
    gateway = Gateway(
        GatewayConfig(
            model_name="tiny",
            tokenizer_folder=bench.model,
            max_model_len=1024,
            cluster_key=b"test key",
            num_prefill=2,
            num_decode=1,
        )
    )
    await gateway.start()
    for worker in (*workers, decode):
        gateway.workers.add(worker.address)
    await gateway.wait_ready()
    transport = httpx.ASGITransport(gateway.app)
    async with httpx.AsyncClient(base_url="http://gateway", transport=transport, timeout=60) as http:

        async def ask(salt: str) -> Any:
            body = {"model": "tiny", "input": inputs, "cache_salt": salt}
            response = await http.post("/v1/embeddings", json=body)
            assert response.status_code == 200, response.text
            return response

        inputs = [[3 + (n * number) % 90 for n in range(1000)] for number in range(1, 7)]
        expected = (await ask("before")).json()
        asking = asyncio.create_task(ask("meanwhile"))
        while not workers[0].engine.num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await workers[0].stop()
        bench.servers.remove(workers[0])
        answer = await asking
        assert answer.json() == expected
        assert "p1" in answer.headers["x-tandem-prefill-worker"]
        value = gateway.metrics.registry.get_sample_value
        assert value("tandem_migrations_total", {"reason": "prefill_lost"}) >= 1
        assert value("tandem_requests_total", {"outcome": "ok"}) == 2
        await workers[1].stop()
        bench.servers.remove(workers[1])
        answer = await ask("at last")
        assert answer.json() == expected
        assert answer.headers["x-tandem-prefill-worker"] == "d"
    await gateway.stop(0)
    await bench.settled()


async def test_cancelled_or_left_nothing_stays(bench: Any, asker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is read to its end for nobody."""
    worker = await bench.worker("prefill", "p", max_num_batched_tokens=32)
    execute, num_steps = worker.engine.runner.execute, 0

    def slowly(batch: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        time.sleep(0.01)
        return execute(batch)

    monkeypatch.setattr(worker.engine.runner, "execute", slowly)
    one, other = await asker(worker), await asker(worker)
    long = tuple(3 + n % 90 for n in range(1000))
    pending = one.ask("r", long)
    other.ask("r", long, salt="x")  # names are a connection's own
    while num_steps < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    one.connection.send(Cancel(request_id="r"))
    other.reader.cancel()
    other.connection.abort()
    await bench.settled()
    assert num_steps < 30, "each of them would take 32"
    assert not pending.done()
    assert await one.all_of([long[:20]], "after ")  # and the connection is good for more
    await bench.settled()


@pytest.mark.parametrize(
    ("token_ids", "param", "code"),
    [
        ((), "input", "invalid_request"),
        ((5,) * 1025, "input", "context_length_exceeded"),
        ((97,), "input", "invalid_request"),
        ((-1,), "input", "invalid_request"),
    ],
)
async def test_refused(bench: Any, asker: Any, token_ids: tuple[int, ...], param: str, code: str) -> None:
    one = await asker(await bench.worker("prefill", "p"))
    answer = await one.ask("r", token_ids)
    assert (answer.param, answer.code, answer.retryable) == (param, code, False)
    assert len(await one.all_of([(5,) * 1024])) == 1
    await bench.settled()


async def test_a_model_without_a_head_gives_embeddings_alone(
    bench: Any, asker: Any, tmp_path: Path, make_request: Callable[..., Request]
) -> None:
    right = await (await asker(await bench.worker("prefill", "whole"))).all_of(texts())
    folder = tmp_path / "headless"
    model = transformers.LlamaModel.from_pretrained(bench.model, dtype=torch.float32)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bench.model / name, folder)
    bench.model = folder
    worker = await bench.worker("aggregated", "headless")
    assert await (await asker(worker)).all_of(texts()) == right
    answer = await (await bench.gateway(worker)).ask(make_request("r", 20))
    assert (answer.failed.code, answer.failed.retryable) == ("unsupported_model", False)
    await bench.settled()


async def test_a_model_that_is_pooled_otherwise_says_so(bench: Any, asker: Any, model_with: Any) -> None:
    bench.model = model_with("mean")
    (bench.model / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    one = await asker(await bench.worker("prefill", "p"))
    answer = await one.ask("r", (5, 6))
    assert "'max_tokens'" in answer.message
    assert (answer.retryable, answer.code) == (False, "unsupported_model")
