"""Compiling on first use: once, however many ask; with one line that says what to do where it cannot be done."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.kernels import compiler
from tandem.kernels.compiler import BuildError
from tandem.kernels.cpu import build
from tandem.workers.backend import create_ops
from tandem.workers.errors import UserError

COUNTING_COMPILER = """#!/bin/sh
echo "$@" >> {log}
exec g++ "$@"
"""


def forget() -> None:
    """What this process knows of compilers and machines; the caches are per process, the tests are not."""
    known = (compiler.find_compiler, compiler.compiler_version, build.build_key, build.code_version, build._survives)
    for cached in known:
        cached.cache_clear()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder."""
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(build.LEVEL_VARIABLE, raising=False)
    monkeypatch.delenv(compiler.COMPILER_VARIABLE, raising=False)
    forget()
    yield tmp_path
    forget()


@pytest.fixture
def compiler_log(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A g++ that writes down its calls."""
    log, wrapper = fresh / "calls", fresh / "counting-g++"
    wrapper.write_text(COUNTING_COMPILER.format(log=log))
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv(compiler.COMPILER_VARIABLE, str(wrapper))
    monkeypatch.setattr(build, "_COMMON_FLAGS", ("-std=c++17", "-O0", "-fPIC", "-w"))
    return log


PROGRAM = """
from tandem.kernels.cpu import build
build._COMMON_FLAGS = ("-std=c++17", "-O0", "-fPIC", "-w")
print(build.build("plain"))
"""


def test_processes_that_start_together_compile_once(compiler_log: Path) -> None:
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    outputs = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    (library,) = outputs
    assert Path(library).exists()
    links = [line for line in compiler_log.read_text().splitlines() if "-shared" in line]
    assert len(links) == 1
    calls = compiler_log.read_text()
    assert str(build.build("plain")) == library
    assert compiler_log.read_text() == calls + "--version\n"


def test_the_key_follows_sources_flags_and_compiler(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = {build.build_key("plain"), build.build_key("avx2")}
    copy = tmp_path / "native"
    copy.mkdir()
    for path in build.source_files():
        (copy / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "NATIVE", copy)
    forget()
    assert build.build_key("plain") in keys
    (copy / "op.h").write_text((copy / "op.h").read_text() + "// another\n")
    forget()
    keys.add(build.build_key("plain"))
    monkeypatch.setattr(build, "_COMMON_FLAGS", (*build._COMMON_FLAGS, "-g"))
    forget()
    keys.add(build.build_key("plain"))
    assert len(keys) == 4


def test_what_is_computed_follows_sources_and_flags_but_not_the_compiler(
    compiler_log: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Machines with different compilers may share a cluster; those with other kernels may not."""
    key, version = build.build_key("plain"), build.code_version()
    monkeypatch.delenv(compiler.COMPILER_VARIABLE)
    forget()
    assert (build.build_key("plain") != key, build.code_version()) == (True, version)
    versions = {version}
    copy = tmp_path / "native"
    shutil.copytree(build.NATIVE, copy)
    (copy / "op.h").write_text((copy / "op.h").read_text() + "// another\n")
    monkeypatch.setattr(build, "NATIVE", copy)
    forget()
    versions.add(build.code_version())
    monkeypatch.setattr(build, "_COMMON_FLAGS", (*build._COMMON_FLAGS, "-ffp-contract=fast"))
    forget()
    versions.add(build.code_version())
    assert len(versions) == 3


def test_without_a_compiler_the_reference_serves_with_one_warning(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    said: list[str] = []
    with caplog.at_level(logging.WARNING):
        assert create_ops("cpu", said.append).name == "reference"
    assert not said
    (record,) = caplog.records
    assert "install g++" in record.getMessage()


def test_compiling_is_told(compiler_log: Path) -> None:
    said: list[str] = []
    build.build("plain", said.append)
    build.build("plain", said.append)
    assert said == ["compiling native ops (plain)"]


def test_a_compiler_that_is_named_but_missing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.COMPILER_VARIABLE, "/nowhere/g++")
    with pytest.raises(BuildError, match=r"/nowhere/g\+\+ \(TANDEM_CXX\) is not there"):
        build.build("plain")


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_COMMON_FLAGS", ("-fno-such-flag",))
    with pytest.raises(BuildError, match="no-such-flag"):
        build.build("plain")
    assert [path.suffix for path in compiler.cache_folder().iterdir()] == [".lock"]


def a_little_library(folder: Path, on_build: Callable[[], None] = lambda: None) -> Path:
    source = folder / "little.cpp"
    source.write_text('extern "C" int seven() { return 7; }\n')
    return compiler.build_once(folder / "cache" / "little.so", [source], ["-fPIC"], on_build)


@pytest.mark.parametrize("damage", ["cut", "emptied", "flipped", "not ours"])
def test_what_is_damaged_is_compiled_anew(fresh: Path, damage: str) -> None:
    library = a_little_library(fresh)
    whole = library.read_bytes()
    library.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "emptied": b"",
            "flipped": whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
            "not ours": whole[: -compiler._SEAL_BYTES],
        }[damage]
    )
    told: list[str] = []
    for _ in range(2):
        a_little_library(fresh, lambda: told.append("compiling"))
    assert told == ["compiling"]
    assert ctypes.CDLL(str(library)).seven() == 7


