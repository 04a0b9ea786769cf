"""Boards, rules and scalers ask for metrics that the code exports; the rules say what they mean."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import DEPLOY, ROOT, find

from tandem.router.metrics import RouterMetrics
from tandem.workers.types import BlockCounts, WorkerSnapshot

DASHBOARDS = DEPLOY / "dashboards"
METRIC = re.compile(r"\b(?:tandem|vllm)[_:][a-z0-9_:]+")


def exported() -> set[str]:
    """Every name that /metrics can show: the gateway's own, and what workers count."""
    blocks = BlockCounts(total=1, free=1, cached=0, used=0, incoming=0, quarantined=0)
    snapshot = WorkerSnapshot(
        worker_id="w", epoch=0, role="decode", pid=1, blocks=blocks, num_running=0, num_waiting=0,
        num_waiting_tokens=0, max_model_len=1,
    )  # fmt: skip
    metrics = RouterMetrics(lambda: [snapshot])
    metrics.add_usual_names("m")
    metrics.add_control_plane(lambda: 1.0)
    metrics.add_prefix_index(lambda: 1.0)
    names = set()
    for line in metrics.render().decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            names |= {name} if kind != "histogram" else {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    counted = "".join(path.read_text() for path in (ROOT / "workers").rglob("*.py"))
    found = re.findall(r'metrics\.count\(\s*"([a-z_]+)"', counted) + re.findall(r"f'([a-z_]+)\{\{role=", counted)
    return names | {f"tandem_{name}" for name in found}


def rules() -> list[dict[str, Any]]:
    content = yaml.safe_load((DASHBOARDS / "rules.yaml").read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


def names_in(expression: str) -> set[str]:
    return set(METRIC.findall(re.sub(r'"[^"]*"', "", expression)))


def test_boards_are_as_the_script_makes_them() -> None:
    made = runpy.run_path(str(DASHBOARDS / "make_dashboards.py"))
    assert {path.stem for path in DASHBOARDS.glob("*.json")} == set(made["BOARDS"])
    for name in made["BOARDS"]:
        assert (DASHBOARDS / f"{name}.json").read_text() == made["render"](name), "run make_dashboards.py"


def test_every_metric_that_is_asked_for_is_exported() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    expressions = [rule["expr"] for rule in rules()]
    for path in DASHBOARDS.glob("*.json"):
        panels = json.loads(path.read_text())["panels"]
        expressions += [target["expr"] for panel in panels for target in panel["targets"]]
    asked = set().union(*(names_in(expression) for expression in expressions))
    assert len(asked) > 20
    assert asked - recorded - exported() == set()


def test_every_metric_is_on_a_board_or_in_a_rule() -> None:
    shown = set().union(*(names_in(rule["expr"]) for rule in rules()))
    for path in DASHBOARDS.glob("*.json"):
        panels = json.loads(path.read_text())["panels"]
        shown |= {name for panel in panels for target in panel["targets"] for name in names_in(target["expr"])}
    parts = re.compile(r"_(bucket|sum|count)$")
    ours = {parts.sub("", name) for name in exported() if name.startswith("tandem_") and not name.endswith("_created")}
    assert ours - {parts.sub("", name) for name in shown} == {"tandem_requests_started_total"}, "= ended + in flight"


def test_the_scaler_asks_for_a_metric_of_gateways() -> None:
    (metric,) = find("cpu", "HorizontalPodAutoscaler", "tandem-gateway")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in exported()


def test_the_endpoint_picker_finds_its_names() -> None:
    assert {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"} <= exported()


def test_every_alert_is_in_the_runbook() -> None:
    runbook = (DEPLOY / "README.md").read_text()
    alerts = [rule["alert"] for rule in rules() if "alert" in rule]
    assert [alert for alert in alerts if f"`{alert}`" not in runbook] == []
    assert set(re.findall(r"`(Tandem[A-Z][A-Za-z]+)`", runbook)) == set(alerts)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's prometheus) is not installed")
def test_rules_are_valid_and_fire_when_they_should(tmp_path: Path) -> None:
    file = DASHBOARDS / "rules.yaml"
    promtool("check", "rules", str(file))
    scenario = tmp_path / "rules_test.yaml"
    scenario.write_text((Path(__file__).parent / "rules_test.yaml").read_text().replace("RULES", str(file)))
    promtool("test", "rules", str(scenario))


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
