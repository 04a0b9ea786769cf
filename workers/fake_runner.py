"""A runner without a model, for tests: its "KV" is one number per token, and its tokens betray a wrong block table.

The number of a token is mixed from its id, its position and the number of the token before it *as read back from the
blocks*; a sampled token is mixed from all numbers of its context, read back too. So a block that was reused too early,
never filled, or put in the wrong place changes the tokens, just as it would with a real model, only always.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tandem.workers.batch import Batch, BatchItem, Pooled, SampledToken

_PRIME = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_UNWRITTEN = 0xBAD

FakeResult = SampledToken | Pooled | None


def _mix(*values: int) -> int:
    """64 bits that depend on all values and their order."""
    state = 0
    for value in values:
        state = ((state ^ value) * _PRIME + 1) & _MASK
        state ^= state >> 31
    return state


class FakeRunner:
    """`kv` is the pool: uint64 [num_blocks, block_size]. `batches` keeps what was executed.

    Its device is at once: a step is computed when it is launched.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 1000) -> None:
        self.kv = np.zeros((num_blocks, block_size), dtype=np.uint64)
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.batches: list[Batch] = []
        self._sampled: list[int] = []
        """Tokens of the last step, as a device would keep them."""

    def launch(self, batch: Batch) -> Callable[[], list[FakeResult]]:
        results = self.execute(batch)
        return lambda: results

    def execute(self, batch: Batch) -> list[FakeResult]:
        self.batches.append(batch)
        batch = replace(batch, items=tuple(map(self._with_token, batch.items)))
        for copy in batch.copies:
            self.kv[copy.destination, : copy.num_tokens] = self.kv[copy.source, : copy.num_tokens]
            self.kv[copy.destination, copy.num_tokens :] = _UNWRITTEN
        for item in batch.items:  # all writes before all reads, as a forward pass over the whole batch would
            self._write(item)
        results = [self._sample(item) if item.pool is None else self._pool(item) for item in batch.items]
        self._sampled = [result.token_id for result in results if isinstance(result, SampledToken)]
        return results

    def _with_token(self, item: BatchItem) -> BatchItem:
        return item if item.follows is None else replace(item, token_ids=(self._sampled[item.follows],))

    def _write(self, item: BatchItem) -> None:
        size = self.block_size
        previous = 0
        if item.start:
            last = item.start - 1
            previous = int(self.kv[item.block_ids[last // size], last % size])
        for position, token_id in enumerate(item.token_ids, item.start):
            previous = _mix(previous, token_id, position)
            self.kv[item.block_ids[position // size], position % size] = previous

    def _pool(self, item: BatchItem) -> Pooled:
        """One number for each token that is wanted: the last's, the first's, or all."""
        assert item.pool is not None
        numbers = self._context(item, item.start + len(item.token_ids))[item.start :] % 997
        wanted = {"last": numbers[-1:], "first": numbers[:1], "mean": numbers}[item.pool.mode]
        return Pooled(np.stack([wanted, wanted * 31 % 101, np.ones_like(wanted)], axis=1).astype(np.float32))

    def _sample(self, item: BatchItem) -> SampledToken | None:
        if item.sample is None:
            return None
        position = item.start + len(item.token_ids)
        assert item.sample.position == position == len(item.sample.token_ids) + (item.follows is not None)
        context = self._context(item, position)
        weights = np.arange(1, position + 1, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        digest = int(np.bitwise_xor.reduce(context * weights))
        return SampledToken(_mix(digest, item.sample.params.seed, item.sample.choice, position) % self.vocab_size, None)

    def _context(self, item: BatchItem, end: int) -> npt.NDArray[np.uint64]:
        """The numbers of an item's first `end` tokens, as its blocks hold them."""
        blocks = item.block_ids[: -(-end // self.block_size)]
        return self.kv[blocks].reshape(-1)[:end]


class LaggingRunner(FakeRunner):
    """Its device takes its time: a launched step is computed when it is collected, or in `catch_up`, from what the
    batch's lists held when it was launched and what the blocks hold by then."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 1000) -> None:
        super().__init__(num_blocks, block_size, vocab_size)
        self._queue: deque[Future[list[FakeResult]]] = deque()
        self._waiting: dict[Future[list[FakeResult]], Batch] = {}

    def launch(self, batch: Batch) -> Callable[[], list[FakeResult]]:
        future: Future[list[FakeResult]] = Future()
        self._queue.append(future)
        self._waiting[future] = replace(batch, items=tuple(map(_frozen, batch.items)))

        def collect() -> list[FakeResult]:
            while not future.done():
                self.catch_up()
            return future.result()

        return collect

    def catch_up(self) -> None:
        """Compute the oldest step that waits, if there is one."""
        if self._queue:
            future = self._queue.popleft()
            try:
                future.set_result(self.execute(self._waiting.pop(future)))
            except Exception as error:  # noqa: BLE001 (raised where the step is collected)
                future.set_exception(error)


def _frozen(item: BatchItem) -> BatchItem:
    sample = item.sample and replace(item.sample, token_ids=list(item.sample.token_ids))
    return replace(item, token_ids=list(item.token_ids), block_ids=list(item.block_ids), sample=sample)


def expected_tokens(
    prompt: Sequence[int], num_tokens: int, *, seed: int, choice: int = 0, vocab_size: int = 1000
) -> list[int]:
    """What `FakeRunner` generates for a prompt, computed without blocks, batches or chunks."""
    numbers: list[int] = []
    tokens = list(prompt)
    for _ in range(num_tokens):
        for position in range(len(numbers), len(tokens)):
            numbers.append(_mix(numbers[-1] if numbers else 0, tokens[position], position))
        digest = 0
        for index, number in enumerate(numbers):
            digest ^= number * (2 * index + 3) & _MASK
        tokens.append(_mix(digest, seed, choice, len(tokens)) % vocab_size)
    return tokens[len(prompt) :]
