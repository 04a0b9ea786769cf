"""The runner: a request's tokens and logprobs have the same bits however its steps are cut and shared."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from tiny_model import CONFIG, random_weights

from tandem.kernels.ops import load_ops
from tandem.workers.batch import Batch, BatchItem, SampledToken, SampleSpec
from tandem.workers.kv_cache import KVCache
from tandem.workers.model_runner import ModelRunner, StepCounts
from tandem.workers.step_inputs import build, build_sampling
from tandem.workers.types import SamplingParams

BLOCK_SIZE = 16
BLOCKS_PER_SEQUENCE = 16
NUM_SEQUENCES = 6


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_runner(dtype: torch.dtype = torch.bfloat16, backend: str = "cpu", *, record: bool = True) -> ModelRunner:
    cache = KVCache(CONFIG, NUM_SEQUENCES * BLOCKS_PER_SEQUENCE, BLOCK_SIZE, dtype, "cpu")
    cache.tensor.fill_(float("nan"))
    runner = ModelRunner(CONFIG, random_weights(dtype), cache, max_num_seqs=8, max_model_len=256, ops=load_ops(backend))
    if record:
        assert runner.record() == (backend == "cpu")
    return runner


def make_params(index: int) -> SamplingParams:
    """Six different ways to sample."""
    varied: list[dict[str, float | int | None]] = [
        {"temperature": 0.0, "num_logprobs": 0},
        {"temperature": 1.0, "num_logprobs": 5},
        {"temperature": 0.7, "top_p": 0.8, "num_logprobs": 2},
        {"temperature": 1.3, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "num_logprobs": 1},
        {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 0.0, "repetition_penalty": 1.5, "num_logprobs": 20},
    ]
    return SamplingParams(max_tokens=99, seed=(1 << 64) - 1 - index, **varied[index])  # type: ignore[arg-type]


def make_item(index: int, tokens: list[int], start: int, stop: int, num_prompt_tokens: int) -> BatchItem:
    sample = SampleSpec(make_params(index), 0, stop, tokens[:stop], num_prompt_tokens) if stop == len(tokens) else None
    blocks = range(index * BLOCKS_PER_SEQUENCE, (index + 1) * BLOCKS_PER_SEQUENCE)
    return BatchItem(tokens[start:stop], start, blocks, sample)


def generate(runner: ModelRunner, indices: list[int], chunk: int, num_tokens: int) -> dict[int, list[SampledToken]]:
    """Prefill the prompts of these sequences in chunks and decode, all of them side by side as far as they get."""
    tokens = {index: [(7 * index + 3 * place) % 499 for place in range(20 + 23 * index)] for index in indices}
    prompt_lens = {index: len(text) for index, text in tokens.items()}
    done = dict.fromkeys(indices, 0)
    results: dict[int, list[SampledToken]] = {index: [] for index in indices}
    while live := [index for index in indices if len(results[index]) < num_tokens]:
        stops = {index: min(len(tokens[index]), done[index] + chunk) for index in live}
        items = [make_item(index, tokens[index], done[index], stops[index], prompt_lens[index]) for index in live]
        for index, sampled in zip(live, runner.execute(Batch(tuple(items))), strict=True):
            done[index] = stops[index]
            if sampled is not None:
                results[index].append(sampled)
                tokens[index].append(sampled.token_id)
    return results


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_request_same_tokens_and_logprobs(dtype: torch.dtype, backend: str) -> None:
    runner = make_runner(dtype, backend)
    everyone = list(range(NUM_SEQUENCES))
    expected = generate(runner, everyone, 512, 12)
    for chunk in (16, 7):
        assert generate(runner, everyone[::-1], chunk, 12) == expected
    for index in everyone:
        assert generate(runner, [index], 48, 12)[index] == expected[index]
    assert len({tuple(one.token_id for one in expected[index]) for index in everyone}) == NUM_SEQUENCES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_recorded_steps_and_more_threads_change_no_bit(dtype: torch.dtype) -> None:
    everyone = list(range(NUM_SEQUENCES))
    eager = make_runner(dtype, record=False)
    expected = generate(eager, everyone, 512, 12)
    assert (eager.counts.replayed, eager.counts.replayed_to_logits) == (0, 0)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        recorded = make_runner(dtype)
        for index in everyone:
            assert generate(recorded, [index], 48, 12)[index] == expected[index]
        assert generate(recorded, everyone, 33, 12) == expected
        assert recorded.counts.replayed_to_logits > 11  # all but one of the requests have penalties or logprobs


@pytest.mark.parametrize("num_seqs", [1, 3, 6])
def test_plain_requests_are_sampled_inside_the_recorded_step(num_seqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and random ones, in batches that fill their bucket and in batches that do not."""

    def plain(index: int) -> SamplingParams:
        return SamplingParams(max_tokens=99, seed=index, temperature=index % 3 * 0.6, top_p=1.0 - 0.1 * (index % 2))

    monkeypatch.setattr(f"{__name__}.make_params", plain)
    indices = list(range(num_seqs))
    recorded, eager = make_runner(), make_runner(record=False)
    assert generate(recorded, indices, 512, 12) == generate(eager, indices, 512, 12)
    assert (recorded.counts.eager, recorded.counts.replayed, recorded.counts.replayed_to_logits) == (1, 11, 0)


