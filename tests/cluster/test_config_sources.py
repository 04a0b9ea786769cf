"""Flag over environment over file over default; unknown names are errors with a suggestion; secrets stay hidden."""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from tandem.cluster.config import ClusterConfig, load_settings
from tandem.cluster.config_sources import Setting, explain, layer, variable
from tandem.workers.errors import UserError


def load(flags: dict[str, Any] | None = None, file: Path | None = None, **environment: str) -> dict[str, Any]:
    """{field: (value, source)} of what was given or defaulted."""
    config, settings = load_settings({"model": "m"} | (flags or {}), file, environment)
    return {name.replace("-", "_"): (value, source) for name, value, source in explain(config, settings)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text("decode: 2\nport: 1000\nmax-model-len: 512  # a comment\nprefill-resources: {GPU: 1, prefill: 1}\n")
    return path


def test_each_source_wins_over_those_behind_it(file: Path) -> None:
    shown = load({"port": 3000}, file, TANDEM_PORT="2000", TANDEM_DECODE="3")
    assert shown["port"] == ("3000", "flag --port")
    assert shown["decode"] == ("3", "environment TANDEM_DECODE")
    assert shown["max_model_len"] == ("512", f"file {file}")
    assert shown["block_size"] == ("32", "default")


def a_text_of(kind: Any) -> tuple[str, Any]:
    """A text that the environment may hold for a setting of this type, and the value that it stands for."""
    kinds = [each for each in get_args(kind) if each is not type(None)] if get_origin(kind) is UnionType else [kind]
    if get_origin(kinds[0]) is Literal:
        value = get_args(kinds[0])[-1]
        return str(value), value
    known: dict[Any, tuple[str, Any]] = {
        str: ("words", "words"),
        int: ("7", 7),
        float: ("2.5", 2.5),
        bool: ("true", True),
        tuple[str, ...]: ("a,b", ("a", "b")),
        dict[str, float]: ("a=1,b=0.5", {"a": 1.0, "b": 0.5}),
    }
    return known[kinds[0]]


@pytest.mark.parametrize("field", ClusterConfig.__struct_fields__)
def test_every_setting_has_a_twin_in_the_environment(field: str) -> None:
    fields = get_type_hints(ClusterConfig)
    text, value = a_text_of(fields[field])
    settings = layer({}, {variable(field): text}, None, fields)
    assert settings == {field: Setting(value, f"environment {variable(field)}")}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "TANDEM_DECODES",
            "2",
            "TANDEM_DECODES in the environment is no setting of Tandem; did you mean TANDEM_DECODE",
        ),
        ("TANDEM_PORT", "http", "TANDEM_PORT in the environment cannot be used for --port: Expected `int`"),
        ("TANDEM_PREFILL_RESOURCES", "GPU", "'GPU' is not of the form NAME=AMOUNT"),
        ("TANDEM_PREFILL_RESOURCES", "GPU=one", "'GPU=one' is not of the form NAME=AMOUNT"),
        ("TANDEM_CLUSTER_KEY", "short", "--cluster-key must have at least 16 characters"),
    ],
)
def test_a_mistake_in_the_environment_is_named(name: str, text: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        load(**{name: text})
    assert message in str(raised.value)
    assert "short" not in str(raised.value)


def test_what_kubernetes_adds_for_services_is_no_mistake() -> None:
    links = {
        "TANDEM_PORT": "tcp://10.0.0.1:8000",
        "TANDEM_GATEWAY_SERVICE_HOST": "10.0.0.1",
        "TANDEM_GATEWAY_SERVICE_PORT_HTTP": "8000",
        "TANDEM_GATEWAY_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert load(**links)["port"] == ("8000", "default")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("decodes: 2", "unknown decodes; did you mean decode?"),
        ("zzz: 2", "unknown zzz; known are model, prefill"),
        ("decode: [", "is not valid YAML"),
        ("- decode", "must hold names and values"),
        ("prefill-resources: GPU", "--prefill-resources: 'GPU' is not of the form NAME=AMOUNT"),
        ("prefill-resources: {GPU: 0}", "--prefill-resources must be positive amounts"),
        ("worker-host: 0.0.0.0", "cannot be announced to others"),
        ("worker-host: eth0", "must be an address or a network"),
        ('worker-ports: "7400"', "must hold a port for each of 2 workers"),
        ("transfer-ports: 9-7", "must be a port or a range"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(content)
    with pytest.raises(UserError) as raised:
        load(file=path)
    assert message in str(raised.value)


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("# nothing yet\n")
    assert load(file=path)["decode"] == ("null", "default")


def test_secrets_are_never_shown() -> None:
    shown = str(
        load(TANDEM_API_KEY="secret", TANDEM_CLUSTER_KEY="secret" * 3, TANDEM_REDIS_URL="redis://u:secret@h:1/0")
    )
    assert "secret" not in shown
    assert "redis://u:***@h:1/0" in shown
    assert "http://t:***@h:4318" in str(load({"otlp_endpoint": "http://t:secret@h:4318"}))
    url = "redis+sentinel://u:secret@h:1,i:2/main?sentinel_password=secret&sentinel_username=s"
    shown = str(load(TANDEM_REDIS_URL=url))
    assert "secret" not in shown
    assert "redis+sentinel://u:***@h:1,i:2/main?sentinel_password=***&sentinel_username=s" in shown


def test_a_model_must_come_from_somewhere() -> None:
    with pytest.raises(UserError, match="MODEL is missing"):
        load_settings({}, None, {})
