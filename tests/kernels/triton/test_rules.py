"""What surrounds the kernels: rules for candidates, tuning keys, counting of launches, ahead-of-time compilation."""

from __future__ import annotations

import contextlib
import ctypes
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.errors import PTXASError

from tandem.kernels.ops import Ops, PackedLinear, StepLayout
from tandem.kernels.triton import activation, attention, linear, tuning
from tandem.kernels.triton.backend import TritonOps
from tandem.kernels.triton.buffers import Buffers
from tandem.kernels.triton.device import ARCHITECTURES, Architecture, Tile, fits
from tandem.kernels.triton.graph import count_ops
from tandem.kernels.tuning import Candidate, CandidateUnavailable, Choices, TunableOps, TuningKey, TuningWorkload

CHIPS = [pytest.param(chip, id=f"sm_{chip.capability}") for chip in ARCHITECTURES.values()]
TYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_has_candidates_and_all_are_in_its_family(chip: Architecture, dtype: torch.dtype) -> None:
    for num_rows in (1, 2, 16, 64, 100, 8192):
        for num_splits in (1, 4):
            offered = linear.candidates(num_rows, num_splits, dtype, chip)
            assert len({one.name for one in offered}) == len(offered) > 0
            if dtype != torch.float32:
                assert all(one["block_m"] >= chip.min_rows for one in offered)
        assert activation.candidates(num_rows, dtype, chip)
    for head_dim in (32, 64, 80, 96, 128, 160, 256):
        for num_heads, num_kv_heads in ((9, 3), (8, 8), (64, 8), (71, 1)):
            heads = attention.Heads(num_heads, num_kv_heads, head_dim, dtype)
            for offered in (attention.decode_candidates(heads, chip), attention.prefill_candidates(heads, chip)):
                assert all(one["block_m"] >= heads.group for one in offered)
                assert len(offered) > 0


def test_a_candidate_that_does_not_fit_is_dropped() -> None:
    heads = attention.Heads(32, 8, 128, torch.bfloat16)
    large, small = ARCHITECTURES[90], ARCHITECTURES[86]
    deep = Candidate.of(block_m=64, num_warps=8, num_stages=9)
    assert not attention.fits(deep, heads, large)  # shared memory
    assert not attention.fits(Candidate.of(block_m=128, num_warps=4, num_stages=2), heads, large)  # registers
    assert not attention.fits(Candidate.of(block_m=64, num_warps=2, num_stages=2), heads, large)  # family
    tile = Tile(64, 128, 64, 8, 4)
    assert fits(tile, large, 2, sums=1, operands=2)
    assert not fits(tile, small, 2, sums=1, operands=2)  # shared memory
    assert not fits(Tile(128, 256, 64, 8, 2), large, 2, sums=2, operands=1)  # registers
    assert not fits(Tile(32, 64, 64, 4, 2), large, 2, sums=1, operands=1)  # family


@pytest.mark.parametrize(
    ("in_features", "out_features"), [(4096, 4096), (14336, 4096), (576, 960), (64, 64), (1000, 8)]
)
def test_splits_cover_the_inner_dimension_once(in_features: int, out_features: int) -> None:
    num_splits, length = linear.split_inner(in_features, out_features, 64)
    assert length % 64 == 0
    assert (num_splits - 1) * length < in_features <= num_splits * length


def workload(ops: Ops) -> TuningWorkload:
    weights: tuple[PackedLinear, ...] = tuple(
        ops.pack_linear(torch.zeros(64, 64), None) if kind == "linear" else ops.pack_gate_up(torch.zeros(96, 64), None)
        for kind in ("linear", "gate_up", "linear")
    )
    return TuningWorkload(weights, 6, 2, 32, 16, frozenset({None, 64}), "float32", 70, 8, 256)


def test_tunables_have_the_keys_that_ops_look_up(make_layout: Callable[..., StepLayout]) -> None:
    ops = TritonOps()
    assert isinstance(ops, TunableOps)
    tunables = {tunable.key: tunable for tunable in ops.tunables(workload(ops))}
    names = {key.op for key in tunables}
    assert names == {"linear", "gate_up_silu", "attention_decode", "attention_prefill"}
    asked: list[TuningKey] = []

    class Asked(Choices):
        def get(self, key: TuningKey) -> Candidate | None:
            asked.append(key)
            return tunables[key].candidates[-1]

    ops.use_choices(Asked({}))
    x = torch.zeros(70, 64)
    ops.linear(x, ops.pack_linear(torch.zeros(64, 64), None))
    ops.gate_up_silu(x, ops.pack_gate_up(torch.zeros(96, 64), None))
    for sequences in ([(1, 20)], [(3, 20), (2, 9)]):
        layout = make_layout(sequences, 16)
        cache = torch.zeros(9, 2, 1, 2, 16, 32)
        query = torch.zeros(layout.slots.shape[0], 6, 32)
        ops.paged_attention(query, cache, 0, ops.plan_step(layout, cache, 6), 1.0, 64)
    assert {key.op for key in asked} == names
    assert all(key in tunables for key in asked)


def test_a_gpu_is_known_by_its_name_and_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_version(place: Any) -> None:
        place._obj.value = 13010

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=get_version))
    key = tuning.device_key(torch.device("cuda", 0))
    assert (key.name, key.versions["driver"]) == ("NVIDIA H200", "13010")


