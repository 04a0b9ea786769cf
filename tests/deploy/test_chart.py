"""The Helm chart says what the overlays say: rendered here, by as much of Helm's language as the chart uses."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import shutil
from typing import Any

import pytest
import yaml
from manifests import DEPLOY, OVERLAYS, built

CHART = DEPLOY / "helm" / "tandem"
CHOICE = re.compile(r"\{\{- if (\.Values[\w.]+) \}\}(.*?)(?:\{\{- else \}\}(.*?))?\{\{- end \}\}", re.DOTALL)
ACTION = re.compile(r"( *)\{\{(-?) (.+?) \}\}")

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def merged(base: Any, over: Any) -> Any:
    """As Helm lays one file of values over another: null takes away."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    both = {name: merged(base.get(name), over[name]) if name in over else base[name] for name in {**base, **over}}
    return {name: value for name, value in both.items() if value is not None}


def value_of(expression: str, values: Any) -> Any:
    at = values
    for step in expression.removeprefix(".Values.").split("."):
        at = at[step]
    return at


def evaluated(action: str, values: Any) -> str:
    """One action of a template. Any form that is not known here fails the test."""
    form = re.fullmatch(r"toYaml (\.Values[\w.]+) \| nindent (\d+)", action)
    if form:
        text = yaml.safe_dump(value_of(form[1], values)).rstrip("\n")
        return "\n" + "\n".join(" " * int(form[2]) + line for line in text.splitlines())
    form = re.fullmatch(r"(\.Values[\w.]+)( \| quote)?( \| sha256sum \| trunc 10)?", action)
    assert form, f"the renderer does not know {action!r}"
    value = value_of(form[1], values)
    if form[3]:
        return hashlib.sha256(value.encode()).hexdigest()[:10]
    return json.dumps(value) if form[2] else str(value)


def render(overlay: str) -> list[Any]:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    if overlay != "cpu":
        values = merged(values, yaml.safe_load((CHART / f"values-{overlay}.yaml").read_text()))

    def replace(match: re.Match[str]) -> str:
        return ("" if match[2] else match[1]) + evaluated(match[3], values)

    objects = []
    for path in sorted((CHART / "templates").glob("*.yaml")):
        text = re.sub(r"\n( *\{\{-)", r"\1", path.read_text())  # {{- takes the line break before it, too
        text = CHOICE.sub(lambda match: match[2] if value_of(match[1], values) else match[3] or "", text)
        objects += [each for each in yaml.safe_load_all(ACTION.sub(replace, text)) if each]
    return objects


def comparable(objects: Any) -> dict[str, Any]:
    """By kind and name; without the namespace, and with the digest of the configuration taken from its name."""
    text = re.sub(r"tandem-config-[a-z0-9]{10}", "tandem-config", json.dumps(list(objects)))
    found = {}
    for each in json.loads(text):
        each["metadata"].pop("namespace", None)
        found[f"{each['kind']} {each['metadata']['name']}"] = each
    found.pop("Namespace tandem", None)
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_chart_renders_to_what_the_overlay_builds(overlay: str) -> None:
    assert comparable(render(overlay)) == comparable(built(overlay))


def test_the_chart_is_as_the_script_makes_it() -> None:
    made = runpy.run_path(str(DEPLOY / "helm" / "make_chart.py"))["make"]()
    there = {str(path.relative_to(CHART)) for path in CHART.rglob("*.yaml")} - {"Chart.yaml"}
    assert there == set(made)
    for path, content in made.items():
        assert (CHART / path).read_text() == content, "run make_chart.py"
