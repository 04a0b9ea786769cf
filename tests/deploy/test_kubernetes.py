"""The manifests build, are valid to the last field, and name only what exists in the code."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from manifests import OVERLAYS, built, containers, custom_validator, environment, find, pod_specs, validate

from tandem.cluster.config import ClusterConfig, load_settings
from tandem.cluster.config_sources import OTHER_VARIABLES, variable
from tandem.cluster.network import port_range
from tandem.router.config import GatewayConfig
from tandem.router.gateway import Gateway

TANDEM_COMMAND = re.compile(r"\btandem (serve|gateway)((?: --[a-z-]+(?: [^ ;]+)?)*)")
RAY_PODS = {"tandem-head", "tandem-prefill", "tandem-decode"}
OUR_PODS = RAY_PODS | {"tandem-gateway", "tandem-redis"}


def settings(overlay: str, container: Any, folder: Path) -> ClusterConfig:
    """What a container's configuration comes to: the mounted file under its environment."""
    file = folder / "cluster.yaml"
    file.write_text(find(overlay, "ConfigMap", "tandem-config")["data"]["cluster.yaml"])
    given = environment(container)
    addresses = {name: value.replace("$(POD_IP)", "10.0.0.1") for name, value in given.items()}
    return load_settings({}, file, {name: value for name, value in addresses.items() if name.startswith("TANDEM_")})[0]


def launcher(overlay: str) -> Any:
    return next(each for _, each in containers(built(overlay)) if each["name"] == "launcher")


