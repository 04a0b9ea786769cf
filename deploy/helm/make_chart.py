"""Writes the chart beside this file from the kustomize overlays: `python deploy/helm/make_chart.py`. Needs kubectl.

The templates are the objects of the overlay `cpu`, in which what may differ is asked of the values; those that the
component `sentinel` brings or changes are there in both forms, by `redis.sentinel`. values.yaml holds what that overlay
has there, values-*.yaml what the others have. So there is one source, and a test renders the chart and compares it with
each overlay.
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
VALUES_FILES = {
    "cpu": "values.yaml",
    "gpu": "values-gpu.yaml",
    "gpu-rdma": "values-gpu-rdma.yaml",
    "gpu-sentinel": "values-gpu-sentinel.yaml",
}
SENTINEL = "gpu-sentinel"
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
    redis_url = ("env", 8, "value"), ("env", 10, "value")
    yield "Deployment", "tandem-gateway", (*gateway, *redis_url[0]), "redis.url"
    yield "RayCluster", "tandem", (*head, 1, *redis_url[1]), "redis.url"
    yield "RayCluster", "tandem", ("spec", "gcsFaultToleranceOptions", "redisAddress"), "redis.rayAddress"
    yield "StatefulSet", "tandem-redis", (*gateway, "image"), "redis.image"
    yield "StatefulSet", "tandem-redis", ("spec", *POD, "containers", 1, "image"), "redis.image"
    yield "StatefulSet", "tandem-redis", (*gateway, "resources"), "redis.resources"
    yield "PersistentVolumeClaim", "tandem-models", ("spec", "resources"), "models.resources"
    yield "ConfigMap", "tandem-config", ("data", "cluster.yaml"), "clusterConfig"


def build(overlay: str) -> list[Object]:
    """The overlay's objects without the namespace, which a chart is installed into."""
    command = ["kubectl", "kustomize", str(OVERLAYS / overlay)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [each for each in yaml.safe_load_all(text) if each["kind"] != "Namespace"]


def name_of(thing: Object) -> tuple[str, str]:
    """(kind, name), without the digest of what a ConfigMap holds."""
    return thing["kind"], re.sub(r"-[a-z0-9]{10}$", "", thing["metadata"]["name"])


def parent_of(objects: list[Object], place: Place) -> Any:
    """What holds the value there; None if nothing does."""
    kind, name, path, _ = place
    (at,) = (each for each in objects if name_of(each) == (kind, name))
    for step in path[:-1]:
        if isinstance(step, int) and step >= len(at):
            return None
        at = at[step]
    return at


def values_of(objects: list[Object]) -> Object:
    values: Object = {}
    for place in places():
        holder = parent_of(objects, place)
        if holder is None:
            continue
        *parents, last = place[3].split(".")
        at = values
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = holder[place[2][-1]]
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


def templates(objects: list[Object], with_sentinel: list[Object]) -> dict[str, str]:
    """File name -> text, one file per kind."""
    plain, other = _texts(objects), _texts(with_sentinel)
    files: dict[str, str] = {}
    for name in {**plain, **other}:
        file = f"{name[0].lower()}.yaml"
        files.setdefault(file, HEAD)
        files[file] += _in_both_forms(plain.get(name, ""), other.get(name, ""))
    return files


def _texts(objects: list[Object]) -> dict[tuple[str, str], str]:
    """By kind and name: each as a template."""
    objects = copy.deepcopy(objects)
    for place in places():
        holder, last = parent_of(objects, place), place[2][-1]
        if holder is not None:
            holder[last] = f"<<{place[3]}>>" if isinstance(holder[last], str | int) else f"<<yaml {place[3]}>>"
    for each in objects:
        each["metadata"].pop("namespace", None)
    return {
        name_of(each): "---\n" + _with_actions(yaml.safe_dump(_renamed(each), sort_keys=False, width=1000))
        for each in objects
    }


def _in_both_forms(plain: str, with_sentinel: str) -> str:
    if plain == with_sentinel:
        return plain
    otherwise = f"{{{{- else }}}}\n{plain}" if plain else ""
    return f"{{{{- if .Values.redis.sentinel }}}}\n{with_sentinel}{otherwise}{{{{- end }}}}\n"


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
    for overlay in VALUES_FILES:
        values[overlay]["redis"]["sentinel"] = overlay == SENTINEL
    files = {f"templates/{name}": text for name, text in templates(built["cpu"], built[SENTINEL]).items()}
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
