"""Where each setting comes from: flag > environment > file > default. Unknown names are errors with a suggestion.

layer(flags, environment, file)  ->  {field: Setting(value, source)}     only what was given by somebody
explain(config, settings)        ->  one line per field for `tandem config --print`; secrets are never shown
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from tandem.workers.errors import UserError

ENVIRONMENT_PREFIX = "TANDEM_"
OTHER_VARIABLES = frozenset(
    f"TANDEM_{name}" for name in ("CONFIG", "CLUSTER_URL", "CACHE_DIR", "DATA_DIR", "CXX", "BENCH_STARTED_AGAIN")
)
"""Read elsewhere, so neither settings nor mistakes."""
SECRETS = frozenset({"api_key", "cluster_key"})
URLS = frozenset({"redis_url", "otlp_endpoint"})
"""They may hold a password, which is not shown."""
HIDDEN = "(set, not shown)"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as it was given, and by whom, in the words of a user: "flag --port", "environment TANDEM_PORT", ..."""

    value: Any
    source: str


def flag(field: str) -> str:
    """How the user writes a field on the command line."""
    return "MODEL" if field == "model" else f"--{field.replace('_', '-')}"


def variable(field: str) -> str:
    """The environment twin of a field."""
    return ENVIRONMENT_PREFIX + field.upper()


def layer(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None, fields: Mapping[str, Any]
) -> dict[str, Setting]:
    """What was given, the strongest source of each field. `fields` maps each known name to its type."""
    settings = {} if file is None else _from_file(file, fields)
    settings |= _from_environment(environment, fields)
    return settings | {name: _from_flag(name, value, fields) for name, value in flags.items()}


def suggest(name: str, known: Iterable[str]) -> str:
    """For the end of a message about an unknown name."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def shown(field: str, value: Any) -> str:
    """A value for people. What grants access is not shown."""
    if field in SECRETS and value:
        return HIDDEN
    if field in URLS and value:
        return without_password(str(value))
    return msgspec.json.encode(value).decode()


def without_password(url: str) -> str:
    """The same with `***` in its place."""
    parts = urlsplit(re.sub(r"(password=)[^&]*", r"\1***", url))
    if "@" not in parts.netloc:
        return urlunsplit(parts)
    user, _, _ = parts.netloc.rpartition("@")[0].partition(":")
    return urlunsplit(parts._replace(netloc=f"{user}:***@{parts.netloc.rpartition('@')[2]}"))


def explain(config: msgspec.Struct, settings: Mapping[str, Setting]) -> list[tuple[str, str, str]]:
    """(name, value, source) of every field, in the order of the record."""
    return [
        (
            field.replace("_", "-"),
            shown(field, getattr(config, field)),
            settings[field].source if field in settings else "default",
        )
        for field in config.__struct_fields__
    ]


def _from_flag(field: str, value: Any, fields: Mapping[str, Any]) -> Setting:
    if fields.get(field) == dict[str, float] and isinstance(value, str):
        try:
            value = parse_resources(value)
        except ValueError as error:
            raise UserError(f"{flag(field)}: {error}") from error
    return Setting(value, f"flag {flag(field)}")


def _from_environment(environment: Mapping[str, str], fields: Mapping[str, Any]) -> dict[str, Setting]:
    names = {variable(field): field for field in fields}
    settings = {}
    for name, text in environment.items():
        if not name.startswith(ENVIRONMENT_PREFIX) or name in OTHER_VARIABLES or text.startswith("tcp://"):
            continue  # tcp://: Kubernetes puts the addresses of services named tandem-* there
        if name in names:
            field = names[name]
            settings[field] = Setting(_parse(text, fields[field], name, field), f"environment {name}")
        elif not _is_service_link(name):
            raise UserError(f"{name} in the environment is no setting of Tandem{suggest(name, names)}")
    return settings


def _parse(text: str, kind: Any, name: str, field: str) -> Any:
    """The text of a variable as the type of its field. A list is separated by commas, a mapping is k=v,k=v."""
    try:
        return parse_text(text, kind)
    except (msgspec.ValidationError, ValueError) as error:
        said = "its value is not shown" if field in SECRETS else str(error)
        raise UserError(f"{name} in the environment cannot be used for {flag(field)}: {said}") from error


def parse_text(text: str, kind: Any) -> Any:
    """Raises `msgspec.ValidationError` or `ValueError`."""
    if text in ("", "null"):
        return msgspec.convert(None if text else "", kind, strict=False)
    if kind == tuple[str, ...]:
        return tuple(text.split(","))
    if kind == dict[str, float]:
        return parse_resources(text)
    return msgspec.convert(text, kind, strict=False)


def parse_resources(text: str) -> dict[str, float]:
    """`GPU=1,prefill=1` -> {"GPU": 1.0, "prefill": 1.0}. Raises `ValueError`."""
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    amounts = {}
    for name, equals, amount in pairs:
        try:
            amounts[name.strip()] = float(amount)
        except ValueError:
            raise ValueError(f"{name + equals + amount!r} is not of the form NAME=AMOUNT") from None
    return amounts


def _is_service_link(name: str) -> bool:
    return name.endswith(("_SERVICE_HOST", "_SERVICE_PORT")) or "_SERVICE_PORT_" in name or "_TCP_" in name


def _from_file(file: Path, fields: Mapping[str, Any]) -> dict[str, Setting]:
    """YAML, or TOML where the name says so, with the names of the flags written with - or _."""
    values = _read_file(file)
    settings = {}
    for name, value in values.items():
        field = str(name).replace("-", "_")
        if field not in fields:
            known = [each.replace("_", "-") for each in fields]
            hint = suggest(str(name).replace("_", "-"), known) or f"; known are {', '.join(known)}"
            raise UserError(f"--config {file}: unknown {name}{hint}")
        if fields[field] == dict[str, float] and isinstance(value, str):
            value = _parse_in_file(value, file, field)
        settings[field] = Setting(value, f"file {file}")
    return settings


def _parse_in_file(text: str, file: Path, field: str) -> dict[str, float]:
    try:
        return parse_resources(text)
    except ValueError as error:
        raise UserError(f"--config {file}: {flag(field)}: {error}") from error


def _read_file(file: Path) -> dict[str, Any]:
    kind = "TOML" if file.suffix == ".toml" else "YAML"
    try:
        content = file.read_bytes()
        values = tomllib.loads(content.decode()) if kind == "TOML" else msgspec.yaml.decode(content)
    except OSError as error:
        raise UserError(f"--config {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise UserError(f"--config {file} is not valid {kind}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(
            f"--config {file} must hold names and values, one per line, but holds a {type(values).__name__}"
        )
    return values
