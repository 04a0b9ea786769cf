"""Real workers in this process: real engine, model, sockets, NIXL if asked for; a gateway reduced to its wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from fetch_scene import Scene

from tandem.workers.config import WorkerConfig
from tandem.workers.connection import Connection, connect
from tandem.workers.errors import WorkerUnavailable
from tandem.workers.protocol import (
    Cancel,
    Failed,
    NeedPrefill,
    Paired,
    Pong,
    Started,
    Submit,
    Tokens,
    UsePrefill,
)
from tandem.workers.server import WorkerServer
from tandem.workers.transfer.local import LocalPools
from tandem.workers.types import Choice, Request, SamplingParams, TokenLogprobs, WorkerAddress

torch.set_num_threads(1)

VOCAB = 97
KEY = b"test key"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, whose tokens are three control tokens and the printable characters."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    transformers.utils.logging.disable_progress_bar()
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {"\u0120" if index == 3 else chr(29 + index): index for index in range(3, VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@dataclass
class Answer:
    """Everything that a worker said about one request, by choice."""

    started: list[Started] = field(default_factory=list)
    token_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=lambda: defaultdict(list))
    finish: dict[int, str] = field(default_factory=dict)
    failed: Failed | None = None
    need_prefill: list[NeedPrefill] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    first_token: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def outcome(self) -> tuple[dict[int, list[int]], dict[int, list[TokenLogprobs]], dict[int, str]]:
        """What must not depend on where or with whom it ran."""
        assert self.failed is None, self.failed
        return dict(self.token_ids), dict(self.logprobs), self.finish


class WireGateway:
    """The gateway's end of a connection to a decode worker, and nothing else of a gateway."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.answers: dict[str, Answer] = defaultdict(Answer)
        self.replacements: list[WorkerAddress | None] = []
        """What NeedPrefill is answered with, one after another; then None."""
        self.paired: asyncio.Queue[Paired] = asyncio.Queue()
        self.snapshots: asyncio.Queue[Any] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    def submit(self, request: Request, prefill: WorkerAddress | None = None, **more: Any) -> Answer:
        self.connection.send(Submit(request=request, prefill=prefill, **more))
        return self.answers[request.request_id]

    def cancel(self, request_id: str) -> None:
        self.connection.send(Cancel(request_id=request_id))

    async def ask(self, request: Request, prefill: WorkerAddress | None = None, **more: Any) -> Answer:
        answer = self.submit(request, prefill, **more)
        num_choices = len(request.choices)
        async with asyncio.timeout(60):
            while len(answer.finish) < num_choices and answer.failed is None:
                await answer.done.wait()
                answer.done.clear()
        return answer

    async def close(self) -> None:
        self.connection.abort()
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        with contextlib.suppress(WorkerUnavailable):
            while True:
                self._take(await self.connection.receive())

    def _take(self, message: Any) -> None:
        match message:
            case Tokens():
                for chunk in message.chunks:
                    answer = self.answers[chunk.request_id]
                    answer.first_token.set()
                    answer.token_ids[chunk.choice] += chunk.token_ids
                    answer.logprobs[chunk.choice] += chunk.logprobs or ()
                    if chunk.finish_reason is not None:
                        assert chunk.choice not in answer.finish, "two terminal messages"
                        answer.finish[chunk.choice] = chunk.finish_reason
                        answer.done.set()
            case Started():
                self.answers[message.request_id].started.append(message)
            case Failed():
                self.answers[message.request_id].failed = message
                self.answers[message.request_id].done.set()
            case NeedPrefill():
                self.answers[message.request_id].need_prefill.append(message)
                prefill = self.replacements.pop(0) if self.replacements else None
                self.connection.send(UsePrefill(request_id=message.request_id, prefill=prefill))
            case Paired():
                self.paired.put_nowait(message)
            case Pong():
                self.snapshots.put_nowait(message.snapshot)
            case _:
                raise AssertionError(message)


class Bench:
    """Starts workers, and at the end checks that each has every block back."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.pools = LocalPools()
        self.servers: list[WorkerServer] = []
        self.gateways: list[WireGateway] = []

    async def worker(self, role: str, worker_id: str, *, wrap: Any = None, **changes: Any) -> WorkerServer:
        settings = {
            "model_path": self.model,
            "model_name": "tiny",
            "role": role,
            "worker_id": worker_id,
            "dtype": "float32",
            "block_size": 16,
            "max_model_len": 1024,
            "max_num_batched_tokens": 64,
            "kv_cache_memory_bytes": 4 << 20,
            "transfer": "local",
            "cluster_key": KEY,
            "local_prefill_tokens": 16,
            **changes,
        }
        server = WorkerServer(WorkerConfig(**settings), local_pools=self.pools, wrap_transfer=wrap)
        await server.start()
        self.servers.append(server)
        return server

    async def gateway(self, worker: WorkerServer) -> WireGateway:
        gateway = WireGateway(await connect(worker.address, key=KEY, peer="gateway"))
        self.gateways.append(gateway)
        return gateway

    async def settled(self, timeout_s: float = 2.0) -> None:
        """Wait until no worker uses a block; raise if one still does then."""
        async with asyncio.timeout(timeout_s):
            while any(not is_at_rest(server) for server in self.servers):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for server in self.servers:
            server.engine.check()
            if server.tiers is not None:
                server.tiers.check()

    async def close(self) -> None:
        for gateway in self.gateways:
            await gateway.close()
        for server in reversed(self.servers):
            await server.stop()


def is_at_rest(server: WorkerServer) -> bool:
    counts = server.engine.counts()
    if server.tiers is not None and not server.tiers.is_at_rest:
        return False
    return counts.used == counts.incoming == counts.quarantined == 0 and counts.is_consistent()


@pytest.fixture
async def bench(tiny_model: Path) -> AsyncIterator[Bench]:
    bench = Bench(tiny_model)
    yield bench
    await bench.close()


@pytest.fixture
def make_request() -> Callable[..., Request]:
    def make(request_id: str, num_tokens: int, *, content: int = 1, choices: int = 1, **sampling: Any) -> Request:
        generator = torch.Generator().manual_seed(content)
        prompt = torch.randint(3, VOCAB, (num_tokens,), generator=generator).tolist()
        params = {"max_tokens": 12, "seed": 11, "temperature": 0.9, "num_logprobs": 2, **sampling}
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**params),
            choices=tuple(Choice(index=index) for index in range(choices)),
        )

    return make


@pytest.fixture
async def scene(bench: Any, make_request: Callable[..., Request]) -> AsyncIterator[Scene]:
    scene = Scene(bench, make_request)
    yield scene
    await scene.proxy.stop()
