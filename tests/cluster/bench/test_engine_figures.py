"""The report's arithmetic against numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.cluster.bench.cpu_use import CpuUse, busy_ticks
from tandem.cluster.bench.engine import CoreReport, EngineOptions
from tandem.cluster.bench.engine_figures import (
    Decode,
    Limits,
    LoopTimes,
    Prefill,
    Row,
    decode_bytes,
    layer_vectors,
    median_by_kernel,
    prefill_operations,
    ratio,
    weight_bytes,
)
from tandem.cluster.bench.engine_report import cells, notes, to_json, to_markdown
from tandem.cluster.bench.random_models import SHAPES, config_values, shape_of, write_random_model
from tandem.workers.errors import UserError
from tandem.workers.models.config import ModelConfig, RopeConfig

TINY = ModelConfig(
    architecture="llama",
    vocab_size=10,
    hidden_size=4,
    intermediate_size=6,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=5,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    rope=RopeConfig(theta=1e4),
)
# One layer: q 10x4, k and v 5x4 each, output 4x10: 120; gate, up and down 6x4 each: 72. Norms 2x4.
LAYER, NORMS, HEAD = 192, 8, 40


def test_weights_count_each_matrix_once_and_the_embedding_as_the_head_only() -> None:
    assert weight_bytes(TINY, 2) == 2 * (3 * (LAYER + NORMS) + 4 + HEAD)
    # Biases: q 10, k and v 5 each; output 4; gate and up 6 each, down 4. QK-norm: two of 5.
    everything = replace(TINY, attention_bias=True, output_bias=True, mlp_bias=True, qk_norm=True)
    assert layer_vectors(everything) == NORMS + 20 + 4 + 16 + 10


def test_the_published_shapes_weigh_what_is_published() -> None:
    """Qwen2.5: 0.49 and 1.54 billion parameters, tied, so head and embedding are one."""
    for name, billions in (("qwen2.5-0.5b", 0.494), ("qwen2.5-1.5b", 1.544)):
        shape = SHAPES[name]
        config = replace(
            TINY,
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_layers=shape.layers,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.hidden // shape.heads,
            attention_bias=True,
        )
        assert weight_bytes(config, 2) / 2e9 == pytest.approx(billions, abs=0.001)
    with pytest.raises(UserError, match=r"random:qwen9: no such shape; there are: random:qwen2.5-0.5b"):
        shape_of("random:qwen9")


def test_a_step_reads_the_weights_and_the_kv_of_the_positions_it_attends_to() -> None:
    # Two warm-up steps and three timed ones on 7 tokens attend to 8, 9 | 10, 11, 12: 11 on average.
    expected = weight_bytes(TINY, 2) + 2 * (3 * 2 * 1 * 5) * 11 * 4
    assert decode_bytes(TINY, 2, Decode(streams=4, context=7), num_steps=3, warm_up=2) == expected


def test_prefill_counts_multiplications_and_additions() -> None:
    # 3 tokens see 1 + 2 + 3 = 6 pairs; each pair costs 2 x 5 for the score and 2 x 5 for the sum, per head and layer.
    assert prefill_operations(TINY, 3) == 2 * 3 * LAYER * 3 + 6 * 20 * 2 * 3 + 2 * HEAD


def test_shares_and_ratios() -> None:
    limits = Limits({"slow": 50.0, "fast": 100.0}, {"only": 1000.0})
    ours = Row(Decode(8, 64), "tandem", (2.0, 4.0, 3.0), 0.1, bytes_or_operations=240.0)
    theirs = Row(Decode(8, 64), "peer", (6.0, 4.0, 6.0), 0.1, bytes_or_operations=240.0)
    assert ours.median_s == 3.0
    assert ours.tokens_per_s == pytest.approx(8 / 3)
    assert ours.share(limits) == pytest.approx(240 / 3 / 100)
    # Round by round 3, 1 and 2: their median, not the ratio of medians (which is 2 as well only by accident).
    assert ratio(ours, theirs) == 2.0
    assert ratio(ours, replace(theirs, seconds=(60.0, 4.0, 3.0))) == 1.0
    assert ratio(ours, replace(theirs, seconds=(), error="gone")) is None
    prefill = Row(Prefill(100), "tandem", (0.5,), 0.0, bytes_or_operations=250.0)
    assert prefill.tokens_per_s == 200.0
    assert prefill.share(limits) == 0.5
    assert replace(prefill, bytes_or_operations=None).share(limits) is None


def test_kernels_are_compared_by_their_medians_and_the_loop_by_what_is_not_the_model() -> None:
    assert median_by_kernel([{"a": 1.0, "b": 5.0}, {"a": 9.0, "b": 6.0}, {"a": 2.0, "b": 7.0}]) == {"a": 2.0, "b": 6.0}
    loop = LoopTimes(8, step=20.0, schedule=0.2, host=0.3, apply=0.1, execute=19.3)
    assert loop.overhead == pytest.approx(0.05)


def test_cores_of_others() -> None:
    stat = "cpu  100 10 30 1000 500 2 3 5 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
    assert busy_ticks(stat) == 100 + 10 + 30 + 2 + 3 + 5  # without idle, waiting for a disk, and guests (counted twice)
    before, after = CpuUse(busy_s=10.0, own_s=4.0), CpuUse(busy_s=16.0, own_s=7.0)
    assert after.others_since(before, elapsed_s=2.0) == 1.5
    assert CpuUse(16.0, 12.0).others_since(before, 2.0) == 0.0  # the counts are coarse; less than nobody is nobody


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    return EngineOptions(model="tiny", folder=tmp_path, config=TINY, threads=(1,), rounds=2, seed=3)


def test_the_report_says_who_failed_and_who_is_faster(options: EngineOptions) -> None:
    work = Decode(8, 64)
    rows = (
        Row(Decode(1, 64), "tandem", (0.001, 0.001), 0.0, 20.0),
        Row(work, "tandem", (0.002, 0.002), 0.0, 100.0),
        Row(work, "peer", (0.003, 0.003), 0.25, 100.0),
        Row(work, "int8", (0.001, 0.001), 0.0, None),
        Row(work, "broken", (), 1.5, error="RuntimeError: no"),
    )
    report = CoreReport(1, Limits({"read": 1e5}, {"mm": 2e12}), rows, None, ("gone ended: killed",))
    table = {row.side: cells(report, row) for row in rows[1:]}
    assert table["tandem"] == ["decode, 8 x 64", "tandem", "4,000", "2.0 (2.0-2.0)", "50%", "", "0.00"]
    assert table["peer"][2:] == ["2,667", "3.0 (3.0-3.0)", "33%", "1.50x", "0.25"]
    assert table["int8"][4:6] == ["", "0.50x"]
    assert table["broken"][2:] == ["failed", "RuntimeError: no", "", "", "1.50"]
    lines = notes(report)
    assert "A step of many streams against a step of one: 8 x 64: 2.00x" in lines
    assert lines[-1] == "Failed: gone ended: killed"
    text = to_markdown(options, [report])
    assert "| decode, 8 x 64 | peer | 2,667 | 3.0 (3.0-3.0) | 33% | 1.50x | 0.25 |" in text
    body = json.loads(to_json(options, [report]))
    assert body["cores"][0]["rows"][1]["share"] == pytest.approx(0.5)
    assert body["weight_bytes"] == weight_bytes(TINY, 2)


def test_options_leave_room_for_the_steps_and_refuse_what_cannot_be(options: EngineOptions) -> None:
    assert options.max_len >= 1024 + 4 * (options.warm_up + options.steps) + 1
    assert options.max_seqs == 32
    with pytest.raises(UserError, match="--threads 4096"):
        replace(options, threads=(4096,))
    with pytest.raises(UserError, match="at least 1"):
        replace(options, rounds=0)


def test_random_models_are_checkpoints(tmp_path: Path) -> None:
    shape = replace(SHAPES["qwen2.5-0.5b"], hidden=64, layers=2, heads=2, kv_heads=1, intermediate=32, vocab=96)
    write_random_model(shape, tmp_path)  # which checks what it wrote, like anybody's model
    assert json.loads((tmp_path / "config.json").read_text()) == config_values(shape)