def gateway(overlay: str) -> Any:
    return next(each for _, each in containers(built(overlay)) if each["name"] == "gateway")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid_to_the_last_field(overlay: str) -> None:
    for thing in built(overlay):
        validate(thing)
    kinds = {thing["kind"] for thing in built(overlay)}
    assert {"RayCluster", "Deployment", "StatefulSet", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor"} <= kinds
    assert {"HorizontalPodAutoscaler", "InferencePool", "Service"} <= kinds


def test_a_misspelt_field_is_caught() -> None:
    deployment = copy.deepcopy(find("cpu", "Deployment", "tandem-gateway"))
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["readynessProbe"] = container.pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(deployment)
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        validate({"apiVersion": "apps/v1", "kind": "Deploymnet", "metadata": {"name": "x"}})
    monitor = copy.deepcopy(find("cpu", "PodMonitor", "tandem"))
    monitor["spec"]["podMetricsEndpoint"] = monitor["spec"]["podMetricsEndpoints"]
    with pytest.raises(jsonschema.ValidationError, match="podMetricsEndpoint"):
        validate(monitor)


@pytest.mark.parametrize("place", ["rayStartParam", "template.spec.containers.0.readynessProbe"])
def test_a_misspelt_field_of_a_custom_resource_is_caught(place: str) -> None:
    custom_validator("RayCluster")  # or skip
    cluster = copy.deepcopy(find("cpu", "RayCluster", "tandem"))
    *path, name = place.split(".")
    at: Any = cluster["spec"]["headGroupSpec"]
    for step in path:
        at = at[int(step) if step.isdigit() else step]
    at[name] = {}
    with pytest.raises(jsonschema.ValidationError, match=name):
        validate(cluster)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_settings_and_environment_exist(overlay: str, tmp_path: Path) -> None:
    known = {variable(field) for field in ClusterConfig.__struct_fields__} | OTHER_VARIABLES
    for _, container in containers(built(overlay)):
        if container["name"] in ("redis", "sentinel"):
            continue
        named = {name for name in environment(container) if name.startswith("TANDEM_")}
        assert named <= known
    for container in (launcher(overlay), gateway(overlay)):
        config = settings(overlay, container, tmp_path)
        assert config.address == "auto"
        assert config.metrics_compat == "vllm", "the endpoint picker's names"


def test_commands_and_their_flags_exist() -> None:
    import typer

    from tandem.cluster.cli import app

    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    seen = []
    for _, container in containers(built("gpu-rdma")):
        for command, flags in TANDEM_COMMAND.findall(" ".join(container.get("command", ()))):
            options = {option for parameter in known[command].params for option in parameter.opts}
            assert set(re.findall(r"--[a-z-]+", flags)) <= options
            seen.append(command)
    assert sorted(seen) == ["gateway", "serve"]


def test_parameters_of_ray_start_exist() -> None:
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in parameter.opts}
    spec = find("gpu", "RayCluster", "tandem")["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert {f"--{name}" for name in group["rayStartParams"]} <= known
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_worker_has_a_pod_to_be_placed_on(overlay: str, tmp_path: Path) -> None:
    config = settings(overlay, launcher(overlay), tmp_path)
    groups = {each["groupName"]: each for each in find(overlay, "RayCluster", "tandem")["spec"]["workerGroupSpecs"]}
    for role, count in zip(("prefill", "decode"), config.num_workers, strict=False):
        parameters = groups[role]["rayStartParams"]
        assert groups[role]["replicas"] == count
        assert count < getattr(config, f"{role}_max") <= groups[role]["maxReplicas"], "pods for a pool that grows"
        assert yaml.safe_load(yaml.safe_load(parameters["resources"])) == {role: 1}
        assert int(parameters["num-cpus"]) == config.worker_threads
        wanted = getattr(config, f"{role}_resources")
        assert wanted[role] == 1
        limits = groups[role]["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert wanted.get("GPU", 0) == limits.get("nvidia.com/gpu", 0) == int(parameters.get("num-gpus", "0"))
        assert (config.device == "cuda") == ("GPU" in wanted)


def test_ports_agree_with_the_configuration(tmp_path: Path) -> None:
    config = settings("cpu", gateway("cpu"), tmp_path)
    ports = {each["name"]: each["containerPort"] for each in gateway("cpu")["ports"]}
    assert ports == {"http": config.port, "admin": config.admin_port}
    assert find("cpu", "InferencePool", "tandem")["spec"]["targetPorts"] == [{"number": config.port}]
    worker = find("cpu", "RayCluster", "tandem")["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    first = {each["name"]: each["containerPort"] for each in worker["ports"]}
    assert first["protocol"] == port_range(config.worker_ports, "").start
    assert first["transfer"] == port_range(config.transfer_ports, "").start
    for role in ("prefill", "decode"):
        policy = find("cpu", "NetworkPolicy", f"tandem-{role}")["spec"]
        allowed = {
            (port["port"], port.get("endPort", port["port"])) for rule in policy["ingress"] for port in rule["ports"]
        }
        for text in (config.worker_ports, config.transfer_ports):
            named = port_range(text, "")
            assert (named.start, named.stop - 1) in allowed


def test_every_port_that_listens_is_allowed_in_and_nothing_else_is() -> None:
    objects = built("cpu")
    assert find("cpu", "NetworkPolicy", "default-deny")["spec"]["podSelector"] == {}
    for name, spec in pod_specs(objects):
        listening = {port["containerPort"] for each in spec["containers"] for port in each.get("ports", ())}
        policy = find("cpu", "NetworkPolicy", name)["spec"]
        allowed = [
            range(port["port"], port.get("endPort", port["port"]) + 1)
            for rule in policy["ingress"]
            for port in rule["ports"]
        ]
        assert all(any(port in each for each in allowed) for port in listening), name


def test_probes_ask_for_routes_that_exist() -> None:
    made = Gateway(GatewayConfig(model_name="m", tokenizer_folder=Path("/m"), max_model_len=8))
    public = {route.path for route in made._public_app().routes}
    admin = {route.path for route in made._admin_app().routes}
    for container in (launcher("cpu"), gateway("cpu")):
        ready, live = (container[f"{kind}Probe"]["httpGet"] for kind in ("readiness", "liveness"))
        assert ready["path"] != live["path"]
        for probe in (ready, live):
            assert probe["path"] in (public if probe["port"] == "http" else admin)
    (endpoint,) = find("cpu", "PodMonitor", "tandem")["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] in admin


def test_pods_live_long_enough_to_drain(tmp_path: Path) -> None:
    config = settings("cpu", gateway("cpu"), tmp_path)
    pods = dict(pod_specs(built("cpu")))
    pause = int(gateway("cpu")["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pods["tandem-gateway"]["terminationGracePeriodSeconds"] > pause + config.drain_timeout
    waits = {name: pods[name]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][2] for name in RAY_PODS}
    for name, wait in waits.items():  # for the launcher, which drains
        _, longest_s, *_ = wait.split()
        assert config.drain_timeout < int(longest_s) < pods[name]["terminationGracePeriodSeconds"]
    assert f":{config.admin_port}/live" in waits["tandem-head"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_may_more_than_it_must(overlay: str) -> None:
    names = set()
    for name, spec in pod_specs(built(overlay)):
        names.add(name)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False, "TANDEM_* of the environment are settings"
        for container in spec["containers"]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"]["drop"] == ["ALL"]
            is_pinning = overlay == "gpu-rdma" and container["name"] == "worker"
            assert rights["capabilities"].get("add", []) == (["IPC_LOCK"] if is_pinning else [])
            assert {"requests", "limits"} <= container["resources"].keys()
    assert names == OUR_PODS


def test_selectors_select_pods_that_exist() -> None:
    for thing in built("cpu"):
        selector = thing.get("spec", {}).get("selector")
        labels = {} if selector is None else selector.get("matchLabels", selector)
        if thing["kind"] in ("PodDisruptionBudget", "Service", "InferencePool") and "ray.io/cluster" not in labels:
            assert labels["app.kubernetes.io/name"] in OUR_PODS
    scaled = find("cpu", "HorizontalPodAutoscaler", "tandem-gateway")["spec"]
    assert find("cpu", scaled["scaleTargetRef"]["kind"], scaled["scaleTargetRef"]["name"])


def redis_scripts(overlay: str) -> dict[str, str]:
    scripts: dict[str, str] = find(overlay, "ConfigMap", "tandem-redis")["data"]
    return scripts


@pytest.mark.parametrize("overlay", ["cpu", "gpu-sentinel"])
def test_redis_gives_our_user_the_commands_in_use_and_no_others(overlay: str) -> None:
    from tandem.router.index.client import COMMANDS

    script = redis_scripts(overlay)["redis-start.sh"]
    (line,) = re.findall(r"^user tandem .*", script, re.MULTILINE)
    assert sorted(re.findall(r"\+([a-z|]+)", line)) == sorted(COMMANDS)
    assert "~pfx:* -@all" in line
    assert "user default off" in script


def test_sentinel_is_asked_where_it_listens(tmp_path: Path) -> None:
    """The URL is one that our client takes; the service, the port and the name in it exist."""
    from tandem.router.index.client import _sentinel_parts, check_redis_url

    (port,) = find("gpu-sentinel", "Service", "tandem-redis-sentinel")["spec"]["ports"]
    for container in (launcher("gpu-sentinel"), gateway("gpu-sentinel")):
        url = settings("gpu-sentinel", container, tmp_path).redis_url
        assert url is not None
        check_redis_url(url.replace("$(REDIS_PASSWORD)", "0123abcd"))
        sentinels, name, servers, own = _sentinel_parts(url)
        assert sentinels == [("tandem-redis-sentinel", port["port"])]
        assert f"sentinel monitor {name} " in redis_scripts("gpu-sentinel")["sentinel-start.sh"]
        assert servers["username"] == own["username"] == "tandem"
        assert servers["password"] == own["password"] == "$(REDIS_PASSWORD)"
    ray = find("gpu-sentinel", "RayCluster", "tandem")["spec"]["gcsFaultToleranceOptions"]
    assert ray["redisAddress"] == f"redis://tandem-redis-sentinel:{port['port']}"


def test_a_redis_of_three_finds_itself() -> None:
    stateful = find("gpu-sentinel", "StatefulSet", "tandem-redis")["spec"]
    assert find("gpu-sentinel", "Service", "tandem-redis")["spec"]["publishNotReadyAddresses"] is True
    names = [f"tandem-redis-{number}.{stateful['serviceName']}" for number in range(stateful["replicas"])]
    for container in stateful["template"]["spec"]["containers"]:
        given = environment(container)
        assert given["FIRST"] == f"{names[0]} 6379"
        assert given["SENTINELS"].split() == [f"{name}:26379" for name in names]
        assert given["ANNOUNCE_HOST"] == "$(POD_NAME).tandem-redis"
    disruption = find("gpu-sentinel", "PodDisruptionBudget", "tandem-redis")["spec"]
    assert stateful["replicas"] - disruption["maxUnavailable"] >= 2, "the quorum"
