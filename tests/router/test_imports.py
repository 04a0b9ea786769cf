"""The gateway stays small: no torch, no Ray, no transformers behind it."""

from __future__ import annotations

import json
import subprocess
import sys

FORBIDDEN = {"torch", "ray", "transformers", "nixl", "nixl_cu12"}
PROGRAM = """
import json, pkgutil, importlib, sys
import tandem.router
for module in pkgutil.walk_packages(tandem.router.__path__, "tandem.router."):
    importlib.import_module(module.name)
print(json.dumps(sorted(name.partition(".")[0] for name in sys.modules)))
"""


def test_gateway_loads_no_heavy_library() -> None:
    run = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(json.loads(run.stdout))
    assert "fastapi" in loaded
    assert not loaded & FORBIDDEN
