"""A gateway on real sockets, a small tokenizer, and scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
import uvicorn
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from tandem.router.config import GatewayConfig
from tandem.router.gateway import Gateway
from tandem.router.http_protocol import LimitedProtocol
from tandem.router.scripted_worker import SCRIPTED_EMBEDDING_SIZE, Script, ScriptedWorker, answering
from tandem.router.tokenizer import Tokenizer
from tandem.workers.types import Request

KEY = b"cluster key of the tests"
MODEL = "tiny"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRAINING_TEXT = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.",
    "Once upon a time there was a small engine that could; it wrote one token after another.",
    "Grüße aus Köln, 日本語のテキスト, emoji 🙂🙃 and café au lait.",
]


def save_byte_level_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with ChatML tokens, as GPT-2, Llama 3, Qwen and SmolLM have."""
    tokenizer = RawTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": {"__type": "AddedToken", "content": "<|endoftext|>", "lstrip": False, "rstrip": False},
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"hidden_size": SCRIPTED_EMBEDDING_SIZE}))


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_level_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(tokenizer_folder)


class QuietServer(uvicorn.Server):
    """A server inside a test: signals stay pytest's, and its end is noticed at once."""

    async def main_loop(self) -> None:
        await self.on_tick(0)  # fills in the date header
        while not self.should_exit:  # noqa: ASYNC110  a plain flag of uvicorn's
            await asyncio.sleep(0.01)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: Any, protocol: type[asyncio.Protocol] = LimitedProtocol) -> AsyncIterator[str]:
    """The application on a loopback port; yields its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=protocol, lifespan="off", ws="none", log_config=None, timeout_graceful_shutdown=1)
    server = QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


@pytest.fixture
def serving_on() -> Callable[..., contextlib.AbstractAsyncContextManager[int]]:
    """`async with serving_on(app, protocol) as port`."""

    @contextlib.asynccontextmanager
    async def serve(app: Any, protocol: type[asyncio.Protocol]) -> AsyncIterator[int]:
        async with serving(app, protocol) as url:
            yield int(url.rpartition(":")[2])

    return serve


@dataclass
class House:
    """A running gateway with its workers, as a test sees it."""

    gateway: Gateway
    url: str
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient
    admin: httpx.AsyncClient
    workers: dict[str, ScriptedWorker] = field(default_factory=dict)

    async def add(self, worker: ScriptedWorker) -> ScriptedWorker:
        self.gateway.workers.add(await worker.start())
        self.workers[worker.worker_id] = worker
        await self.until(lambda: self.gateway.workers.get(worker.worker_id) is not None)
        return worker

    async def until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110  what is watched is not ours to notify
                await asyncio.sleep(0.005)

    async def outcomes(self) -> dict[str, float]:
        """Counts by outcome, once nothing is in the house any more; checked to add up."""
        await self.gateway.admission.until_empty(2.0)
        value = self.gateway.metrics.registry.get_sample_value
        counts = {
            outcome: value("tandem_requests_total", {"outcome": outcome}) or 0.0
            for outcome in ("ok", "failed", "cancelled", "rejected")
        }
        assert value("tandem_requests_started_total") == sum(counts.values())
        return {outcome: count for outcome, count in counts.items() if count}


OpenHouse = Callable[..., Awaitable[House]]


@pytest.fixture
async def open_house(tokenizer_folder: Path) -> AsyncIterator[OpenHouse]:
    """`await open_house(script, decode=1, prefill=1, **config)`: a gateway with scripted workers, serving."""
    async with contextlib.AsyncExitStack() as stack:

        async def build(
            script: Script | None = None,
            *,
            decode: int = 1,
            prefill: int = 1,
            **settings: Any,
        ) -> House:
            given = {
                "model_name": MODEL,
                "tokenizer_folder": tokenizer_folder,
                "max_model_len": 512,
                "cluster_key": KEY,
                "num_decode": decode,
                "num_prefill": prefill,
                "heartbeat_s": 0.1,
                "local_prefill_tokens": 4,
            }
            gateway = Gateway(GatewayConfig(**(given | settings)))
            await gateway.start()
            url = await stack.enter_async_context(serving(gateway.app))
            headers = {"authorization": f"Bearer {gateway.config.api_keys[0]}"} if gateway.config.api_keys else {}
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, headers=headers, verify=False))
            client = openai.AsyncOpenAI(
                base_url=f"{url}/v1",
                api_key=next(iter(gateway.config.api_keys), "none"),
                max_retries=0,
                timeout=10,
                http_client=httpx.AsyncClient(verify=False, timeout=10),
            )
            stack.push_async_callback(client.close)
            transport = httpx.ASGITransport(gateway.admin_app)
            admin = await stack.enter_async_context(
                httpx.AsyncClient(base_url="http://admin", transport=transport, verify=False)
            )
            house = House(gateway, url, client, http, admin)

            async def close() -> None:
                await gateway.stop(0)
                for worker in house.workers.values():
                    await worker.stop()

            stack.push_async_callback(close)
            for number in range(prefill):
                await house.add(ScriptedWorker(f"prefill-{number}", "prefill", key=KEY))
            for number in range(decode):
                await house.add(ScriptedWorker(f"decode-{number}", "decode", script, key=KEY))
            if decode:
                async with asyncio.timeout(5):
                    await gateway.wait_ready()
            return house

        yield build


@pytest.fixture
def saying(tokenizer: Tokenizer) -> Callable[..., Script]:
    """`saying("text", ...)`: a script that answers with this text and the end-of-sequence token."""

    def build(text: str | Sequence[str], **how: Any) -> Script:
        texts = [text] if isinstance(text, str) else list(text)
        answers = [[*tokenizer.encode(each, add_special_tokens=False), tokenizer.eos_token_ids[0]] for each in texts]

        def tokens_for(request: Request, choice: int) -> Sequence[int]:
            return answers[choice % len(answers)]

        return answering(tokens_for, **how)

    return build


@dataclass
class Doorstep:
    """A gateway without workers or sockets: as far as a refused request comes."""

    gateway: Gateway
    http: httpx.AsyncClient

    outcomes = House.outcomes


@pytest.fixture
async def doorstep(tokenizer_folder: Path) -> AsyncIterator[Doorstep]:
    gateway = Gateway(GatewayConfig(model_name=MODEL, tokenizer_folder=tokenizer_folder, max_model_len=512))
    await gateway.start()
    transport = httpx.ASGITransport(gateway.app)
    async with httpx.AsyncClient(base_url="http://gateway", transport=transport, verify=False) as http:
        yield Doorstep(gateway, http)
    await gateway.stop()


@pytest.fixture
def strictly() -> Callable[..., Any]:
    """`strictly(Model, data, but=())`: the data as a client library's model, with keys that it does not know refused.

    `but`: keys of ours that are more than the API has.
    """

    def unknown(value: Any, place: str, but: Sequence[str]) -> Iterator[str]:
        if isinstance(value, pydantic.BaseModel):
            yield from (f"{place}.{key}" for key in value.model_extra or () if key not in but)
            for key in type(value).model_fields:
                yield from unknown(getattr(value, key), f"{place}.{key}", but)
        elif isinstance(value, list):
            for number, each in enumerate(value):
                yield from unknown(each, f"{place}[{number}]", but)

    def check(model: Any, data: Any, but: Sequence[str] = ()) -> Any:
        validated = model.model_validate(data)
        assert list(unknown(validated, "", but)) == []
        return validated

    return check


@pytest.fixture
def events_of() -> Callable[[str], list[tuple[str | None, Any]]]:
    """(name, data) of each event in the text of a stream; data that is not JSON as text."""

    def split(text: str) -> list[tuple[str | None, Any]]:
        events: list[tuple[str | None, Any]] = []
        assert text.endswith("\n\n")
        for block in text.split("\n\n")[:-1]:
            lines = dict(line.split(": ", 1) for line in block.split("\n"))
            data = lines["data"]
            events.append((lines.get("event"), data if data == "[DONE]" else json.loads(data)))
        return events

    return split
