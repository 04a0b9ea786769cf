"""Whether this Python can run the checks: prerequisites.py [--dry-run]. Prints what is missing, and exits with 1.

Looks for files: importing torch takes seconds, and run.sh asks several Pythons.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

PACKAGES = ("torch", "triton", "numpy", "msgspec", "xxhash", "llguidance", "safetensors", "psutil", "platformdirs")
"""Without NIXL, what needs it is skipped."""


def missing(*, is_dry: bool) -> list[str]:
    """A dry run needs no CUDA."""
    found = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if sys.version_info < (3, 11):  # noqa: UP036 (it may be run by any)
        found.append("a Python of 3.11 or newer")
    if not is_dry and "torch" not in found and _is_without_cuda():
        found.append("CUDA in its torch")
    return found


def _is_without_cuda() -> bool:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search(r"(?m)^cuda\b.*=\s*None", text) is not None


if __name__ == "__main__":
    absent = [] if "--list" in sys.argv else missing(is_dry="--dry-run" in sys.argv)
    sys.stdout.write(", ".join(absent))
    sys.exit(bool(absent))
