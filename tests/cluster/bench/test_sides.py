"""Sides as processes: the protocol, taking turns, failures, and a whole run between scripted engines."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from tandem.cluster.bench import engine
from tandem.cluster.bench.cli import bench_app
from tandem.cluster.bench.cpu_use import cpu_use
from tandem.cluster.bench.engine import EngineOptions, bench_engine
from tandem.cluster.bench.engine_figures import Decode, Prefill
from tandem.cluster.bench.sides import Side, SideFailed, SideSpec, parse_against
from tandem.workers.errors import UserError
from tandem.workers.models.config import ModelConfig, RopeConfig

SCRIPTED = Path(__file__).with_name("scripted_peer.py")
Start = Callable[[str], Side]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    core = min(os.sched_getaffinity(0))

    def start_one(variant: str) -> Side:
        spec = SideSpec(variant, sys.executable, SCRIPTED, variant)
        side = Side(spec, ["--cores", str(core)], {"OMP_NUM_THREADS": "1"}, tmp_path / f"{variant}.log")
        return stack.enter_context(side)

    with ExitStack() as stack:
        yield start_one


def process_of(side: Side) -> psutil.Process:
    return psutil.Process(side._process.pid)


def wait_stopped(side: Side) -> None:
    """A signal takes a moment to arrive."""
    deadline = time.monotonic() + 10
    while process_of(side).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_side_is_pinned_has_its_environment_and_is_stopped_between_commands(start: Start) -> None:
    side = start("one")
    ready = side.wait_ready()
    assert ready["adapter"] == "scripted_peer"
    wait_stopped(side)
    about = side.measure({"measure": "about"})
    assert about.body == {"cores": [min(os.sched_getaffinity(0))], "scripted": "one", "threads": "1"}
    wait_stopped(side)
    reply = side.measure({"measure": "decode", "streams": 8, "steps": 3})
    assert reply.body["seconds"] == [0.008] * 3
    assert reply.error is None


def test_an_error_is_an_answer_and_the_side_goes_on(start: Start) -> None:
    side = start("one")
    side.wait_ready()
    assert side.measure({"measure": "fail"}).error == "ValueError: not today"
    assert side.measure({"measure": "decode", "streams": 2}).error is None


def test_a_side_s_own_work_is_not_counted_as_others(start: Start) -> None:
    side = start("one")
    side.wait_ready()
    before = cpu_use(side._process.pid)
    reply = side.measure({"measure": "burn", "seconds": 0.3})
    after = cpu_use(side._process.pid)
    assert after.own_s - before.own_s >= 0.25  # the counts tick every 10 ms
    assert after.busy_s - before.busy_s >= 0.25
    assert reply.others >= 0.0


def test_failures_name_the_side_and_its_last_words(start: Start) -> None:
    with pytest.raises(SideFailed, match=r"^no-start ended: cannot be loaded, sorry$"):
        start("no-start").wait_ready()
    dying = start("dies")
    dying.wait_ready()
    with pytest.raises(SideFailed, match="dies ended: killed by a bad prompt"):
        dying.measure({"measure": "prefill"})


def test_closing_ends_a_stopped_side(start: Start) -> None:
    side = start("one")
    side.wait_ready()
    process = process_of(side)
    side.close()
    assert not process.is_running()


def test_a_stopped_side_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """Even one that is killed, and so closes nothing."""
    text = (
        "import sys, time; from pathlib import Path; from tandem.cluster.bench.sides import Side, SideSpec\n"
        f"spec = SideSpec('one', sys.executable, Path({str(SCRIPTED)!r}), 'one')\n"
        f"side = Side(spec, [], {{'OMP_NUM_THREADS': '1'}}, Path({str(tmp_path / 'log')!r}))\n"
        "side.wait_ready(); print(side._process.pid, flush=True); time.sleep(60)\n"
    )
    parent = psutil.Popen([sys.executable, "-P", "-c", text], stdout=-1, text=True)
    side = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    parent.stdout.close()
    side.wait(10)


def test_against(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp_peer.py").touch()
    assert parse_against("llama.cpp", tmp_path) == SideSpec(
        "llama.cpp", sys.executable, tmp_path / "llama_cpp_peer.py", ""
    )
    spec = parse_against(f"llama-cpp:q4_1={sys.executable}", tmp_path)
    assert (spec.name, spec.variant, spec.adapter.name) == ("llama-cpp:q4_1", "q4_1", "llama_cpp_peer.py")
    with pytest.raises(UserError, match=r"--against vllm: no .*vllm_peer.py; there are: llama_cpp"):
        parse_against("vllm", tmp_path)
    with pytest.raises(UserError, match="is not a Python"):
        parse_against("llama.cpp=/no/where", tmp_path)


@pytest.fixture
def scripted_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Takes the place of our own adapters: a side called tandem that is scripted, and limits that are known."""
    (tmp_path / "limits_side.py").write_text(
        "def load(options):\n    return lambda command: {'rates': {'a': 1e9, 'b': 2e9}}\n"
    )
    ours = "def load(options):\n    def measure(command):\n"
    ours += "        if command['measure'] == 'loop':\n"
    ours += "            return {'step': 2.0, 'schedule': 0.1, 'host': 0.1, 'apply': 0.1, 'execute': 1.8}\n"
    ours += "        return {'seconds': [0.001]}\n    return measure\n"
    (tmp_path / "tandem_side.py").write_text(ours)
    monkeypatch.setattr(engine, "_FOLDER", tmp_path)
    return tmp_path


