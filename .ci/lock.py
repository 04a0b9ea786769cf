"""Writes requirements.lock: exact versions of all that Tandem, its tests and its build need, and who needs it.

The closure of tandem-serve's requirements (with the `dev` extra) and of the build backend over what is installed here.
A package that nothing asks for any more therefore leaves by itself. Local version labels ("+cpu") are dropped: which
build of torch fits is the index's business.
"""

import sys
from importlib.metadata import distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOTS = ("tandem-serve[dev]", "setuptools")

HEADER = """\
# Every package that Tandem runs, is tested and is built with; written by `make lock`, installed by `make install`.
# pip is told not to resolve anything, so this list is complete.
"""


def closure(roots: tuple[str, ...]) -> dict[str, set[str]]:
    """Names of all packages that the roots need, each with the names of those that ask for it."""
    needed_by: dict[str, set[str]] = {}
    waiting = [(Requirement(root), "") for root in roots]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, parent = waiting.pop()
        name = canonicalize_name(requirement.name)
        needed_by.setdefault(name, set()).update({parent} - {""})
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
    needed_by = closure(ROOTS)
    del needed_by["tandem-serve"]
    sys.stdout.write(HEADER)
    for name in sorted(needed_by):
        parents = ", ".join(sorted(needed_by[name])) or "the build"
        pin = f"{name}=={Version(distribution(name).version).public}"
        sys.stdout.write(f"{pin:<45} # {parents}\n")


if __name__ == "__main__":
    main()
