"""Writes the chart beside this file from the kustomize overlays: `python deploy/helm/make_chart.py`. Needs kubectl.

The templates are the objects of the overlay `cpu`, in which what may differ is asked of the values. values.yaml holds
what that overlay has there, values-gpu.yaml and values-gpu-rdma.yaml what the others have. So there is one source, and
a test renders the chart and compares it with each overlay.
"""

from __future__ import annotations

import copy
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "tandem"
OVERLAYS = Path(__file__).parents[1] / "k8s" / "overlays"
VALUES_FILES = {"cpu": "values.yaml", "gpu": "values-gpu.yaml", "gpu-rdma": "values-gpu-rdma.yaml"}
CONFIG_NAME = re.compile(r"tandem-config-[a-z0-9]{10}$")
HEAD = "# Made by deploy/helm/make_chart.py from deploy/k8s: change it there.\n"

Object = dict[str, Any]
Place = tuple[str, str, tuple[str | int, ...], str]

POD = ("template", "spec")
CONTAINER = (*POD, "containers", 0)
IN_GROUP: dict[str, tuple[str | int, ...]] = {
    "replicas": ("replicas",),
    "minReplicas": ("minReplicas",),
    "maxReplicas": ("maxReplicas",),
    "rayStartParams": ("rayStartParams",),
    "nodeSelector": (*POD, "nodeSelector"),
    "tolerations": (*POD, "tolerations"),
    "image": (*CONTAINER, "image"),
    "env": (*CONTAINER, "env"),
    "resources": (*CONTAINER, "resources"),
    "securityContext": (*CONTAINER, "securityContext"),
}


def places() -> Iterator[Place]:
    """(kind, name, path, name in the values) of everything that a user may set."""
    for index, role in enumerate(("prefill", "decode")):
        for name, path in IN_GROUP.items():
            yield "RayCluster", "tandem", ("spec", "workerGroupSpecs", index, *path), f"{role}.{name}"
    head = ("spec", "headGroupSpec", *POD, "containers")
    for index, name in enumerate(("head", "launcher")):
        yield "RayCluster", "tandem", (*head, index, "image"), f"{name}.image"
        yield "RayCluster", "tandem", (*head, index, "resources"), f"{name}.resources"
    gateway = ("spec", *POD, "containers", 0)
    yield "Deployment", "tandem-gateway", ("spec", "replicas"), "gateway.replicas"
    yield "Deployment", "tandem-gateway", (*gateway, "image"), "gateway.image"
    yield "Deployment", "tandem-gateway", (*gateway, "resources"), "gateway.resources"
    yield "HorizontalPodAutoscaler", "tandem-gateway", ("spec", "minReplicas"), "gateway.minReplicas"
    yield "HorizontalPodAutoscaler", "tandem-gateway", ("spec", "maxReplicas"), "gateway.maxReplicas"
    yield "StatefulSet", "tandem-redis", (*gateway, "image"), "redis.image"
    yield "StatefulSet", "tandem-redis", (*gateway, "resources"), "redis.resources"
    yield "PersistentVolumeClaim", "tandem-models", ("spec", "resources"), "models.resources"
    yield "ConfigMap", "tandem-config", ("data", "cluster.yaml"), "clusterConfig"


def build(overlay: str) -> list[Object]:
    """The overlay's objects without the namespace, which a chart is installed into."""
    command = ["kubectl", "kustomize", str(OVERLAYS / overlay)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [each for each in yaml.safe_load_all(text) if each["kind"] != "Namespace"]


def find(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = (each for each in objects if each["kind"] == kind and each["metadata"]["name"].startswith(name))
    return found


def values_of(objects: list[Object]) -> Object:
    values: Object = {}
    for kind, name, path, key in places():
        value: Any = find(objects, kind, name)
        for step in path:
            value = value[step]
        *parents, last = key.split(".")
        at = values
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    return values


def difference(values: Object, base: Object) -> Object:
    """What must be said beside `base` to get `values`. Helm merges mappings; a key that is gone is said as null."""
    said: Object = {}
    for name in {**base, **values}:
        if name not in values:
            said[name] = None
        elif isinstance(values[name], dict) and isinstance(base.get(name), dict):
            inner = difference(values[name], base[name])
            if inner:
                said[name] = inner
        elif values[name] != base.get(name):
            said[name] = values[name]
    return said


def templates(objects: list[Object]) -> dict[str, str]:
    """File name -> text, one file per kind."""
    objects = copy.deepcopy(objects)
    for kind, name, path, key in places():
        at: Any = find(objects, kind, name)
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = f"<<{key}>>" if isinstance(at[path[-1]], str | int) else f"<<yaml {key}>>"
    files: dict[str, str] = {}
    for each in objects:
        each["metadata"].pop("namespace", None)
        text = yaml.safe_dump(_renamed(each), sort_keys=False, width=1000)
        files.setdefault(f"{each['kind'].lower()}.yaml", HEAD)
        files[f"{each['kind'].lower()}.yaml"] += "---\n" + _with_actions(text)
    return files


def _renamed(value: Any) -> Any:
    """The configuration's name changes with its content here as well."""
    if isinstance(value, dict):
        return {name: _renamed(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each) for each in value]
    return "<<config-name>>" if isinstance(value, str) and CONFIG_NAME.match(value) else value


def _with_actions(text: str) -> str:
    text = text.replace("<<config-name>>", "tandem-config-{{ .Values.clusterConfig | sha256sum | trunc 10 }}")
    text = re.sub(
        r"^( *)((?:- )?[\w.-]+): <<yaml ([\w.]+)>>$",
        lambda m: f"{m[1]}{m[2]}:\n{m[1]}  {{{{- toYaml .Values.{m[3]} | nindent {len(m[1]) + 2} }}}}",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r": <<([\w.]*[rR]eplicas)>>", r": {{ .Values.\1 }}", text)
    return re.sub(r": <<([\w.]+)>>", r": {{ .Values.\1 | quote }}", text)


def make() -> dict[str, str]:
    """Path below the chart -> content."""
    built = {overlay: build(overlay) for overlay in VALUES_FILES}
    values = {overlay: values_of(objects) for overlay, objects in built.items()}
    files = {f"templates/{name}": text for name, text in templates(built["cpu"]).items()}
    for overlay, name in VALUES_FILES.items():
        said = values[overlay] if overlay == "cpu" else difference(values[overlay], values["cpu"])
        files[name] = HEAD + yaml.dump(said, Dumper=_Dumper, sort_keys=False, width=1000)
    return files


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as such."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


if __name__ == "__main__":
    for path, content in make().items():
        (CHART / path).write_text(content)
