"""The unit for systemd starts a command that exists, and gives it the time that it takes to stop."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from configparser import ConfigParser
from typing import Any

import pytest
import typer
from manifests import DEPLOY

from tandem.cluster.app import STOP_S
from tandem.cluster.cli import app
from tandem.cluster.config import ClusterConfig

UNIT = DEPLOY / "systemd" / "tandem.service"


def service() -> Any:
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    return unit["Service"]


def test_the_command_exists() -> None:
    _, command, *arguments = shlex.split(service()["ExecStart"])
    known = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    options = {option for parameter in known.params for option in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("-")} <= options


def test_it_may_drain_and_is_started_again() -> None:
    assert (service()["KillMode"], service()["Restart"]) == ("mixed", "always")
    assert int(service()["TimeoutStopSec"]) > ClusterConfig(model="m").drain_timeout + STOP_S


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_it() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(UNIT)], capture_output=True, text=True, timeout=60, check=False
    )
    said = [line for line in done.stderr.splitlines() if "is not executable" not in line and UNIT.name in line]
    assert said == []
