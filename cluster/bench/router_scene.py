"""What `tandem bench router` routes: workers, documents that some of them hold, prompts, a server with an index.

Every prompt is new: the first half is one of `NUM_DOCUMENTS` documents that some workers hold to different lengths, the
rest was never seen.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from tandem.cluster.bench.router_workers import StandingWorkers
from tandem.router.config import GatewayConfig
from tandem.router.dispatch import Dispatcher, Generation
from tandem.router.index.reader import IndexReader
from tandem.router.index.scripts import PUBLISH, index_prefix, owner_tag
from tandem.router.metrics import RouterMetrics
from tandem.router.policy import PolicyName
from tandem.workers.block_key import block_keys, root_key
from tandem.workers.types import Request, SamplingParams

NAMESPACE = "bench"
KEY = b"cluster key of the bench"
NUM_DOCUMENTS = 16
NUM_HOLDERS = 8
"""Workers that hold a document, the first of them whole, the others to shorter and shorter lengths."""
PUBLISH_BATCH = 2000
VOCAB_SIZE = 100_000


class Scene:
    """So many workers, and prompts of one length."""

    def __init__(self, client: redis.Redis, num_workers: int, prompt_tokens: int, seed: int) -> None:
        self._client = client
        self._prompt_tokens = prompt_tokens
        self._random = random.Random(seed)
        self.workers = StandingWorkers(num_workers, self._random)
        length = prompt_tokens // 2
        self._documents = [self._tokens(length) for _ in range(NUM_DOCUMENTS)]
        self._tail = self._tokens(prompt_tokens - length - 1)

    def publish(self) -> None:
        """Have workers say in the index that they hold the documents."""
        identity = self.workers.identity()
        root = root_key(KEY, identity, "")
        for document in self._documents:
            self._publish_document(block_keys(KEY, root, document, identity.block_size))

    @asynccontextmanager
    async def routing(
        self, url: str, *, budget_s: float, policy: PolicyName
    ) -> AsyncIterator[tuple[Dispatcher, IndexReader]]:
        """A gateway's dispatcher before these workers, and its index."""
        index = IndexReader(url, namespace=NAMESPACE, budget_s=budget_s)
        await index.start()
        config = GatewayConfig(
            model_name="bench",
            tokenizer_folder=Path(),
            max_model_len=1 << 20,
            cluster_key=KEY,
            router_policy=policy,
        )
        try:
            yield Dispatcher(config, self.workers, index, RouterMetrics(list)), index
        finally:
            await index.stop()

    def request(self, number: int) -> Request:
        """A prompt that nobody has seen, behind one of the documents."""
        document = self._documents[number % NUM_DOCUMENTS]
        return Request(
            request_id=f"{self._prompt_tokens}-{number}",
            prompt_token_ids=(*document, number, *self._tail),
            sampling=SamplingParams(max_tokens=64, seed=0),
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.choices(range(VOCAB_SIZE), k=count))

    def _publish_document(self, keys: list[bytes]) -> None:
        links = list(self.workers.ready())
        for rank, link in enumerate(self._random.sample(links, min(NUM_HOLDERS, len(links)))):
            publish(self._client, (link.worker_id, link.address.epoch), keys[: max(1, len(keys) // (rank + 1))])


@dataclass(frozen=True, slots=True)
class Decision:
    """One that was made, with what it took, in seconds. `generation` is to be closed."""

    generation: Generation
    wall_s: float
    cpu_s: float


async def decide(dispatcher: Dispatcher, request: Request) -> Decision:
    """All that the gateway does to route a request, the books included."""
    generation = Generation(dispatcher, request, timeout_s=600.0)
    wall_began, cpu_began = time.perf_counter(), time.process_time()
    await generation.look_up()
    generation.book()
    return Decision(generation, time.perf_counter() - wall_began, time.process_time() - cpu_began)


@contextmanager
def connected(url: str) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(url, protocol=2, socket_timeout=60)
    try:
        yield client
    finally:
        client.close()


def fill(client: redis.Redis, num_blocks: int, seed: int, on_progress: Callable[[str], None]) -> None:
    """Blocks that no prompt here asks for, held by 100 workers, one each."""
    source = random.Random(seed)
    for start in range(0, num_blocks, PUBLISH_BATCH):
        count = min(PUBLISH_BATCH, num_blocks - start)
        blob = source.randbytes(16 * count)
        holder = (f"other-{start // PUBLISH_BATCH % 100}", 0)
        publish(client, holder, [blob[16 * number : 16 * number + 16] for number in range(count)])
        if start % 500_000 == 0:
            on_progress(f"filling the index: {start:,} of {num_blocks:,} blocks")


def publish(client: redis.Redis, holder: tuple[str, int], keys: list[bytes]) -> None:
    """As a worker does, in its own words."""
    for start in range(0, len(keys), PUBLISH_BATCH):
        part = keys[start : start + PUBLISH_BATCH]
        names = b"".join(key[:10] for key in part)
        arguments: list[Any] = [owner_tag(holder), 1, 1, 3600, "era", b"\1" * len(part), names, b""]
        client.eval(PUBLISH.source, 1, index_prefix(NAMESPACE), *arguments)
