"""`tandem doctor`: what is missing is found, and there is a word on what to do."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cluster import doctor, doctor_transfer
from tandem.cluster.cli import app
from tandem.cluster.doctor import Check, Options, checks


def found(options: Options | None = None) -> dict[str, Check]:
    return {check.name: check for check in checks(options or Options(ports=(), measure_transfer=False))}


def test_every_verdict_but_ok_comes_with_advice() -> None:
    seen = found(Options(ports=(1,), redis_url="redis://u:secret@127.0.0.1:1/0", measure_transfer=False))
    assert {"compiler", "cpu", "memory", "gpu", "shared memory", "open files", "cache", "redis"} <= seen.keys()
    assert all(check.advice for check in seen.values() if check.verdict != "ok")
    assert seen["redis"].verdict == "fail"
    assert "secret" not in seen["redis"].found


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.kernels import compiler

    compiler.find_compiler.cache_clear()
    monkeypatch.setenv("TANDEM_CXX", "/nowhere/g++")
    assert found()["compiler"].verdict == "fail"
    compiler.find_compiler.cache_clear()


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert found(Options(ports=(port,), measure_transfer=False))[f"port {port}"].verdict == "warn"
    assert found(Options(ports=(port,), measure_transfer=False))[f"port {port}"].verdict == "ok"


def test_a_port_that_is_none() -> None:
    answer = CliRunner().invoke(app, ["doctor", "--no-measure", "--port", "99999"])
    assert answer.exit_code == 2


def test_rays_token_may_be_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "ray-token"
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    assert found()["ray token"].verdict == "fail"
    file.write_text("0123456789abcdef" * 4 + "\n")
    assert found()["ray token"].verdict == "ok"


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tried, not asked: root may write everywhere, and cannot."""
    file = tmp_path / "file"
    file.touch()
    for folder in (file, Path("/proc/nothing")):
        monkeypatch.setenv("TANDEM_CACHE_DIR", str(folder))
        assert found()["cache"].verdict == "fail"


def test_a_machine_that_is_too_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_cpu_flags", set)
    monkeypatch.setattr(doctor, "MIN_MEMORY_BYTES", 1 << 60)
    monkeypatch.setattr(doctor, "MIN_SHARED_MEMORY_BYTES", 1 << 60)
    monkeypatch.setattr(doctor, "MIN_OPEN_FILES", 1 << 40)
    monkeypatch.setattr(doctor, "MIN_CACHE_BYTES", 1 << 60)
    seen = found()
    for name, verdict in (("cpu", "warn"), ("memory", "warn"), ("shared memory", "fail"), ("open files", "warn")):
        assert seen[name].verdict == verdict
    assert seen["cache"].verdict == "warn"


def test_the_command_fails_when_something_is_missing() -> None:
    runner = CliRunner()
    good = runner.invoke(app, ["doctor", "--no-measure", "--json"])
    assert good.exit_code == 0
    assert {check["name"] for check in json.loads(good.stdout)} >= {"cpu", "redis", "port 8000"}
    bad = runner.invoke(app, ["doctor", "--no-measure", "--redis-url", "redis://127.0.0.1:1"])
    assert bad.exit_code == 1
    assert "does not answer" in bad.stdout


async def test_kv_is_really_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_transfer, "NUM_BLOCKS", 4)
    measured = await doctor_transfer.measure()
    assert measured["transport"] in ("cma", "tcp", "posix", "sysv")
    assert measured["gigabytes_per_s"] > 0
