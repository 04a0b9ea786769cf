"""Whole workers, as a server runs them but for Ray: a prompt that is handed over gives the tokens of one that is not.

KV goes from pool to pool within this process, then over NIXL where it is installed.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from report import Context
from rows import Row
from safetensors.torch import save_file

from tandem.workers.config import WorkerConfig
from tandem.workers.connection import Connection, connect
from tandem.workers.device import DeviceMemory
from tandem.workers.errors import UserError
from tandem.workers.models.checkpoint import expected_shapes
from tandem.workers.models.config_file import read_config
from tandem.workers.protocol import Failed, Started, Submit, Tokens
from tandem.workers.server import WorkerServer
from tandem.workers.transfer.local import LocalPools
from tandem.workers.transfer.nixl_library import load_nixl
from tandem.workers.types import Request, SamplingParams, WorkerAddress

KEY = b"a key of the checks"
ANSWER_TIMEOUT_S = 20.0


def write_model(folder: Path) -> None:
    """A random Qwen3, of the shape that other checks have compiled kernels for."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 5000, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2, "attention_bias": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": {}}')  # nobody asks it anything
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(torch.bfloat16)
        for name, shape in expected_shapes(read_config(folder)).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@dataclass
class Answer:
    """What a worker said about one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    path: str = ""


async def ask(connection: Connection, request: Request, prefill: WorkerAddress | None) -> Answer:
    """Raises `RuntimeError` for a request that failed."""
    answer = Answer()
    connection.send(Submit(request=request, prefill=prefill))
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        while True:
            match await connection.receive():
                case Started(path=path):
                    answer.path = path
                case Failed(message=message):
                    raise RuntimeError(message)
                case Tokens(chunks=chunks):
                    for chunk in chunks:
                        answer.tokens += chunk.token_ids
                        answer.logprobs += [one.logprob for one in chunk.logprobs or ()]
                    if any(chunk.finish_reason is not None for chunk in chunks):
                        return answer


def request_of(index: int, name: str) -> Request:
    prompt = tuple((11 + 29 * place + 83 * index) % 5000 for place in range(100 + 70 * index))
    params = SamplingParams(max_tokens=24, seed=index, temperature=0.8 * (index % 2), num_logprobs=2)
    return Request(request_id=f"{name}-{index}", prompt_token_ids=prompt, sampling=params)


class Place:
    """Starts workers of one model on one device, and ends them."""

    def __init__(self, model: Path, device: str) -> None:
        self._model = model
        self._device = device
        self._pools = LocalPools()

    @asynccontextmanager
    async def worker(self, role: str, worker_id: str, **changes: Any) -> AsyncIterator[WorkerServer]:
        settings = {
            "model_path": self._model,
            "model_name": "random",
            "role": role,
            "worker_id": worker_id,
            "device": self._device,
            "max_model_len": 1024,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 128,
            "kv_cache_memory_bytes": 32 << 20,
            "kv_host_memory_bytes": 8 << 20,
            "transfer": "local",
            "cluster_key": KEY,
            **changes,
        }
        server = WorkerServer(WorkerConfig(**settings), local_pools=self._pools)
        await server.start()
        try:
            yield server
        finally:
            await server.stop()


def workers(context: Context) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        place = Place(Path(folder), context.device.type)
        alone, row = asyncio.run(_alone(place))
        yield row
        yield asyncio.run(_handed_over(place, alone, "local"))
        try:
            load_nixl("127.0.0.1", context.device.type)
        except UserError as error:
            yield Row("workers", "handed over by nixl", "skipped", str(error))
        else:
            yield asyncio.run(_handed_over(place, alone, "nixl"))
        if context.device.type == "cuda":
            yield asyncio.run(_sized_by_the_device(place, context.device))


async def _alone(place: Place) -> tuple[list[Answer], Row]:
    """Each prompt by itself, then once more together, from what is cached of them."""
    async with place.worker("aggregated", "a0") as worker:
        connection = await connect(worker.address, key=KEY, peer="check")
        first = [await ask(connection, request_of(index, "first"), None) for index in range(4)]
        again = [await ask(connection, request_of(index, "again"), None) for index in range(4)]
        connection.abort()
        worker.engine.check()
        wrong = sum(a.tokens != b.tokens or a.logprobs != b.logprobs for a, b in zip(first, again, strict=True))
    return first, Row("workers", "cold = cached", "FAILED" if wrong else "ok", f"{wrong} of {len(first)} differ")


async def _handed_over(place: Place, alone: list[Answer], transfer: str) -> Row:
    """Read by one worker, written by another."""
    async with (
        place.worker("prefill", f"p-{transfer}", transfer=transfer) as prefill,
        place.worker("decode", f"d-{transfer}", transfer=transfer) as decode,
    ):
        connection = await connect(decode.address, key=KEY, peer="check")
        answers = [await ask(connection, request_of(index, transfer), prefill.address) for index in range(len(alone))]
        connection.abort()
        decode.engine.check()
        path = ", ".join(sorted({answer.path for answer in answers}))
    same = all(a.tokens == b.tokens and a.logprobs == b.logprobs for a, b in zip(answers, alone, strict=True))
    is_ok = same and path == "remote"
    detail = f"prompts read {path}; tokens and logprobs {'equal' if same else 'differ'}"
    return Row("workers", f"handed over by {transfer}", "ok" if is_ok else "FAILED", detail)


async def _sized_by_the_device(place: Place, device: torch.device) -> Row:
    """KV as large as the device allows, where that is 1 GiB more than what is taken already."""
    torch.cuda.empty_cache()  # of the workers before
    memory = DeviceMemory.of(device)
    utilization = (memory.total - memory.free + (1 << 30)) / memory.total
    async with place.worker(
        "aggregated", "sized", kv_cache_memory_bytes=None, gpu_memory_utilization=utilization
    ) as worker:
        connection = await connect(worker.address, key=KEY, peer="check")
        answer = await ask(connection, request_of(1, "sized"), None)
        connection.abort()
        taken = DeviceMemory.of(device)
        num_blocks = worker.engine.counts().total
    used = (taken.total - taken.free) / taken.total
    is_ok = bool(answer.tokens) and used < utilization + 0.01
    detail = f"{num_blocks} blocks; {100 * used:.1f} % taken, {100 * utilization:.1f} % allowed"
    return Row("workers", "KV in what is left of the device", "ok" if is_ok else "FAILED", detail)
