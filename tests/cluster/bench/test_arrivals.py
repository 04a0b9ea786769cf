from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tandem.cluster.bench.arrivals import Arrival, bounded, poisson, read_trace, steady
from tandem.cluster.bench.prompts import WORDS, PromptMaker
from tandem.workers.errors import UserError

DATA = Path(os.environ.get("TANDEM_DATA_DIR") or Path(__file__).parents[4] / "shared" / "data")

MOONCAKE = """{"timestamp": 1000, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 4000, "input_length": 600, "output_length": 7, "hash_ids": [46, 49]}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,44
2023-11-16 18:17:05.4799600,396,109
"""


def test_poisson_gaps_have_the_right_mean_and_are_repeatable() -> None:
    arrivals = list(islice(poisson(20.0, 7, 100, 50, 8), 4000))
    gaps = np.diff([0.0] + [arrival.at_s for arrival in arrivals])
    assert np.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert np.std(gaps) == pytest.approx(1 / 20, rel=0.08)  # exponential: as wide as its mean
    lengths = [arrival.input_len for arrival in arrivals]
    assert (min(lengths), max(lengths)) == (50, 150)
    assert arrivals == list(islice(poisson(20.0, 7, 100, 50, 8), 4000))
    assert arrivals != list(islice(poisson(20.0, 8, 100, 50, 8), 4000))


def test_bounds() -> None:
    assert len(list(bounded(poisson(100.0, 1, 1, 0, 1), 1000.0, 10))) == 10
    in_time = list(bounded(poisson(100.0, 1, 1, 0, 1), 2.0, None))
    assert 150 < len(in_time) < 250
    assert in_time[-1].at_s <= 2.0
    assert len(list(bounded(steady(1, 5, 0, 1), 2.0, 3))) == 3


def test_mooncake(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    assert read_trace(path, time_scale=1.0, length_scale=1.0) == [
        Arrival(0.0, 1100, 52, (46, 47, 48), 512),
        Arrival(3.0, 600, 7, (46, 49), 512),
    ]
    assert read_trace(path, time_scale=0.5, length_scale=0.1) == [
        Arrival(0.0, 110, 5, (46, 47, 48), 51),
        Arrival(1.5, 60, 1, (46, 49), 51),
    ]


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    first, second = read_trace(path, time_scale=2.0, length_scale=0.5)
    assert first == Arrival(0.0, 187, 22)
    assert second.at_s == pytest.approx(3.0)
    assert (second.input_len, second.output_len) == (198, 54)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column"),
        ("a,b\n1,2\n", "neither a Mooncake nor an Azure trace: no column ContextTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        (AZURE + "yesterday,1,2\n", "trace:4: not a request"),
        (AZURE + "2023-11-16 18:17:05,many,2\n", "trace:4: not a request"),
        (MOONCAKE + '{"timestamp": 1}\n', "trace:3: not a request of a trace: KeyError 'input_length'"),
        (MOONCAKE + "nonsense\n", "trace:3: not a request"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": 4}\n', "hash_ids"),
    ],
)
def test_a_trace_that_is_none_names_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_trace(path, time_scale=1.0, length_scale=1.0)
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path / "absent", time_scale=1.0, length_scale=1.0)


def test_published_mooncake_trace() -> None:
    path = DATA / "traces" / "mooncake_conversation.jsonl"
    if not path.exists():
        pytest.skip(f"no {path.name} in the data folder (TANDEM_DATA_DIR)")
    arrivals = read_trace(path, time_scale=1.0, length_scale=1.0)
    assert len(arrivals) == 12031
    assert arrivals == sorted(arrivals, key=lambda arrival: arrival.at_s)
    # Every prompt is covered by its blocks, the last of which may be partial.
    assert all(0 <= len(a.content_ids) * 512 - a.input_len < 512 for a in arrivals)


def test_published_azure_trace() -> None:
    path = DATA / "traces" / "azure_llm_2023_conv.csv"
    if not path.exists():
        pytest.skip(f"no {path.name} in the data folder (TANDEM_DATA_DIR)")
    arrivals = read_trace(path, time_scale=1.0, length_scale=1.0)
    assert len(arrivals) == len(path.read_text().splitlines()) - 1
    assert (arrivals[0].input_len, arrivals[0].output_len) == (374, 44)
    assert 3000 < arrivals[-1].at_s < 3700  # an hour


def test_prompts_have_the_asked_length_and_share_what_is_asked() -> None:
    maker = PromptMaker(1, num_tokens=1000, shared_prefix_len=20)
    first, second = (maker.prompt(number, Arrival(0.0, 50, 1)) for number in (0, 1))
    assert len(first) == len(second) == 50
    assert first[:20] == second[:20]
    assert first[20:] != second[20:]
    assert all(125 <= token < 1000 for token in first)
    assert maker.prompt(0, Arrival(0.0, 50, 1)) == first
    assert PromptMaker(2, num_tokens=1000, shared_prefix_len=20).prompt(0, Arrival(0.0, 50, 1))[:20] != first[:20]
    assert len(maker.prompt(0, Arrival(0.0, 7, 1))) == 21  # the shared part and something of its own
    warm_up = maker.warm_up_prompt(0, Arrival(0.0, 50, 1))
    assert len(warm_up) == 50
    assert warm_up[:20] != first[:20]


def test_prompts_of_words() -> None:
    prompt = PromptMaker(1, num_tokens=None, shared_prefix_len=0).prompt(0, Arrival(0.0, 30, 1))
    assert isinstance(prompt, str)
    assert len(prompt.split()) == 30
    assert set(prompt.split()) <= set(WORDS)
    assert len(WORDS) == len(set(WORDS))


def test_equal_hash_ids_are_equal_content() -> None:
    maker = PromptMaker(1, num_tokens=1000, shared_prefix_len=0)
    first = maker.prompt(0, Arrival(0.0, 110, 1, (46, 47, 48), 51))
    second = maker.prompt(1, Arrival(1.0, 60, 1, (46, 49), 51))
    assert (len(first), len(second)) == (110, 60)
    assert first[:51] == second[:51]
    assert first[51:60] != second[51:]
    assert maker.prompt(5, Arrival(0.0, 110, 1, (46, 47, 48), 51)) == first
    assert len(maker.prompt(2, Arrival(0.0, 70, 1, (46,), 51))) == 70  # longer than its blocks: filled up
