"""The manifests as objects, and schemas that refuse what they do not know."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = ("cpu", "gpu", "gpu-rdma", "gpu-sentinel")
KUBERNETES_VERSION = "1.32"
CRD_FILES = {"RayCluster": "kuberay_raycluster_v1.json", "InferencePool": "inferencepool_v1.json"}
"""In the data folder; the schema of PodMonitor is beside this file."""

Object = dict[str, Any]


@cache
def built(overlay: str) -> tuple[Object, ...]:
    """What `kubectl kustomize` makes of an overlay."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: it builds the overlays")
    done = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / "k8s" / "overlays" / overlay)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def find(overlay: str, kind: str, name: str) -> Object:
    """The one object of this kind and name (generated ones have a digest at its end)."""
    names = re.compile(rf"{name}(-[a-z0-9]{{10}})?")
    (found,) = (each for each in built(overlay) if each["kind"] == kind and names.fullmatch(each["metadata"]["name"]))
    return found


def pod_specs(objects: tuple[Object, ...]) -> Iterator[tuple[str, Object]]:
    """(label app.kubernetes.io/name, pod spec) of everything that makes pods."""
    for each in objects:
        spec = each.get("spec", {})
        templates = [spec["template"]] if "template" in spec else []
        if each["kind"] == "RayCluster":
            templates = [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
        for template in templates:
            yield template["metadata"]["labels"]["app.kubernetes.io/name"], template["spec"]


def containers(objects: tuple[Object, ...]) -> Iterator[tuple[str, Object]]:
    for name, spec in pod_specs(objects):
        for container in spec["containers"]:
            yield name, container


def environment(container: Object) -> dict[str, str]:
    """Its variables; those from elsewhere hold a word long enough for a key."""
    return {each["name"]: each.get("value", "from-elsewhere-1") for each in container.get("env", ())}


def data_file(name: str) -> Path:
    folder = Path(os.environ.get("TANDEM_DATA_DIR") or ROOT.parent / "shared" / "data")
    return folder / "schemas" / name


@cache
def custom_validator(kind: str) -> jsonschema.Draft7Validator:
    """Of a custom resource, closed. Skips where its schema is absent."""
    beside = Path(__file__).parent / "podmonitor_v1.json"
    path = beside if kind == "PodMonitor" else data_file(CRD_FILES[kind])
    if not path.exists():
        pytest.skip(f"no {path.name} in the data folder (TANDEM_DATA_DIR)")
    return jsonschema.Draft7Validator(closed(json.loads(path.read_text())))


def closed(schema: Any) -> Any:
    """The same schema, in which names that it does not list are refused."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


def validate(thing: Object) -> None:
    """Raises an error of jsonschema or kubernetes_validate when something is wrong or unknown."""
    if thing["kind"] in (*CRD_FILES, "PodMonitor"):
        custom_validator(thing["kind"]).validate(thing)
    else:
        kubernetes_validate.validate(thing, KUBERNETES_VERSION, strict=True)
