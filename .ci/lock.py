"""Writes requirements.lock: exact versions of all that Tandem, its tests and its build need, and who needs it.

The closure of pyproject.toml's requirements (with the `dev` extra and the build backend) over what is installed here.
A package that nothing asks for any more therefore leaves by itself. Local version labels ("+cpu") are dropped: which
build of torch fits is the index's business.
"""

import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"

HEADER = """\
# Every package that Tandem runs, is tested and is built with; written by `make lock`, installed by `make install`.
# pip is told not to resolve anything, so this list is complete.
"""


def roots() -> list[tuple[Requirement, str]]:
    """What pyproject.toml asks for, and in which of its lists."""
    content = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    project = content["project"]
    lists = {
        "tandem": project["dependencies"],
        "tandem's tests": project["optional-dependencies"]["dev"],
        "tandem's build": content["build-system"]["requires"],
    }
    return [(Requirement(text), parent) for parent, texts in lists.items() for text in texts]


def closure(waiting: list[tuple[Requirement, str]]) -> dict[str, set[str]]:
    """Names of all packages that these need, each with the names of those that ask for it."""
    needed_by: dict[str, set[str]] = {}
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, parent = waiting.pop()
        name = canonicalize_name(requirement.name)
        needed_by.setdefault(name, set()).add(parent)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in distribution(name).requires or []:
                child = Requirement(text)
                if child.marker is None or child.marker.evaluate({"extra": extra}):
                    waiting.append((child, name))
    return needed_by


def main() -> None:
    needed_by = closure(roots())
    sys.stdout.write(HEADER)
    for name in sorted(needed_by):
        parents = ", ".join(sorted(needed_by[name]))
        pin = f"{name}=={Version(distribution(name).version).public}"
        sys.stdout.write(f"{pin:<45} # {parents}\n")


if __name__ == "__main__":
    main()
