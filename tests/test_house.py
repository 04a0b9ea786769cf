"""The rules of the house: who may import whom, what the wheel holds, what we depend on."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("kernels", "workers", "router", "cluster")
"""Each may import itself and those before it."""

FORBIDDEN = {
    "kernels": {"ray", "redis", "fastapi", "starlette", "uvicorn", "httpx", "transformers"},
    "workers": {"ray", "redis", "fastapi", "starlette", "uvicorn", "httpx"},
    "router": {"ray", "torch", "transformers"},
    "cluster": set[str](),
}


@cache
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def sources() -> Iterator[tuple[str, Path]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield folder, path


def imports(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, at whatever depth; relative ones begin with a dot."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def test_each_folder_imports_itself_and_those_before_it() -> None:
    wrong = []
    for folder, path in sources():
        allowed = FOLDERS[: FOLDERS.index(folder) + 1]
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "" or (parts[0] == "tandem" and len(parts) > 1 and parts[1] not in allowed):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
            if parts[0] in FOLDERS or parts[0] in FORBIDDEN[folder]:
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []


def test_the_package_list_is_the_folders_that_hold_an_init_file() -> None:
    present = {path.parent.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")}
    listed = pyproject()["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted("tandem." + ".".join(folder.parts) for folder in present)
    assert {path.parent.relative_to(ROOT) for _, path in sources()} == present  # no folder of modules without one


def test_every_package_that_is_imported_is_declared() -> None:
    declared = {distribution_name(text) for text in pyproject()["project"]["dependencies"]}
    providers = packages_distributions()
    missing = set()
    for _, path in sources():
        for module in {name.split(".")[0] for name in imports(path)} - {"tandem", ""} - sys.stdlib_module_names:
            if not declared & {distribution_name(provider) for provider in providers.get(module, [module])}:
                missing.add(f"{path.relative_to(ROOT)}: {module}")
    assert missing == set()


def test_the_lock_pins_everything_that_is_declared() -> None:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin) for pin in pins)
    project = pyproject()["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {distribution_name(text) for text in declared} <= {pin.split("==")[0] for pin in pins}
    assert {"torch==2.13.0", "nixl-cu12==1.5.1"} <= set(pins)


def test_no_file_names_a_package_index() -> None:
    for path in (ROOT / "Makefile", ROOT / "requirements.lock", ROOT / "pyproject.toml", ROOT / ".ci" / "run"):
        assert not re.search(r"https?://|index-url|find-links", path.read_text(encoding="utf-8")), path


def distribution_name(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder is left beside the sources, nor an old one used."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(source / "dist"), str(source))
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.mark.parametrize("folder", ["router", "cluster", "cluster/bench"])
def test_a_folders_note_names_its_files(folder: str) -> None:
    note = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in (ROOT / folder).glob("*.py")} - {"__init__.py"}
    assert not {name for name in names if name not in note}


def test_the_wheel_adds_only_tandem_and_starts(wheel: Path, tmp_path: Path) -> None:
    """Into an empty environment, with our dependencies lent to it through a .pth file."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site_packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    pip(sys.executable, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    added = {path.name for path in site_packages.iterdir()}
    assert {name for name in added if not name.endswith(".dist-info")} == {"tandem"}

    # a plain path, not a site folder: the .pth file of our own editable install must stay out
    (ours,) = {str(Path(module.__file__ or "").parent.parent) for module in (pytest,)}
    (site_packages / "lent.pth").write_text(ours)
    shown = run(str(tmp_path / "venv" / "bin" / "tandem"), "--help")
    assert "serve" in shown
    where = run(str(python), "-P", "-c", "import tandem.cluster.cli as cli; print(cli.__file__)")
    assert Path(where.strip()).is_relative_to(site_packages)


def pip(python: str, *arguments: str) -> None:
    run(python, "-P", "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments)


def run(*command: str) -> str:
    """Standard output of a command that must succeed. Away from the checkout, whose folders would shadow modules."""
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_tests_that_share_processes_are_in_groups(request: pytest.FixtureRequest) -> None:
    """pytest-xdist says by a test's name which group it is in; with some versions of pytest it cannot."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("one process runs all tests")
    assert request.node.nodeid.endswith("@tests/test_house.py")
