"""A real model: what was cached, copied, shared or computed again after eviction gives the bits of a cold run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from tiny_model import CONFIG, random_weights

from tandem.kernels.ops import load_ops
from tandem.workers.batch import Batch, BlockCopy, SampledToken
from tandem.workers.config import WorkerConfig
from tandem.workers.engine import Engine
from tandem.workers.kv_cache import KVCache
from tandem.workers.model_runner import ModelRunner
from tandem.workers.types import Choice, ModelIdentity, Request, SamplingParams

BLOCK_SIZE = 16
NUM_TOKENS = 6
Answers = dict[tuple[str, int], list[SampledToken]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(
    params=[(dtype, ops) for dtype in ("float32", "bfloat16") for ops in ("reference", "cpu")], ids="-".join
)
def make_engine(request: pytest.FixtureRequest, make_config: Callable[..., WorkerConfig]) -> Callable[..., Engine]:
    """Engines over the tiny model, whose blocks are NaN until they are written."""
    dtype, backend = request.param
    weights = random_weights(getattr(torch, dtype))

    def make(num_blocks: int, *, budget: int = 64) -> Engine:
        cache = KVCache(CONFIG, num_blocks, BLOCK_SIZE, weights.embedding.dtype, "cpu")
        cache.tensor.fill_(float("nan"))
        runner = ModelRunner(CONFIG, weights, cache, max_num_seqs=8, max_model_len=256, ops=load_ops(backend))
        assert runner.record() == (backend == "cpu")
        config = make_config(block_size=BLOCK_SIZE, max_num_batched_tokens=budget, max_num_seqs=8)
        identity = ModelIdentity(
            protocol_version=1,
            model="tiny",
            revision="0",
            dtype=dtype,
            numerics="any",
            layout_version=1,
            block_size=BLOCK_SIZE,
            block_bytes=cache.block_bytes,
            max_model_len=256,
        )
        return Engine(runner, config, num_blocks, identity, vocab_size=CONFIG.vocab_size)

    return make


def make_request(name: str, prompt: list[int], choices: tuple[int, ...] = (0,)) -> Request:
    """Every other one greedy; all with logprobs."""
    seed = sum(prompt)
    params = SamplingParams(
        max_tokens=NUM_TOKENS, seed=seed, temperature=seed % 2 * 0.8, num_logprobs=3, repetition_penalty=1.1
    )
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=params,
        choices=tuple(Choice(index=index) for index in choices),
    )


def run(engine: Engine, answers: Answers) -> None:
    while not engine.is_idle:
        for output in engine.step():
            assert output.error is None
            if output.token is not None:
                answers.setdefault((output.sequence.request_id, output.sequence.choice), []).append(output.token)
        engine.check()


def ask(engine: Engine, request: Request) -> tuple[Answers, int]:
    """Its answers, alone in the engine, and how many tokens it found."""
    sequences, answers = engine.add(request), Answers()
    run(engine, answers)
    return answers, sequences[0].cached.total


def conversations() -> list[list[int]]:
    """Prompts that share 1, 5, 16, 17, 31, 47, 48, 60, 95 tokens with the first one, then go their own ways."""
    rng = random.Random(3)
    first = rng.choices(range(CONFIG.vocab_size), k=100)
    lengths = [1, 5, 16, 17, 31, 47, 48, 60, 95]
    return [first, *([*first[:length], *rng.choices(range(CONFIG.vocab_size), k=23)] for length in lengths)]


def cold(make_engine: Callable[..., Engine], prompts: list[list[int]]) -> list[list[SampledToken]]:
    return [ask(make_engine(16), make_request("r", prompt))[0]["r", 0] for prompt in prompts]


def test_a_start_inside_a_block_gives_the_bits_of_a_cold_run(make_engine: Callable[..., Engine]) -> None:
    prompts = conversations()
    expected = cold(make_engine, prompts)
    engine = make_engine(100, budget=16)
    num_found: list[int] = []
    for index, prompt in enumerate(prompts):
        answers, found = ask(engine, make_request(str(index), prompt))
        assert answers[str(index), 0] == expected[index]
        num_found.append(found)
    assert num_found == [0, 1, 5, 16, 17, 31, 47, 48, 60, 95]
    for index, prompt in enumerate(prompts):
        answers, found = ask(engine, make_request(f"{index} again", prompt))
        assert answers[f"{index} again", 0] == expected[index]
        assert found >= len(prompt) // BLOCK_SIZE * BLOCK_SIZE


def test_all_at_once_in_a_pool_that_evicts(make_engine: Callable[..., Engine]) -> None:
    prompts = conversations()
    expected = cold(make_engine, prompts)
    engine = make_engine(20)
    evicted: list[bytes] = []
    engine.cache.on_evict = lambda key, parent_key, token_ids, block_id, priority: evicted.append(key)
    for turn in range(2):
        answers = Answers()
        sequences = [engine.add(make_request(f"{turn} {i}", prompt))[0] for i, prompt in enumerate(prompts)]
        run(engine, answers)
        for index in range(len(prompts)):
            assert answers[f"{turn} {index}", 0] == expected[index]
        assert any(sequence.cached.total % BLOCK_SIZE for sequence in sequences)
    assert len(evicted) > 15


@pytest.mark.parametrize("length", [1, 16, 17, 40])
def test_choices_that_share_a_prompt_answer_as_if_alone(make_engine: Callable[..., Engine], length: int) -> None:
    prompt = conversations()[0][:length]
    choices = (0, 1, 2, 5)
    expected: Answers = {}
    for choice in choices:
        expected |= ask(make_engine(20), make_request("r", prompt, (choice,)))[0]
    engine = make_engine(40)
    sequences, answers = engine.add(make_request("r", prompt, choices)), Answers()
    run(engine, answers)
    assert answers == expected
    assert [sequence.cached.total for sequence in sequences] == [0, *[length - 1] * 3]


def test_copies_are_made_before_anything_is_computed(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(8)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    cache = runner._kv_cache
    cache.tensor[2].fill_(0.5)
    engine.add(make_request("r", [1, 2, 3]))
    step = engine.schedule()
    assert step is not None
    [item] = step.batch.items
    runner.execute(Batch((item,), (BlockCopy(2, 5, 9), BlockCopy(2, item.block_ids[0], 9))))
    assert cache.digest(5) == cache.digest(2) != cache.digest(item.block_ids[0])
    assert torch.equal(cache.tensor[5], cache.tensor[2])
    assert torch.equal(cache.tensor[item.block_ids[0]][..., 3:, :], cache.tensor[2][..., 3:, :])
