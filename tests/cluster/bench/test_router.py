"""`tandem bench router`, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cluster.bench.cli import bench_app
from tandem.cluster.bench.router import RouterBenchOptions, bench_router
from tandem.cluster.bench.router_cli import FAULT_HEADINGS, HEADINGS, cells, fault_cells, to_json
from tandem.cluster.bench.router_faults import FAULTS, RECOVERY_S, bench_faults
from tandem.router.policy import POLICIES, PolicyName


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_every_case_is_measured(policy: PolicyName) -> None:
    options = RouterBenchOptions(
        num_workers=(1, 5), prompt_tokens=(40, 640), num_blocks=300, num_decisions=4, budget_s=5.0, policy=policy
    )
    told: list[str] = []
    report = await bench_router(options, told.append)
    assert [(case.num_workers, case.prompt_tokens) for case in report.cases] == [(1, 40), (1, 640), (5, 40), (5, 640)]
    assert len(told) == 5
    assert report.index_bytes > 0
    for case in report.cases:
        assert 0 < case.hash_s < case.wall_p99_s
        assert 0 < case.policy_s < case.wall_p99_s
        assert case.wall_p50_s <= case.wall_p99_s
        assert case.server_cpu_s > 0  # it was really asked
        assert case.share_late == 0
        assert case.cores_at_rate == pytest.approx(99 * case.cpu_mean_s)
        assert 0 < case.cpu_least_s <= case.cpu_p50_s
        assert case.others >= 0
        assert len(cells(case)) == len(HEADINGS)
    assert len(json.loads(to_json(report))["cases"]) == 4


def test_command_line(tmp_path: Path) -> None:
    file = tmp_path / "router.json"
    arguments = ["router", "--workers", "2", "--tokens", "64", "--blocks", "0", "--decisions", "2"]
    done = CliRunner().invoke(bench_app, [*arguments, "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert json.loads(file.read_bytes())["cases"][0]["num_workers"] == 2


@pytest.mark.parametrize("numbers", ["", "0", "a", "1,,2", "-3"])
def test_numbers_must_be_numbers(numbers: str) -> None:
    done = CliRunner().invoke(bench_app, ["router", f"--workers={numbers}"])
    assert done.exit_code == 2
    assert "--workers must be numbers" in done.output


async def test_every_fault_is_met_and_overcome() -> None:
    """No times are judged here: a look-up may take as long as it likes."""
    options = RouterBenchOptions(num_workers=(4,), prompt_tokens=(640,), num_blocks=300, budget_s=0.02)
    told: list[str] = []
    cases = await bench_faults(options, told.append, window_s=0.3)
    assert [case.fault for case in cases] == list(FAULTS)
    for case in cases:
        assert case.healthy.count > 0
        assert case.under_fault.count > 0
        assert 0 < case.recovery_s < RECOVERY_S
        assert len(fault_cells(case)) == len(FAULT_HEADINGS)
    held_up = {case.fault: case.share_late for case in cases}
    assert held_up["black hole"] > 0
    assert held_up["2 s latency"] > 0
    assert f"round 1: {FAULTS[0]}" in told