@pytest.mark.parametrize("error", [PTXASError("no"), RuntimeError("PassManager::run failed")])
def test_a_candidate_that_does_not_compile_leaves_the_others(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """But a device that has failed fails all of them."""

    def run(candidate: Candidate, index: int) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(CandidateUnavailable):
        tuning._record(run, Candidate.of(a=1))

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tuning._record(run, Candidate.of(a=1))


def test_a_choice_that_is_not_offered_is_not_taken() -> None:
    """A cache file may come from another version."""
    ops = TritonOps()
    strange = Candidate.of(block_m=24, block_n=7, num_warps=3, num_stages=1)
    key = TuningKey("linear", "64x64", 1, "float32")
    ops.use_choices(Choices({key: strange}))
    ops.linear(torch.zeros(1, 64), ops.pack_linear(torch.zeros(64, 64), None))


class Counted:
    """Starts nothing: the interpreter would use torch itself."""

    num_launches = 0

    def __call__(self, kernel: object, grid: tuple[int, ...], arguments: tuple[object, ...], **meta: int) -> None:
        self.num_launches += 1


def test_kernels_are_counted_and_views_and_allocations_are_not() -> None:
    launch = Counted()
    ops = TritonOps(launch)
    x, weight = torch.ones(2, 64), torch.ones(64)

    def step() -> torch.Tensor:
        first = ops.rms_norm(x, weight, 1e-5)  # one
        total = first[:1].view(-1) + 1.0  # two
        return ops.rms_norm(total.view(1, 64), weight, 1e-5).unsqueeze(0)  # three

    result, num_ops = count_ops(step, launch)
    assert result.shape == (1, 1, 64)
    assert num_ops == 3


class FakeCuda:
    """As much of `torch.cuda` as recording needs: a graph replays by calling nothing. As in torch, a pool is given up
    when its last graph has gone, and fails when it is used again."""

    def __init__(self) -> None:
        self.pools: list[int] = []
        """Of each graph, in order."""
        self.streams: list[object] = []
        self.replays = 0
        self._live: list[int] = []

    def graph(
        self, graph: Any, pool: int | None = None, stream: object = None, capture_error_mode: str = "global"
    ) -> contextlib.AbstractContextManager[None]:
        assert pool is None or pool in self._live, "the pool is not alive"
        graph.pool_id = len(self.pools) if pool is None else pool
        self.pools.append(graph.pool_id)
        self._live.append(graph.pool_id)
        self.streams.append(stream)
        return contextlib.nullcontext()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda, zeros = self, torch.zeros

        class CUDAGraph:
            pool_id = -1

            def pool(self) -> int:
                return self.pool_id

            def replay(self) -> None:
                cuda.replays += 1

            def __del__(self) -> None:
                cuda._live.remove(self.pool_id)

        class Stream:
            def wait_stream(self, other: object) -> None:
                """Everything is done in order anyway."""

        fakes = {
            "is_available": lambda: True,
            "Stream": Stream,
            "current_stream": Stream,
            "stream": lambda _: contextlib.nullcontext(),
            "synchronize": lambda: None,
            "CUDAGraph": CUDAGraph,
            "graph": self.graph,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **more: zeros(*shape, **more))


def test_steps_run_once_before_they_are_recorded_and_share_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, ops, calls = FakeCuda(), TritonOps(Counted()), []
    cuda.install(monkeypatch)
    x, weight = torch.ones(2, 64), torch.ones(64)

    def step() -> torch.Tensor:
        calls.append(1)
        return ops.rms_norm(ops.rms_norm(x, weight, 1e-5), weight, 1e-5)

    first, second = ops.capture(step), ops.capture(step)
    assert first is not None
    assert second is not None
    assert len(calls) == 4
    assert len(set(cuda.pools)) == 1
    assert len(set(cuda.streams)) == 1, "memory is shared on one stream only"
    assert first.num_ops == second.num_ops == 2
    assert first.result is not second.result
    first.replay()
    assert (cuda.replays, len(calls)) == (1, 4)


def test_steps_can_be_recorded_anew_when_all_older_ones_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, ops = FakeCuda(), TritonOps(Counted())
    cuda.install(monkeypatch)
    x, weight = torch.ones(2, 64), torch.ones(64)
    for _ in range(2):
        captured = ops.capture(lambda: ops.rms_norm(x, weight, 1e-5))
        assert captured is not None
        del captured


def test_without_a_gpu_nothing_is_captured(ops: Ops) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert ops.capture(lambda: 1) is None
    assert ops.run(lambda: 1) == 1


def test_buffers_grow_and_what_they_outgrow_stays() -> None:
    buffers, cpu = Buffers(), torch.device("cpu")
    first = buffers.get("use", 100, torch.float32, cpu)
    assert buffers.get("use", 128, torch.float32, cpu) is first
    assert buffers.get("other", 1, torch.int32, cpu) is not first
    second = buffers.get("use", 129, torch.float32, cpu)
    assert second.numel() == 256
    assert torch.count_nonzero(second) == 0
    address = first.data_ptr()
    del first
    assert buffers.get("use", 1, torch.float32, cpu) is second
    assert torch.empty(128).data_ptr() != address


def test_kernels_compile_for_chips_that_are_not_here(tmp_path: Path) -> None:
    """One of each kind with matrix products, for one chip of each family; all candidates: see aot.py."""
    program = (
        "import sys\n"
        "from tandem.kernels.triton.aot import main\n"
        "status = [main(['--quick', '--arch', chip, '--op', op])\n"
        "    for chip, op in (('80', 'attention decode'), ('90', 'linear'), ('90', 'add_rms'), ('100', 'gate'))]\n"
        "sys.exit(max(status))\n"
    )
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if re.search(r"\| sm_", line)]
    families = {row[3].strip(): row[8].strip() for row in rows if "rms_norm" not in row[1]}
    assert families == {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}
    assert all(int(row[5]) == 0 and int(row[6]) <= int(row[7]) for row in rows)


def test_the_backend_is_imported_only_when_asked_for() -> None:
    program = "import sys, tandem.kernels.ops as ops; ops.load_ops('reference'); sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False).returncode == 0
