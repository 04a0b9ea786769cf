"""`tandem bench gateway`, small, on a tokenizer that is made in a moment."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from tandem.cluster.bench.gateway import GatewayBenchOptions, bench_gateway
from tandem.cluster.bench.gateway_cli import print_gateway_report, to_json
from tandem.cluster.bench.gateway_figures import ways
from tandem.cluster.bench.prompts import WORDS

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    tokenizer = RawTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


async def test_everything_is_measured(tokenizer_folder: Path) -> None:
    options = GatewayBenchOptions(
        tokenizer_folder=tokenizer_folder,
        num_streams=6,
        num_workers=2,
        rate=600,
        duration_s=0.3,
        prompt_tokens=(20,),
        num_requests=3,
        num_idle=5,
        idle_s=0.1,
    )
    told: list[str] = []
    report = await bench_gateway(options, told.append)
    assert len(told) == 4
    full, half = report.streaming
    assert full.offered_per_s == 600
    assert half.offered_per_s == pytest.approx(0.5 * full.tokens_per_core_s)
    assert 0 < full.tokens_per_s < 1200
    assert 0 <= full.latency.p50 <= full.latency.p99
    assert full.tokens_per_read >= 1
    (requests,) = report.requests
    assert requests.parts.prompt_tokens > 20
    assert min(requests.parts.parse_s, requests.parts.tokenise_s, requests.parts.route_s, requests.wall_s) > 0
    assert report.idle is not None
    assert report.idle.num_streams == 5
    assert report.idle.health.count >= 1
    assert set(json.loads(to_json(report))) == {"options", "streaming", "requests", "idle"}
    console = Console(width=80, file=io.StringIO(), record=True)
    print_gateway_report(report, console)
    assert "5 idle streams" in console.export_text()


def test_tokens_are_timed_from_their_sending_to_their_reading() -> None:
    stamps = {
        "steps": [[10.0, 11.0, 12.0, 13.0]],
        "told": {"a": {"worker": 0, "first_at": 9.5, "first_step": 1, "num_tokens": 4}},
    }
    # the role comes with the first token; two tokens are read at once; the last token is read too late to count
    reads = {"a": [(9.6, 2), (12.5, 2), (13.25, 1)]}
    way = ways(stamps, reads, 10.5, 13.1)
    assert way.latencies == [1.5, 0.5, 0.25]
    assert (way.num_tokens, way.num_reads) == (2, 1)


def test_what_a_client_never_read_has_no_time() -> None:
    stamps = {
        "steps": [[1.0, 2.0]],
        "told": {"a": {"worker": 0, "first_at": 0.0, "first_step": 0, "num_tokens": 3}},
    }
    assert ways(stamps, {}, 0.0, 3.0).latencies == []
    assert ways(stamps, {"a": [(0.5, 2)]}, 0.0, 3.0).latencies == [0.5]
