"""`tandem tune` over a backend that is made up: what is asked of it, what is printed, kept, shipped."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from rich.console import Console
from typer.testing import CliRunner

from tandem.cluster import tune as tune_module
from tandem.cluster.cli import app
from tandem.cluster.tune import TuneRequest, default_num_threads, run_tune
from tandem.cluster.tune_table import report_as_json, show_report
from tandem.kernels.autotune import (
    Candidate,
    Choices,
    DeviceKey,
    Tunable,
    TuningKey,
    TuningReport,
    TuningResult,
    TuningWorkload,
)
from tandem.kernels.ops import Ops, load_ops
from tandem.kernels.reference import ReferenceOps
from tandem.workers.errors import UserError
from tandem.workers.warm_up import Phase

HIDDEN, INNER, VOCAB = 32, 64, 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
LAYER = {
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    **{f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")},
    "mlp.down_proj": (HIDDEN, INNER),
}
SHAPES = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)} | {
    f"model.layers.{layer}.{name}.weight": shape for layer in range(2) for name, shape in LAYER.items()
}

SLOW, FAST = Candidate.of(unroll=1), Candidate.of(unroll=2)


def num_weights_by_shape(workload: TuningWorkload) -> dict[tuple[int, int], int]:
    return Counter((packed.in_features, packed.out_features) for packed in workload.linears)


class FakeOps(ReferenceOps):
    """A backend with one choice per shape: to sleep, or not to."""

    def __init__(self, version: str = "1") -> None:
        self.version = version
        self.workloads: list[TuningWorkload] = []
        self.used: list[Choices] = []

    def device_key(self) -> DeviceKey:
        return DeviceKey("a machine", torch.get_num_threads(), {"source": self.version})

    def tunables(self, workload: TuningWorkload) -> Sequence[Tunable]:
        self.workloads.append(workload)
        return [
            Tunable(TuningKey("linear", f"{shape[0]}x{shape[1]}", bucket, workload.dtype), (SLOW, FAST), prepare)
            for shape in num_weights_by_shape(workload)
            for bucket in (1, 2)
        ]

    def use_choices(self, choices: Choices) -> None:
        self.used.append(choices)


def prepare(candidate: Candidate) -> Callable[[], None]:
    return lambda: time.sleep(1e-3 if candidate == SLOW else 0)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache of the test's own; threads and device as on a small machine."""
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tune_module, "resolve_device", lambda choice: "cpu")
    before = torch.get_num_threads()
    yield tmp_path / "cache"
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in Hugging Face format."""
    path = tmp_path / "tiny-model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}))
    tensors = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    return path


def said(ops: Ops, model: Path | str, **options: Any) -> str:
    """What `tandem tune` prints."""
    console = Console(file=StringIO(), width=100)
    run_tune(TuneRequest(model=str(model), num_threads=1, **options), create=lambda device: ops, console=console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_backend_is_asked_with_the_models_shapes_and_packed_weights(folder: Path) -> None:
    ops = FakeOps()
    shown = said(ops, folder)
    (workload,) = ops.workloads
    assert num_weights_by_shape(workload) == {
        (HIDDEN, 3 * HIDDEN): 2,
        (HIDDEN, HIDDEN): 2,
        (HIDDEN, INNER): 2,
        (INNER, HIDDEN): 2,
        (HIDDEN, VOCAB): 1,
    }
    assert (workload.num_heads, workload.num_kv_heads, workload.head_dim) == (2, 2, 16)
    assert (workload.block_size, workload.max_rows, workload.max_seqs, workload.max_context) == (32, 512, 64, 64)
    assert (workload.dtype, workload.windows) == ("float32", frozenset({None}))
    assert "linear 32x96 float32, us" in shown
    assert "10 measured" in shown


def test_the_second_time_it_reads(folder: Path, cache: Path) -> None:
    said(FakeOps(), folder)
    assert (cache / "tuning.json").exists()
    assert "10 from the file" in said(FakeOps(), folder)
    assert "10 measured" in said(FakeOps(), folder, force=True)
    assert "10 measured" in said(FakeOps(version="2"), folder)


def test_json_holds_everything(folder: Path) -> None:
    shown = json.loads(said(FakeOps(), folder, as_json=True))
    assert shown["device"] == {"name": "a machine", "num_threads": 1, "versions": {"source": "1"}}
    assert list(shown["phases"]) == ["preparing kernels", "finding the model", "loading weights", "tuning kernels"]
    first = shown["results"][0]
    assert {name: first[name] for name in ("op", "shape", "bucket", "dtype", "choice", "source")} == {
        "op": "linear",
        "shape": "32x96",
        "bucket": 1,
        "dtype": "float32",
        "choice": "unroll=2",
        "source": "measured",
    }
    assert set(first["seconds"]) == {"unroll=1", "unroll=2"}
    assert first["worst_over_best"] > 2


def test_without_time_everything_keeps_its_default(folder: Path) -> None:
    shown = said(FakeOps(), folder, deadline_s=0.0)
    assert "10 not measured" in shown
    assert "--deadline" in shown


def test_results_are_shipped_to_another_machine(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped.json"
    said(FakeOps(), folder, export_to=shipped)
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "elsewhere"))
    there = FakeOps()
    assert "10 results of" in said(there, "no/such-model", import_from=shipped)
    assert there.workloads == []
    assert "10 from the file" in said(there, folder)


def test_another_devices_results_need_force(folder: Path, tmp_path: Path) -> None:
    shipped = tmp_path / "shipped.json"
    said(FakeOps(), folder, export_to=shipped)
    other = FakeOps(version="2")
    with pytest.raises(UserError, match="of another device: source is '1' there, '2' here"):
        said(other, folder, import_from=shipped)
    said(other, folder, import_from=shipped, force=True)
    assert "10 from the file" in said(other, folder)


def test_a_folder_that_is_missing_is_said_before_anything_is_measured(folder: Path, tmp_path: Path) -> None:
    def create(_: object) -> Any:
        raise AssertionError("too late")

    with pytest.raises(UserError, match="there is no folder"):
        run_tune(TuneRequest(model=str(folder), export_to=tmp_path / "missing" / "tuning.json"), create=create)


def test_a_backend_without_choices_is_said() -> None:
    with pytest.raises(UserError, match="nothing to tune: the backend 'reference' has no choices"):
        said(load_ops("reference"), "model")


def test_threads_are_those_of_a_worker() -> None:
    assert 1 <= default_num_threads() <= 64
    ops = FakeOps()
    with pytest.raises(UserError):
        run_tune(TuneRequest(model="absent", num_threads=2), create=lambda device: ops)
    assert ops.device_key().num_threads == 2


# The table


def result(bucket: int, seconds: dict[str, float], choice: str, **more: Any) -> TuningResult:
    key = TuningKey("linear", "576x960", bucket, "bfloat16")
    return TuningResult(key, Candidate(choice, {}), more.pop("source", "measured"), seconds, **more)


def test_the_table_marks_the_fastest_the_close_and_the_chosen() -> None:
    report = TuningReport(
        (
            result(1, {"a": 60.4e-6, "b": 60e-6, "c": 130e-6}, "a", noise=0.012),
            result(16, {"a": 200e-6, "b": 105e-6}, "b", unavailable=("c",), noise=0.004),
            result(512, {}, "a", source="default"),
        ),
        elapsed_s=1.0,
    )
    console = Console(file=StringIO(), width=60)
    show_report(console, report, DeviceKey("a machine", 2, {}), Path("/cache/tuning.json"), [Phase("tuning", 1.25)])
    assert isinstance(console.file, StringIO)
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == [
        "linear 576x960 bfloat16, us",
        "bucket             1      16  512",
        "a             >60.4~     200   >-",
        "b              60.0*   >105*    -",
        "c                130       -    -",
        "worst / best    2.17    1.90    -",
        "noise          1.2 %   0.4 %    -",
        "",
        "> chosen   * fastest   ~ within 5 % of it   - not available or not measured",
        "a machine, 2 threads: 2 measured, 1 not measured",
        "tuning 1.2 s; kept in /cache/tuning.json",
        "What was not measured keeps its default: give it more time with --deadline.",
    ]


def test_a_table_that_is_wider_than_the_console_is_not_cut() -> None:
    seconds = {"a candidate with a name that takes its room": 123e-6, "b": 100e-6}
    report = TuningReport(tuple(result(1 << power, seconds, "b") for power in range(10)), elapsed_s=1.0)
    console = Console(file=StringIO(), width=60)
    show_report(console, report, DeviceKey("a machine", 2, {}), Path("tuning.json"), [])
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "a candidate with a name that takes its room" in shown
    assert shown.count("123") == shown.count(">100*") == 10


def test_a_table_of_long_runs_is_in_milliseconds() -> None:
    report = TuningReport((result(512, {"a": 4.5e-3, "b": 0.12}, "a"),), elapsed_s=1.0)
    console = Console(file=StringIO(), width=60)
    show_report(console, report, DeviceKey("a machine", 2, {}), Path("tuning.json"), [])
    assert isinstance(console.file, StringIO)
    assert "bfloat16, ms" in console.file.getvalue()
    assert ">4.50*" in console.file.getvalue()
    assert "120" in console.file.getvalue()


def test_json_of_a_result_without_measurement() -> None:
    report = TuningReport((result(512, {}, "a", source="default"),), elapsed_s=1.0)
    (shown,) = json.loads(report_as_json(report, DeviceKey("a machine", 2, {}), Path("tuning.json"), []))["results"]
    assert (shown["seconds"], shown["worst_over_best"]) == ({}, None)


def test_the_command_has_the_flags_that_were_promised() -> None:
    shown = CliRunner().invoke(app, ["tune", "--help"], env={"COLUMNS": "120"}).output
    promised = "--dtype --threads --deadline --force --export --import --json"
    assert [flag for flag in promised.split() if flag not in shown] == []


def test_the_flags_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[TuneRequest] = []
    monkeypatch.setattr(tune_module, "run_tune", asked.append)
    flags = "tune some/model --dtype float32 --threads 2 --deadline 7 --force --export a --import b --json"
    assert CliRunner().invoke(app, flags.split()).exit_code == 0
    assert CliRunner().invoke(app, ["tune"]).exit_code == 0
    assert asked == [
        TuneRequest(
            model="some/model",
            dtype="float32",
            num_threads=2,
            deadline_s=7.0,
            force=True,
            export_to=Path("a"),
            import_from=Path("b"),
            as_json=True,
        ),
        TuneRequest(model="smollm2-135m-instruct"),
    ]