def test_what_a_killed_process_left_is_cleared_away(fresh: Path) -> None:
    """Its own, but nothing of a library that somebody else may be compiling now."""
    left, others = fresh / "cache" / ".build-little-abc", fresh / "cache" / ".build-other-abc"
    for folder in (left, others):
        folder.mkdir(parents=True)
        (folder / "half.o").write_bytes(b"half")
    a_little_library(fresh)
    assert (left.exists(), others.exists()) == (False, True)


def test_a_compiler_that_is_killed_is_said_to_be(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a system that has run out of memory, as a rule: it has written nothing."""
    killed = fresh / "killed-g++"
    killed.write_text('#!/bin/sh\n[ "$1" = --version ] || kill -9 $$\n')
    killed.chmod(0o755)
    monkeypatch.setenv(compiler.COMPILER_VARIABLE, str(killed))
    with pytest.raises(BuildError, match="was ended by SIGKILL: is there too little memory"):
        build.build("plain")


def test_the_linkers_reason_comes_before_its_callers(fresh: Path) -> None:
    output = "/usr/bin/ld: final link failed: No space left on device\ncollect2: error: ld returned 1 exit status\n"
    assert compiler._failure(output, [1]).endswith("No space left on device")


def test_what_cannot_be_loaded_is_said_and_no_other_level_tried(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder that is mounted noexec."""
    monkeypatch.setattr(build, "build", lambda level, on_progress=None: fresh / f"{level}.so")
    with pytest.raises(BuildError, match=rf"cannot be loaded .*{fresh}/.*\.so: cannot open shared object file"):
        build.level_of_this_machine()


def test_a_level_that_is_listed_but_refused_is_passed_over(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe dies in a child; the next level is taken."""
    tried = []

    def can_run(level: str, on_progress: object = None) -> bool:
        tried.append(level)
        return level == "plain"

    monkeypatch.setattr(build, "can_run", can_run)
    assert build.level_of_this_machine() == "plain"
    assert tried[-1] == "plain"
    assert tried == [level for level in build.LEVELS if level in tried]


def test_a_probe_that_dies_means_no(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build", lambda level, on_progress=None: Path("any.so"))
    monkeypatch.setattr(build, "_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert not build.can_run("plain")
    forget()
    monkeypatch.setattr(build, "_PROBE", "")
    assert build.can_run("plain")


def test_a_level_that_is_asked_for_is_taken_or_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the next one, nor plain torch: others compute at that level, too."""
    monkeypatch.setenv(build.LEVEL_VARIABLE, "avx2")
    monkeypatch.setattr(build, "can_run", lambda level, on_progress=None: level == "plain")
    assert build.level_of_this_machine(wanted="plain") == "plain"
    with pytest.raises(UserError, match=r"--cpu-level avx2: this machine cannot run the native ops \(avx2\)"):
        create_ops("cpu", cpu_level="avx2")


def test_an_unknown_level_is_refused(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.LEVEL_VARIABLE, "sse9")
    with pytest.raises(BuildError, match=r"TANDEM_CPU_LEVEL must be one of amx_bf16, .*'sse9'"):
        build.level_of_this_machine()