def test_a_recorded_step_writes_no_kv_for_its_padding() -> None:
    runner = make_runner()
    generate(runner, [0, 1, 2], 512, 3)  # leaves slots of sequence 2 behind in the buffers
    before = runner._kv_cache.tensor[2 * BLOCKS_PER_SEQUENCE : 3 * BLOCKS_PER_SEQUENCE].clone()
    generate(runner, [0], 512, 3)
    after = runner._kv_cache.tensor[2 * BLOCKS_PER_SEQUENCE : 3 * BLOCKS_PER_SEQUENCE]
    assert torch.equal(before.view(torch.int16), after.view(torch.int16))


def test_a_cached_prefix_gives_the_same_token() -> None:
    runner = make_runner()
    tokens = [(5 * place) % 499 for place in range(100)]
    (cold,) = runner.execute(Batch((make_item(1, tokens, 0, 100, 100),)))
    (warm,) = runner.execute(Batch((make_item(1, tokens, 96, 100, 100),)))
    assert warm == cold


def test_results_are_aligned_with_items_and_logprobs_with_requests() -> None:
    runner = make_runner()
    texts = [[index + place for place in range(30)] for index in range(6)]
    items = [make_item(index, text, 0, 20 if index == 2 else 30, 30) for index, text in enumerate(texts)]
    results = runner.execute(Batch(tuple(items)))
    assert [result is None for result in results] == [False, False, True, False, False, False]
    for index, num_top in [(0, 0), (1, 5), (3, 1), (5, 20)]:
        result = results[index]
        assert result is not None
        assert result.logprobs is not None
        assert len(result.logprobs.top_token_ids) == len(result.logprobs.top_logprobs) == num_top
        assert sum(math.exp(value) for value in result.logprobs.top_logprobs) < 1.0
        assert list(result.logprobs.top_logprobs) == sorted(result.logprobs.top_logprobs, reverse=True)
    assert results[4] is not None
    assert results[4].logprobs is None
    assert runner.execute(Batch(())) == []
    assert runner.execute(Batch((items[2],))) == [None]


def test_what_is_sampled_does_not_change_the_kv() -> None:
    """A step that samples nothing leaves the same cache as one that does."""
    tokens = list(range(40))
    caches = []
    for text in (tokens, [*tokens, 0]):
        cache = KVCache(CONFIG, 16, BLOCK_SIZE, torch.bfloat16, "cpu")
        cache.tensor.zero_()
        runner = ModelRunner(CONFIG, random_weights(torch.bfloat16), cache, max_num_seqs=8, max_model_len=256)
        runner.execute(Batch((make_item(0, text, 0, 40, 40),)))
        caches.append([cache.digest(block) for block in range(16)])
    assert caches[0] == caches[1]
    assert len(set(caches[0])) == 4  # three blocks that were written, and the empty ones


def test_build_lays_out_positions_slots_and_blocks() -> None:
    items = (BatchItem([7, 8, 9], 15, [4, 2, 9], None), BatchItem([5], 0, [3], make_item(0, [5], 0, 1, 1).sample))
    inputs = build(Batch(items), 16)
    assert inputs.token_ids.tolist() == [7, 8, 9, 5]
    assert inputs.layout.positions.tolist() == [15, 16, 17, 0]
    assert inputs.layout.slots.tolist() == [4 * 16 + 15, 2 * 16, 2 * 16 + 1, 3 * 16]
    assert inputs.layout.query_starts.tolist() == [0, 3, 4]
    assert inputs.layout.context_lens.tolist() == [18, 1]
    assert inputs.layout.block_tables.tolist() == [[4, 2], [3, 0]]
    assert inputs.sample_rows.tolist() == [3]
    assert items[1].sample is not None
    assert build_sampling([items[1].sample]).seed.tolist() == [-1]


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ((BatchItem([1], 256, range(20), None),), "max_model_len"),
        ((BatchItem([], 0, range(20), None),), "max_model_len"),
        ((BatchItem([1], 16, [0], None),), "blocks"),
        ((BatchItem([1], 0, [0], None),) * 9, "max_num_seqs"),
    ],
)
def test_batches_that_cannot_be_run_are_refused(items: tuple[BatchItem, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_runner().execute(Batch(items))


def test_with_another_cache_nothing_recorded_holds() -> None:
    expected = generate(make_runner(), [0, 3], 17, 3)
    runner = make_runner()
    cache = KVCache(CONFIG, NUM_SEQUENCES * BLOCKS_PER_SEQUENCE, BLOCK_SIZE, torch.bfloat16, "cpu")
    cache.tensor.fill_(float("nan"))
    runner.use_cache(cache)
    assert generate(runner, [0, 3], 17, 3) == expected
    assert runner.counts.replayed == runner.counts.replayed_to_logits == 0


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_rehearsal_runs_every_size_and_changes_nothing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(make_runner(backend=backend), [0, 3], 17, 3)
    runner = make_runner(backend=backend)
    sizes: list[int] = []
    forward = runner.decoder.forward
    monkeypatch.setattr(runner.decoder, "forward", lambda ids, *rest: sizes.append(ids.shape[0]) or forward(ids, *rest))
    runner.rehearse()
    monkeypatch.undo()
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 128, 256, 8, 8, 8]  # to the longest sequence, and the most of them
    assert runner.counts == StepCounts()
    assert generate(runner, [0, 3], 17, 3) == expected
