"""Ray's launch files against Ray's own schema; the documented configuration; the image's recipe."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from manifests import DEPLOY, OVERLAYS, ROOT

from tandem.cluster.cli_operate import serve_command
from tandem.cluster.config import ClusterConfig, load_settings
from tandem.cluster.config_sources import OTHER_VARIABLES, variable
from tandem.cluster.config_template import template

RAY_FILES = ("local", "aws", "gcp")
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()


def ray_file(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / "ray" / f"{name}.yaml").read_text())
    return content


def ray_schema() -> Any:
    return json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())


@pytest.mark.parametrize("name", RAY_FILES)
def test_ray_up_takes_the_file(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    content = ray_file(name)
    jsonschema.Draft7Validator(ray_schema()).validate(content)
    validate_config(prepare_config(copy.deepcopy(content)))  # what `ray up` does with it first


@pytest.mark.parametrize("name", RAY_FILES)
def test_a_misspelt_key_is_caught(name: str) -> None:
    content = ray_file(name)
    content["file_mount"] = content.pop("file_mounts")
    with pytest.raises(jsonschema.ValidationError, match="file_mount"):
        jsonschema.Draft7Validator(ray_schema()).validate(content)


@pytest.mark.parametrize("name", RAY_FILES)
def test_commands_have_flags_that_ray_knows(name: str) -> None:
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in parameter.opts}
    known |= {option for parameter in start.params for option in parameter.secondary_opts}
    content = ray_file(name)
    for command in (*content["head_start_ray_commands"], *content["worker_start_ray_commands"]):
        if "ray start" in command:
            assert set(re.findall(r"(?<= )--[a-z-]+", command.partition("ray start")[2])) <= known
            assert "RAY_AUTH_MODE=token" in command


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_pools_have_machines_of_their_own(name: str) -> None:
    kinds = ray_file(name)["available_node_types"]
    assert kinds["head"]["resources"] == {"CPU": 0}
    for role in ("prefill", "decode"):
        assert kinds[role]["resources"][role] == 1
        assert kinds[role]["resources"]["GPU"] >= 1
        assert kinds[role]["max_workers"] > kinds[role]["min_workers"]
    assert kinds["prefill"]["node_config"] != kinds["decode"]["node_config"]


def test_the_documented_file_has_every_setting() -> None:
    written = (DEPLOY / "cluster.yaml").read_text()
    assert written == template(serve_command().params), "tandem config --template > deploy/cluster.yaml"
    names = set(re.findall(r"^#?([a-z-]+): ", written, re.MULTILINE))
    assert {field.replace("_", "-") for field in ClusterConfig.__struct_fields__} <= names


def test_the_documented_file_holds_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(re.sub(r"^#([a-z-]+: )", r"\1", (DEPLOY / "cluster.yaml").read_text(), flags=re.MULTILINE))
    config, settings = load_settings({}, file)
    assert len(settings) == len(ClusterConfig.__struct_fields__)
    assert config == ClusterConfig(model=config.model)


@pytest.mark.parametrize("overlay", [*OVERLAYS, "base"])
def test_mounted_files_are_valid(overlay: str) -> None:
    folder = DEPLOY / "k8s" / ("base" if overlay == "base" else f"overlays/{overlay}")
    if (folder / "cluster.yaml").exists():
        load_settings({}, folder / "cluster.yaml")


def test_the_image_is_made_of_what_is_here() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert {"requirements.lock", "pyproject.toml", "kernels", "workers", "router", "cluster"} <= set(sources)
    allowed = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in allowed, "otherwise it does not reach the build"
    assert re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE) == ["build", "runtime", "cpu", "cuda"]


def test_the_image_runs_as_nobody_special_and_tells_its_health() -> None:
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[2:]:
        users = re.findall(r"^USER (.+)$", stage, re.MULTILINE)
        assert not users or users[-1] == "10001:10001"
    assert "USER 10001:10001" in DOCKERFILE
    assert "/live" in DOCKERFILE.partition("\nHEALTHCHECK ")[2].partition("\nUSER")[0]
    known = {variable(field) for field in ClusterConfig.__struct_fields__} | OTHER_VARIABLES
    assert set(re.findall(r"\bTANDEM_[A-Z_]+", DOCKERFILE)) <= known


def test_the_image_pins_everything() -> None:
    lock = (DEPLOY / "docker" / "ray-default.lock").read_text().splitlines()
    pins = [line for line in lock if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin) for pin in pins)
    assert not re.search(r"https?://(?!127\.0\.0\.1)", DOCKERFILE)


def test_all_that_waits_to_be_asked_for_is_asked_for() -> None:
    """`make test-hosts` runs every file that does nothing without RUN_HOST_TESTS, and makes what they need."""
    folder = ROOT / "tests" / "deploy"
    gated = {file.name for file in folder.glob("test_*.py") if re.search(r'RUN_HOST_TESTS["] not in', file.read_text())}
    (listed,) = re.findall(r"^HOST_TESTS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(listed.split()) == gated
    assert re.search(r"^test-hosts:.* \.ray-default/\.installed", (ROOT / "Makefile").read_text(), re.MULTILINE)