def test_a_whole_run_rotates_its_sides_and_drops_those_that_end(scripted_folder: Path, tmp_path: Path) -> None:
    config = ModelConfig("llama", 10, 4, 6, 3, 2, 1, 5, 1e-5, 64, True, RopeConfig(theta=1e4))
    peers = tuple(SideSpec(name, sys.executable, SCRIPTED, name) for name in ("peer", "dies", "no-start"))
    options = EngineOptions(
        model="tiny",
        folder=tmp_path,
        config=config,
        threads=(1,),
        decodes=(Decode(2, 16),),
        prefills=(Prefill(32),),
        rounds=3,
        steps=2,
        peers=peers,
        seed=5,
    )
    said: list[str] = []
    (report,) = bench_engine(options, tmp_path, said.append)
    rows = {(row.workload.label, row.side): row for row in report.rows}
    assert rows["decode, 2 x 16", "peer"].seconds == (0.002,) * 3
    assert rows["prefill, 32", "peer"].seconds == (0.25,) * 3
    assert rows["decode, 2 x 16", "dies"].error == "ended in mid-run"
    assert rows["prefill, 32", "tandem"].seconds == (0.001,) * 3
    assert sorted(report.failures) == [
        "dies ended: killed by a bad prompt",
        "no-start ended: cannot be loaded, sorry",
    ]
    assert report.limits.best_bandwidth == 2e9
    assert report.loop is not None
    assert report.loop.overhead == pytest.approx(0.15)
    turns = [line.split()[-1] for line in said if "decode" in line]
    assert turns == ["tandem", "peer", "dies", "peer", "tandem", "tandem", "peer"]


def test_prompts_are_fresh_each_round_and_contexts_are_not() -> None:
    config = ModelConfig("llama", 10, 4, 6, 3, 2, 1, 5, 1e-5, 64, True, RopeConfig(theta=1e4))
    options = EngineOptions(model="tiny", folder=Path(), config=config, threads=(1,), seed=5)
    prefills = [engine._command(Prefill(32), options, number)["seed"] for number in range(3)]
    decodes = [engine._command(Decode(2, 16), options, number)["seed"] for number in range(3)]
    assert len(set(prefills)) == 3
    assert len(set(decodes)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--streams", "1,x"], "--streams must be numbers of at least 1"),
        (["--prefill", "0"], "--prefill must be numbers of at least 1"),
        (["--against", "nobody"], "--against nobody: no "),
        (["random:qwen9"], "no such shape"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(bench_app, ["engine", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
